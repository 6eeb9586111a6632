"""Tables of published systems: CSV files, one system a row, after lines with # that name the source.

The tables of this package are in `data/`; a user's own, which `runstop published` writes, are in the user's folder.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, regular_files
from bench.errors import ConfigError
from bench.user_folder import user_folder

OWN = "mlperf"
"""The folder of a user's own tables, in the user's folder."""
_NAMES = ("benchmark", "round", "submitter", "system", "accelerator")
_COUNTS = ("num_gpus", "num_nodes", "global_batch_size", "tp", "pp", "cp", "num_runs", "num_failed", "eval_interval")
_NUMBERS = (*("olympic_minutes", "rcp_factor", "official_minutes", "mean_samples", "step_time_s", "tokens_s_gpu"),)
_REQUIRED = ("round", "submitter", "system", "accelerator", "num_gpus", "official_minutes")
COLUMNS = (
    *("benchmark", "round", "submitter", "system", "num_nodes", "num_gpus", "accelerator", "global_batch_size"),
    *("tp", "pp", "cp", "num_runs", "num_failed", "olympic_minutes", "rcp_factor", "official_minutes"),
    *("mean_samples", "eval_interval", "samples", "step_time_s", "tokens_s_gpu"),
)
"""Of a table that `text` writes. Shipped tables may lack some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A published system with its minutes to target; a field is None if it is not known."""

    benchmark: str
    round: str
    submitter: str
    system: str
    """Empty if the name of the submission is not known; so may be the submitter."""
    num_nodes: int | None = None
    num_gpus: int
    accelerator: str
    global_batch_size: int | None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    """Sizes of tensor, pipeline and context parallelism; in logs since ruleset 6.1.0."""
    num_runs: int | None
    """Runs in official_minutes: ten for a score; a single run is not a score."""
    num_failed: int | None
    """Runs that did not converge; one may count as the slowest."""
    olympic_minutes: float | None
    """Mean without the fastest and the slowest run."""
    rcp_factor: float | None
    """At least 1; above 1 if the runs converged faster than the reference."""
    official_minutes: float
    """The published score, olympic_minutes * rcp_factor; for a single run its logged minutes."""
    mean_samples: float | None
    """Mean samples to target of the runs that converged."""
    eval_interval: int | None = None
    """Samples between two evaluations."""
    samples: tuple[tuple[int, int], ...] = ()
    """(samples at the evaluation that reached the target, runs); empty if the table does not list them."""
    step_time_s: float | None
    """Mean inside training blocks."""
    tokens_s_gpu: float | None = None
    """Tokens of a second of training, evaluations not counted."""

    @property
    def name(self) -> str:
        """Round, submitter and system, as far as they are known."""
        known = f"{self.submitter} {self.system}".strip() or "unnamed system"
        return f"{self.round} {known}{'' if self.is_score else ' (one run, not a score)'}"

    @property
    def is_score(self) -> bool:
        """Whether official_minutes is a score, not the time of a single run."""
        return self.num_runs != 1


def own_tables() -> list[Path]:
    """Return the user's own tables."""
    return sorted((user_folder() / OWN).glob("*.csv"))


def read(table: Traversable | Path, *, benchmark: str) -> Iterator[System]:
    """Yield the systems of a benchmark; a table without a column `benchmark` is of this benchmark.

    Raises:
        ConfigError: the table cannot be read, or a cell has no value or a wrong one.
    """
    fix = "write the table again with `runstop published DIR --write`, or delete this file"
    try:
        lines = _text(table).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"this table of published systems cannot be read: {error}", where=str(table), fix=fix
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    rows = csv.DictReader(line for _, line in numbered)
    if missing := [name for name in _REQUIRED if name not in (rows.fieldnames or ())]:
        what = f"this table of published systems has no column {', '.join(missing)}"
        raise ConfigError(what, where=str(table), fix=fix)
    for (number, _), row in zip(numbered[1:], rows, strict=False):
        if (row.get("benchmark") or benchmark) != benchmark:
            continue
        try:
            yield _system({"benchmark": benchmark, **row})
        except (ValueError, TypeError) as error:
            what = f"a row of this table of published systems is damaged: {error}"
            raise ConfigError(what, where=f"{table}, line {number}", fix=fix) from None


def _text(table: Traversable | Path) -> str:
    return regular_files.read_text(table, follows_links=True) if isinstance(table, Path) else table.read_text("utf-8")


def _system(row: Mapping[str, str]) -> System:
    cells = {name: cell for name, cell in row.items() if cell and name is not None}
    if missing := [name for name in ("num_gpus", "official_minutes") if name not in cells]:
        raise ValueError(f"the row has no value for {' or '.join(missing)}")
    values: dict[str, Any] = {name: cells.get(name, "") for name in _NAMES}
    values |= {name: int(cells[name]) if name in cells else None for name in _COUNTS}
    values |= {name: float(cells[name]) if name in cells else None for name in _NUMBERS}
    pairs = (each.partition(":") for each in cells.get("samples", "").split())
    return System(**values, samples=tuple((int(at), int(runs)) for at, _, runs in pairs))


def text(systems: Iterable[System], *, notes: Iterable[str]) -> str:
    """Return a table with notes about its source before it."""
    written = io.StringIO()
    written.writelines(f"# {note}\n" for note in notes)
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(COLUMNS)
    rows.writerows([_cell(getattr(system, name)) for name in COLUMNS] for system in systems)
    return written.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{samples}:{runs}" for samples, runs in value)
    if isinstance(value, float):
        return f"{value:.7g}"
    return "" if value is None else str(value)


def require_writable(file: Path) -> None:
    """Raise ConfigError for a file that exists and is not such a table."""
    if file.is_dir():
        raise ConfigError("this path is a folder", where=str(file), fix=f"give a file, such as {file / 'v5.1.csv'}")
    if file.exists() and ",".join(COLUMNS) not in file.read_text("utf-8", errors="replace").splitlines():
        what = "this file exists, but is not a table of published systems"
        raise ConfigError(what, where=str(file), fix="give the name of a new file")


def write(file: Path, table: str) -> None:
    """Write a table; its folder is made.

    Raises:
        ConfigError: the file cannot be written, or is another file.
    """
    require_writable(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(file, table)
    except OSError as error:
        what = f"the table cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(file), fix="give another file") from None
