"""What reads the output of a program: the protocol of an adapter. One file for each kind of program.

An adapter is a class `Reader` in the file of its name. It gets every line of standard output, or of
engine.command.file, in order, and returns what the line says about training. It keeps no clock: the runner times steps
by the arrival of their lines. Values that are not finite are passed on, because the runner ends such a trial.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from bench.contract.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class MllogRecord:
    """A valid MLLOG record of the program."""

    event_type: str
    key: str
    value: Any
    metadata: Mapping[str, Any]
    time_ms: float
    """By the program's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a line says. None: nothing about this."""

    step: int | None = None
    """Optimizer steps done, counted from the start of the trial, earlier attempts included."""
    loss: float | None = None
    """Training loss at this step, nats per token."""
    eval_loss: float | None = None
    """Evaluation loss; without `step` it is that of the newest step."""
    tokens: float | None = None
    """Tokens of one step, of all ranks."""
    step_time_s: float | None = None
    """The program's own time of one step."""
    eval_time_s: float | None = None
    total_time_s: float | None = None
    """The program's own time of its whole training."""
    resumed: int | None = None
    """The step of the checkpoint from which the program continues."""
    record: MllogRecord | None = None
    """Set by the adapter mllog only, then nothing else is."""


class Unreadable(ValueError):
    """A line that this adapter must be able to read, but that is damaged; the text has the reason."""


class Reader(Protocol):
    """An adapter. Its constructor takes the settings and the folder of {output}'s run, with placeholders filled."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Reported | None:
        """Return what a line says; None if it says nothing. The line has no line break.

        Raises:
            Unreadable: the line is one of this program's records, but damaged.
        """

    def finished(self) -> Reported | None:
        """Return what only the end of the program shows, such as a file that it has written.

        Raises:
            Unreadable: the file contradicts the lines, or cannot be read.
        """


def reader_of(program: Program) -> Reader:
    """Return the reader of a program."""
    module = importlib.import_module(f"jobs.command.adapters.{program.adapter.name}")
    return cast("Reader", module.Reader(program))
