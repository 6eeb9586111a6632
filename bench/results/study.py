"""The tables of a study as data: measurements of each arm, published figures, and comparisons of arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.results.published import PublishedPlatform
from bench.results.reference import ReferenceResult, ReferenceVerdict
from bench.results.statement import StatementResult

if TYPE_CHECKING:
    from bench.results.comparison import Comparison


class Mark(StrEnum):
    """The kind of value in a cell; a mark is shown next to, or in place of, the number."""

    measured = ""
    calculated = "*"
    """Scaled from a shorter run; the reason has the numbers of steps."""
    estimated = "~"
    """Estimated by the plan, without a run."""
    not_advisable = "X"
    no_result = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The measurement in a column."""

    measurement: str
    """A name of `bench.results.Measurement`."""
    title: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement of one arm, over its runs."""

    mark: Mark
    value: float | None = None
    """The mean over runs."""
    deviation: float | None = None
    """The sample standard deviation over runs; None for fewer than two."""
    values: tuple[float, ...] = ()
    """The value of each run, in the order of blocks."""
    reason: str = ""
    """Why there is no value, or how it was calculated."""
    runs: tuple[str, ...] = ()
    """The run folders, relative to the folder of the study."""
    text: str = ""
    """The text of a cell that does not show mean and deviation, such as a coefficient with its interval."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval of a coefficient, or of the mean in a column that shows it."""

    @property
    def has_interval_of_mean(self) -> bool:
        """Whether the interval is that of the mean, not of a coefficient."""
        return self.low is not None and not self.text

    @property
    def n(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published figure."""

    publication: str
    """The name of a file in conf/published."""
    value: float | None
    """The correct value, even if the document has a misprint; None for X and -."""
    printed: str
    """As printed in the document."""
    reason: str = ""
    """Why the value differs from the printed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm."""

    arm: str
    labels: Mapping[str, str]
    """Values that identify the arm, by axis: {"model": "7B", "method": "Z3"}."""
    cells: Mapping[str, Cell]
    """By the measurement of the column."""
    published: Mapping[str, tuple[Published, ...]] = field(default_factory=dict)
    """By the measurement of the column."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Hardware and software that are the same in all runs: GPU, driver, NCCL, image digest, commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The source of published figures, and their hardware."""

    name: str
    title: str
    place: str
    """Page and table."""
    hardware: str
    date: str
    platform: PublishedPlatform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A platform in a table of several platforms: a cluster of the study, or a platform of a document without runs."""

    name: str
    """The heading of its column."""
    cluster: str = ""
    """Empty if the platform has no runs."""
    folder: str = ""
    hardware: str = ""
    date: str = ""
    commit: str = ""
    num_runs: int = 0
    publications: tuple[str, ...] = ()
    """The published tables of this platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of one measurement, whose rows and columns are labels."""

    title: str
    column: Column
    row_labels: tuple[str, ...]
    """Label names; each row is one combination of their values."""
    column_labels: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    """The values of column_labels of each column."""
    rows: tuple[tuple[tuple[str, ...], tuple[str | None, ...]], ...]
    """The values of row_labels of each row, and for each column the arm in that cell; None for an empty cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The comparison of two arms."""

    first: str
    second: str
    measurement: str
    comparison: "Comparison | None"
    reason: str = ""
    """Why there is no comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study, independent of conf/ and of the cluster."""

    name: str
    title: str
    question: str
    source: str
    """The document and tables that the study repeats, or "ours"."""
    folder: str
    """The absolute path of the folder of the study."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    """One row per arm, in the order of the study."""
    tables: tuple[Table, ...]
    """Empty if the study has only the table with one row per arm and one column per measurement."""
    differences: tuple[Difference, ...]
    publications: tuple[Publication, ...]
    cluster: str
    command: str
    """The command that continues the study."""
    commit: str
    """The commits in the logs, separated by commas; empty if no log has one."""
    date: str
    """The dates of the first and last run in UTC, as 2026-11-22 or 2026-11-22 to 2026-11-23; empty without runs."""
    hardware: str
    """The hardware in the logs; empty without runs."""
    order: tuple[tuple[str, ...], ...]
    """The arms of each block in run order."""
    margin: float
    notes: tuple[str, ...] = ()
    """Remarks on all numbers: the measured steps, the number of missing runs."""
    statements: tuple[StatementResult, ...] = ()
    """The statements of the study with their verdicts."""
    references: tuple[ReferenceResult, ...] = ()
    """The reference values of the study with their verdicts."""
    device: str = ""
    """The GPU for which the arms were planned; empty if they have several."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """NCCL's variables that all arms share."""
    platforms: tuple[Platform, ...] = ()
    """The platforms in a table of several; empty for a study on one cluster."""

    @property
    def meets_references(self) -> bool:
        """Whether every reference value of the study is reached; True without any."""
        return all(one.verdict is ReferenceVerdict.passed for one in self.references)

    def row(self, arm: str) -> Row:
        return next(row for row in self.rows if row.arm == arm)

    def publications_of(self, table: Table, arms: Sequence[str | None]) -> list[Published]:
        """Return the published figures of these arms."""
        rows = [self.row(arm) for arm in arms if arm is not None]
        return [one for row in rows for one in row.published.get(table.column.measurement, ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedArm:
    """The plan of an arm; numbers are None without a plan, or if the plan has no estimate."""

    name: str
    mark: Mark = Mark.measured
    """The mark of the arm's cells if the arm does not run: X or -."""
    reason: str = ""
    """Why it does not run."""
    note: str = ""
    """The remark of the study on this arm."""
    is_missing: bool = False
    """Whether the arm cannot run because an engine, cluster, kind or task does not exist."""
    runs: bool = True
    changed: tuple[str, ...] = ()
    """Overrides of the command line that change the work of the arm. The arm then has no published values."""
    before_launch: tuple[str, ...] = ()
    """In a dry run: things that the site must provide before a launch, such as paths and an image."""
    backend: str = ""
    """The name of its backend."""
    fingerprint: str = ""
    """A checksum of everything that affects the arm's measurements."""
    num_ranks: int | None = None
    num_nodes: int | None = None
    device: str = ""
    model: str = ""
    """The model that the command line sets for the arm, if its labels name another model."""
    fits: bool | None = None
    """Whether the arm fits into GPU memory by the plan's estimate; only set for arms of statements about memory."""
    needed_gib: float | None = None
    """The estimated memory of the arm, even if the arm does not fit."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """NCCL's variables of the cluster, which distinguish platforms with the same GPU."""
    price_per_gpu_hour: float | None = None
    currency: str = ""
    layout: str = ""
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    batches: tuple[int, ...] = ()
    """Micro-batches in the order in which they are tried, if the study searches the largest one."""
    steps: int | None = None
    step_time_ms: float | None = None
    tokens_s_gpu: float | None = None
    memory_gib: float | None = None
    capacity_gib: float | None = None
    weights_gb: float | None = None
    """The weights of the whole model in the precision of the config, in 10⁹ bytes."""
    states_gib: float | None = None
    """Weights, gradients and both moments of Adam, all in this precision."""
    gpus_of_40_gb: int | None = None
    """The smallest power of two of such GPUs that hold these states."""
    walltime_min: int | None = None
    """The walltime of the job of one run."""

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of the steps of one run, by the estimated step time; without start-up, loading and evaluation."""
        if self.step_time_ms is None or self.steps is None or self.num_ranks is None:
            return None
        return self.step_time_ms * self.steps * self.num_ranks / 3.6e6

    @property
    def cost(self) -> float | None:
        """The price of these GPU hours; None without a price."""
        return (
            None if self.gpu_hours is None or not self.price_per_gpu_hour else self.gpu_hours * self.price_per_gpu_hour
        )
