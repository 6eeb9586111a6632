"""The schema of conf/study/NAME.yaml.

YAML scalars are read as text and converted to the type of the field: under labels, `batch: 8` is the text "8".
"""

from collections.abc import Mapping
from enum import Enum

import msgspec


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the file; unknown keys are errors."""


class Arm(Part, frozen=True, kw_only=True):
    """One system, setting or size that is measured."""

    labels: dict[str, str] = {}
    """Values that identify the arm; tables and published figures select it by these."""
    overrides: tuple[str, ...] = ()


class Calculated(Part, frozen=True, kw_only=True):
    """A run of `steps` steps whose times are scaled to `of_steps` steps, and marked with *."""

    steps: int
    of_steps: int


class Case(Part, frozen=True, kw_only=True):
    """Settings for all arms whose labels match."""

    match: dict[str, str | tuple[str, ...]]
    """By label, the value or the possible values; the label `arm` is the name."""
    overrides: tuple[str, ...] = ()
    not_advisable: str | None = None
    """Why the arm does not run and its cells have an X."""
    leave_out: bool = False
    """Whether to remove the arm from the study."""
    note: str | None = None
    """A remark in the row of the arm."""
    calculated: Calculated | None = None


class Window(Part, frozen=True, kw_only=True):
    """Runs have skip_steps + steps steps; step time and throughput are measured over the last `steps` of them."""

    skip_steps: int
    steps: int


class MaxBatch(Part, frozen=True, kw_only=True):
    """Runs use the largest micro-batch up to this limit that fits by the plan, without gradient accumulation.

    If a run is out of memory, the next smaller one is tried (`bench.studies.plans`).
    """

    limit: int


class Jobs(Enum):
    """How runs are submitted to a queue."""

    each = "each"
    """Every run is a separate job, on any nodes."""
    shared = "shared"
    """Runs share one job and run one after another on the same nodes, so that nodes do not affect the comparison."""
    sequential = "sequential"
    """A run starts when the previous one has ended, on any backend: for backends that share the same machines."""

    @classmethod
    def _missing_(cls, value: object) -> "Jobs | None":
        return cls.sequential if value == "in_turn" else None  # the name in files of earlier versions


class ColumnSpec(Part, frozen=True, kw_only=True):
    """One measurement of every arm."""

    measurement: str
    """A name of `bench.results.names`."""
    title: str
    unit: str = ""
    higher_is_better: bool
    interval: bool = False
    """Whether its cells show the 95 % interval of the mean over runs instead of their standard deviation."""


class Coefficients(Part, frozen=True, kw_only=True):
    """A column of efficiency coefficients: the value of each arm divided by that of the best arm of its group."""

    measurement: str
    """The measurement of an existing column."""
    title: str = "efficiency coefficient"
    among: tuple[dict[str, str | tuple[str, ...]], ...] = ({},)
    """Arms that match the same entry form a group, such as all systems on one node."""
    same: tuple[str, ...] = ()
    """Labels that must be equal within a group, such as the model."""

    @property
    def column(self) -> str:
        """The name of the column in `tables`."""
        return f"{self.measurement}_coefficient"


class Relative(Part, frozen=True, kw_only=True):
    """A column with the value of each arm divided by that of a reference arm, such as the arm on one GPU."""

    name: str
    """The measurement of the column: `scaling_efficiency`, `slower_by`."""
    measurement: str
    """The measurement of an existing column."""
    title: str
    reference: dict[str, str | tuple[str, ...]]
    """Labels of the reference arms."""
    same: tuple[str, ...] = ()
    """Labels that an arm and its reference share, such as the model."""
    match: dict[str, str | tuple[str, ...]] = {}
    """Labels of the arms that have a value; by default all arms."""
    is_reduction: bool = False
    """Whether the column has 1 minus the ratio: by which share the value is lower than that of the reference."""
    higher_is_better: bool


class Pair(Part, frozen=True, kw_only=True):
    """Two arms to compare, by name; the result is the difference of `first` from `second`."""

    first: str
    second: str
    measurement: str


class StatedArms(Part, frozen=True, kw_only=True):
    """The arms of a statement, by their labels: every one of `first` is divided by every one of `second`."""

    first: dict[str, str | tuple[str, ...]]
    second: dict[str, str | tuple[str, ...]] | None = None
    """None: the values of `first` themselves are compared with the bounds."""


class Statement(Part, frozen=True, kw_only=True):
    """A statement about the measurements of arms, which the study judges: holds, does not hold, or undecided."""

    text: str
    source: str = ""
    """Where a document makes this statement."""
    measurement: str = ""
    """The measurement of an existing column."""
    fits: bool | None = None
    """Instead of a measurement with bounds: whether the arms `first` fit into GPU memory."""
    at_least: float | None = None
    """The statement holds if every ratio, or value, is at least this."""
    at_most: float | None = None
    arms: tuple[StatedArms, ...]
    same: tuple[str, ...] = ()
    """Labels that must be equal within a pair, such as the model."""
    gpus: tuple[str, ...] = ()
    """Parts of GPU names: the statement is about these GPUs only. Empty: about all."""


class Reference(Part, frozen=True, kw_only=True):
    """A value that an arm must reach: the study fails if the mean of its runs is worse by more than the tolerance."""

    arm: str
    measurement: str
    """The measurement of an existing column."""
    value: float
    """In the unit of the column."""
    tolerance: str
    """In percent, such as `3%`."""


class Pivot(Part, frozen=True, kw_only=True):
    """A table of one measurement, whose rows and columns are labels."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    measurement: str
    match: dict[str, str | tuple[str, ...]] = {}
    """Labels of the arms in the table, as in a case."""


class Study(Part, frozen=True, kw_only=True):
    """A named set of runs, and their tables."""

    title: str
    question: str
    source: str
    overrides: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    """Labels of every arm, which are not in its name."""
    arms: dict[str, Arm] = {}
    axes: dict[str, dict[str, tuple[str, ...]]] = {}
    """Overrides by axis and choice; every combination is an arm, named after its choices."""
    axes_first: bool = False
    """Whether the arms of the axes come before those of `arms`; set from the order of the keys in the file."""
    cases: tuple[Case, ...] = ()
    device: str | None = None
    """The device that the study measures, such as cuda; its arms do not run on another one. None: any device."""
    runs: int = 3
    seed: int = 1
    jobs: Jobs | None = None
    """None: arms of `pairs` share a job if they need the same nodes; every other run has its own job."""
    margin: float = 0.02
    """The relative difference up to which two arms count as equivalent."""
    window: Window | None = None
    max_batch: MaxBatch | None = None
    columns: tuple[ColumnSpec, ...]
    coefficients: tuple[Coefficients, ...] = ()
    relatives: tuple[Relative, ...] = ()
    pairs: tuple[Pair, ...] = ()
    statements: tuple[Statement, ...] = ()
    references: tuple[Reference, ...] = ()
    tables: tuple[Pivot, ...] = ()
    published: tuple[str, ...] = ()
    """Names of files in conf/published."""
    published_match: dict[str, dict[str, str | tuple[str, ...]]] = {}
    """For a published table, labels of the arms next to which it is shown; by default all arms."""


Matching = Mapping[str, str | tuple[str, ...]]


def matches(labels: Mapping[str, str], match: Matching) -> bool:
    """Return whether an arm's labels have the required values."""
    return all(labels.get(name) in ((value,) if isinstance(value, str) else value) for name, value in match.items())
