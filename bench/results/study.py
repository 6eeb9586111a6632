"""The tables of a study as data: what each arm measured, beside what is published; how arms compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.results.comparison import Comparison


class Mark(StrEnum):
    """What a cell holds. The documents' signs stand before or in place of its number."""

    measured = ""
    calculated = "*"
    """From a shorter run; the reason says from which."""
    estimated = "~"
    """By the plan: nothing ran."""
    not_advisable = "X"
    no_result = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What the cells of a column hold."""

    measurement: str
    """A name of `bench.results.Measurement`."""
    title: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number of one arm, over its runs."""

    mark: Mark
    value: float | None = None
    """The mean over runs."""
    deviation: float | None = None
    """The sample standard deviation over runs; None for fewer than two."""
    values: tuple[float, ...] = ()
    """Of each run, in the order of blocks."""
    reason: str = ""
    """Why there is no number, or how it was calculated."""
    runs: tuple[str, ...] = ()
    """The run folders, relative to the study's."""
    text: str = ""
    """The number as it is shown, where that is not its mean and its deviation: a coefficient with its interval."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval of a coefficient."""

    @property
    def n(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published figure."""

    publication: str
    """The name of a file in conf/published."""
    value: float | None
    """What is meant: the corrected figure where the document is misprinted. None for X and -."""
    printed: str
    """As the document has it."""
    reason: str = ""
    """Why the value is not the printed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm."""

    arm: str
    labels: Mapping[str, str]
    """What sets the arm apart, by the names of the study's axes: {"model": "7B", "method": "Z3"}."""
    cells: Mapping[str, Cell]
    """By the measurement of the column."""
    published: Mapping[str, tuple[Published, ...]] = field(default_factory=dict)
    """By the measurement of the column."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Hardware and software of the runs, where they agree: GPU, driver, NCCL, image digest, commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Where published figures stand, and what they were measured on."""

    name: str
    title: str
    place: str
    """Page and table."""
    hardware: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One measurement of all arms, or of some, whose rows and columns are labels."""

    title: str
    column: Column
    row_labels: tuple[str, ...]
    """Names of labels: each row is one combination of their values."""
    column_labels: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    """The values of column_labels, for each column."""
    rows: tuple[tuple[tuple[str, ...], tuple[str | None, ...]], ...]
    """The values of row_labels, and for each column the arm whose number stands there; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What the runs of two arms say about each other."""

    first: str
    second: str
    measurement: str
    comparison: "Comparison | None"
    reason: str = ""
    """Why there is no comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """All that is to be shown of a study; nothing of it needs conf/ or a cluster."""

    name: str
    title: str
    question: str
    source: str
    """The document and tables whose question it asks, or "ours"."""
    folder: str
    """Absolute; the runs of cells lie in it."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    """One for each arm, in the study's order."""
    tables: tuple[Table, ...]
    """None: the table of a study has one row for each arm, and one column for each measurement."""
    differences: tuple[Difference, ...]
    publications: tuple[Publication, ...]
    cluster: str
    command: str
    """What one types to go on with it."""
    commit: str
    """Of the code that ran, by the logs; several are separated by commas, and it is empty where none says so."""
    date: str
    """Of the first and last run in UTC, as 2026-11-22 or 2026-11-22 to 2026-11-23; empty where there is none."""
    hardware: str
    """By the logs; empty where there is none."""
    order: tuple[tuple[str, ...], ...]
    """The arms of each block, in the order in which they run."""
    margin: float
    notes: tuple[str, ...] = ()
    """What holds for all numbers: over which steps they are taken, how many runs are missing."""

    def row(self, arm: str) -> Row:
        return next(row for row in self.rows if row.arm == arm)

    def publications_of(self, table: Table, arms: Sequence[str | None]) -> list[Published]:
        """Return the published figures beside the numbers of these arms."""
        rows = [self.row(arm) for arm in arms if arm is not None]
        return [one for row in rows for one in row.published.get(table.column.measurement, ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedArm:
    """What the plan of an arm says, before it runs; numbers are None where there is no plan, or it cannot tell."""

    name: str
    mark: Mark = Mark.measured
    """Of its cells, if it does not run: X or -."""
    reason: str = ""
    """Why it does not run."""
    note: str = ""
    """What the study says of it."""
    is_missing: bool = False
    """It does not run since an engine, cluster, kind or task that it names does not exist."""
    runs: bool = True
    backend: str = ""
    """The name of what starts its ranks."""
    fingerprint: str = ""
    """Differs whenever what it measures does."""
    num_ranks: int | None = None
    num_nodes: int | None = None
    device: str = ""
    layout: str = ""
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    batches: tuple[int, ...] = ()
    """Micro-batches in the order in which they are tried, where the study asks for the largest that fits."""
    steps: int | None = None
    step_time_ms: float | None = None
    tokens_s_gpu: float | None = None
    memory_gib: float | None = None
    capacity_gib: float | None = None
    walltime_min: int | None = None
    """Of the job of one run."""

    @property
    def gpu_hours(self) -> float | None:
        """Of the steps of one run, by the estimated step time; without starting, loading and evaluating."""
        if self.step_time_ms is None or self.steps is None or self.num_ranks is None:
            return None
        return self.step_time_ms * self.steps * self.num_ranks / 3.6e6
