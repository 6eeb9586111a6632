"""What binds a trial's log to the attempt that writes it.

The ledger draws a nonce for each attempt and leaves it beside the ranks' logs; rank 0 writes it as the first record.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.contract import json_files, run_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One attempt of one trial."""

    nonce: str
    trial: int
    attempt: int
    """Counted from 1."""


def save(folder: Path, binding: Binding) -> None:
    """Write the binding where rank 0 looks for it."""
    path = folder / run_files.binding(binding.trial)
    path.parent.mkdir(parents=True, exist_ok=True)
    json_files.write(path, asdict(binding))


def load(folder: Path, trial: int) -> Binding | None:
    """Return what a trial's log is bound to; None where nobody has opened an attempt, as for ranks started by hand."""
    with suppress(TypeError):
        return Binding(**json_files.read_object(folder / run_files.binding(trial)))
    return None
