"""What conf/study/NAME.yaml holds, as types that check every key of it.

YAML's scalars are read as text, and the type of a field says what the text means: `batch: 8` is the label "8".
"""

from collections.abc import Mapping
from enum import Enum

import msgspec


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a file; a key that it does not know is an error."""


class Arm(Part, frozen=True, kw_only=True):
    """One system, setting or size that is measured."""

    labels: dict[str, str] = {}
    """What sets it apart from other arms; tables and published figures find it by these."""
    overrides: tuple[str, ...] = ()


class Calculated(Part, frozen=True, kw_only=True):
    """The times of a run of `steps` are scaled to `of_steps`, and marked with *."""

    steps: int
    of_steps: int


class Case(Part, frozen=True, kw_only=True):
    """What holds for all arms whose labels match."""

    match: dict[str, str | tuple[str, ...]]
    """A value, or several of which one must be the arm's, by label; `arm` is the arm's name."""
    overrides: tuple[str, ...] = ()
    not_advisable: str | None = None
    """Why there is an X in place of a number: the arm does not run."""
    leave_out: bool = False
    """There is no such arm."""
    note: str | None = None
    """What the row must say of itself, beside its numbers."""
    calculated: Calculated | None = None


class Window(Part, frozen=True, kw_only=True):
    """Runs have skip_steps + steps steps; step time and throughput are taken over the last `steps` of them."""

    skip_steps: int
    steps: int


class MaxBatch(Part, frozen=True, kw_only=True):
    """Runs take the largest micro-batch, up to this limit, that the plan says fits, without gradient accumulation.

    Where a run is out of memory the next smaller one is tried (`bench.studies.plans`).
    """

    limit: int


class Jobs(Enum):
    """How runs are handed to a queue."""

    each = "each"
    """Every run is a job of its own: the fastest way, on whatever nodes there are."""
    shared = "shared"
    """Runs take turns on the same nodes, in one job: what is compared must not differ in its nodes."""
    in_turn = "in_turn"
    """A run begins when the one before it has ended, whatever starts them: for places that have the same machines."""


class ColumnSpec(Part, frozen=True, kw_only=True):
    """One number of every arm."""

    measurement: str
    """A name of `bench.results.names`."""
    title: str
    unit: str = ""
    higher_is_better: bool


class Coefficients(Part, frozen=True, kw_only=True):
    """A column of efficiency coefficients: the value of each arm over that of the best one that it is compared with."""

    of: str
    """The measurement of a column."""
    title: str = "efficiency coefficient"
    among: tuple[dict[str, str | tuple[str, ...]], ...] = ({},)
    """The arms that match an entry are compared with each other, such as all systems on one node."""
    same: tuple[str, ...] = ()
    """Labels in which arms must agree to be compared: which work they do."""

    @property
    def column(self) -> str:
        """The name of the column, as tables ask for it."""
        return f"{self.of}_coefficient"


class Pair(Part, frozen=True, kw_only=True):
    """Two arms to compare, by their names; the comparison says how `first` differs from `second`."""

    first: str
    second: str
    measurement: str


class Pivot(Part, frozen=True, kw_only=True):
    """A table with one measurement, whose rows and columns are labels."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    measurement: str
    match: dict[str, str | tuple[str, ...]] = {}
    """Only the arms whose labels match, as in a case."""


class Study(Part, frozen=True, kw_only=True):
    """A named set of runs, and the tables to make of them."""

    title: str
    question: str
    source: str
    overrides: tuple[str, ...] = ()
    arms: dict[str, Arm] = {}
    axes: dict[str, dict[str, tuple[str, ...]]] = {}
    """Overrides by axis and choice: there is an arm for every combination, named after its choices."""
    axes_first: bool = False
    """Whether the arms of the axes come before those of `arms`; by the order of the file, which need not say it."""
    cases: tuple[Case, ...] = ()
    runs: int = 3
    seed: int = 1
    jobs: Jobs | None = None
    """None: the arms of pairs share a job where they need the same nodes; every other run has one of its own."""
    margin: float = 0.02
    """Relative differences below it do not matter: two arms can be proven equivalent within it."""
    window: Window | None = None
    max_batch: MaxBatch | None = None
    columns: tuple[ColumnSpec, ...]
    coefficients: tuple[Coefficients, ...] = ()
    pairs: tuple[Pair, ...] = ()
    tables: tuple[Pivot, ...] = ()
    published: tuple[str, ...] = ()
    """Names of files in conf/published."""


Matching = Mapping[str, str | tuple[str, ...]]


def matches(labels: Mapping[str, str], match: Matching) -> bool:
    """Return whether an arm's labels are among those that are asked for."""
    return all(labels.get(name) in ((want,) if isinstance(want, str) else want) for name, want in match.items())
