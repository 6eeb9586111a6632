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
    """The name of a measurement."""
    title: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement of one arm of a study. The values are from all runs of this arm."""

    mark: Mark
    """Empty: measured; *: scaled from a shorter run; ~: estimated by the plan; X: not advisable; -: no result."""
    value: float | None = None
    """The mean over runs."""
    deviation: float | None = None
    """The sample standard deviation over runs. None if there are fewer than two runs."""
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
    """`low` and `high` are the bounds of the 95 % interval of a coefficient or of the mean."""

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
    """The correct value, even if the document has a misprint. None if the mark is X or -."""
    printed: str
    """As printed in the document."""
    reason: str = ""
    """Why the value differs from the printed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table: one arm of the study."""

    arm: str
    labels: Mapping[str, str]
    """Values that identify the arm, by axis: {"model": "7B", "method": "Z3"}."""
    cells: Mapping[str, Cell]
    """The keys are the measurements of the columns."""
    published: Mapping[str, tuple[Published, ...]] = field(default_factory=dict)
    """The keys are the measurements of the columns."""
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
    """A platform in a table of several platforms. It is a cluster of the study, or a platform of a published
    document."""

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
    """Each row has two lists: the values of `row_labels`, and the arm of each cell. None means an empty cell."""


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
    """The plan of an arm of a study. A number is None if the plan does not estimate this number."""

    name: str
    mark: Mark = Mark.measured
    """The mark of the arm's cells if the arm does not run: X or -."""
    reason: str = ""
    """Why the arm does not run."""
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
    """The name of the backend."""
    fingerprint: str = ""
    """A checksum of everything that affects the arm's measurements."""
    num_ranks: int | None = None
    num_nodes: int | None = None
    device: str = ""
    model: str = ""
    """The model that the command line sets for the arm, if its labels name another model."""
    fits: bool | None = None
    """Whether the arm fits into GPU memory, by the estimate of the plan. Only set if a statement of the study is about
    memory."""
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
    """If the study searches the largest micro-batch: the micro-batches in the order in which they are tried."""
    steps: int | None = None
    step_time_ms: float | None = None
    tokens_s_gpu: float | None = None
    memory_gib: float | None = None
    capacity_gib: float | None = None
    weights_gb: float | None = None
    """The weights of the whole model in the precision of the config, in 10⁹ bytes."""
    states_gib: float | None = None
    """The weights, the gradients and the two moments of Adam, all in the precision of the config."""
    gpus_of_40_gb: int | None = None
    """The number of GPUs of 40 GB that can hold `states_gib`, rounded up to a power of two."""
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
