"""What conf/study/NAME.yaml and conf/published/NAME.yaml hold, as types that check every key of them.

YAML's scalars are read as text, and the type of a field says what the text means: `batch: 8` is the label "8".
"""

from collections.abc import Mapping

import msgspec


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    calculated: Calculated | None = None


class Window(Part, frozen=True, kw_only=True):
    """Runs have skip_steps + steps steps; step time and throughput are taken over the last `steps` of them."""

    skip_steps: int
    steps: int


class MaxBatch(Part, frozen=True, kw_only=True):
    """Runs take the largest micro-batch, up to this limit, that the plan says fits, without gradient accumulation.

    Where a run is out of memory the next smaller one is tried (`bench.studies.batches`).
    """

    limit: int


class ColumnSpec(Part, frozen=True, kw_only=True):
    """One number of every arm."""

    measurement: str
    """A name of `bench.results.names`."""
    title: str
    unit: str = ""
    higher_is_better: bool


class Pair(Part, frozen=True, kw_only=True):
    """Two arms to compare, by their names; the comparison says how `second` differs from `first`."""

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
    cases: tuple[Case, ...] = ()
    runs: int = 3
    seed: int = 1
    margin: float = 0.02
    """Relative differences below it do not matter: two arms can be proven equivalent within it."""
    window: Window | None = None
    max_batch: MaxBatch | None = None
    columns: tuple[ColumnSpec, ...]
    pairs: tuple[Pair, ...] = ()
    tables: tuple[Pivot, ...] = ()
    published: tuple[str, ...] = ()
    """Names of files in conf/published."""


class Figure(Part, frozen=True, kw_only=True):
    """One number, X or - of a publication."""

    labels: dict[str, str]
    measurement: str
    printed: str
    """As the document has it."""
    value: float | None = None
    """What is meant; left out where `printed` is a plain number, or says that there is none."""
    reason: str = ""
    """Why the value is not the printed one."""


class PublishedTable(Part, frozen=True, kw_only=True):
    """Published figures of one table, and what they were measured on."""

    title: str
    place: str
    """Document, page, table."""
    hardware: str
    date: str
    unit: str = ""
    figures: tuple[Figure, ...]

    def value_of(self, figure: Figure) -> float | None:
        """Return the number that is meant; None for what the document marks as missing or not advisable."""
        return figure.value if figure.value is not None else plain_number(figure.printed)


def plain_number(printed: str) -> float | None:
    """Return 16023.5 for "16,023.5", also behind a document's marks (*, ~) and before a deviation or %; else None."""
    digits = printed.strip().lstrip("*~").rstrip("*%").split("±")[0].strip().replace(",", "")
    try:
        return float(digits)
    except ValueError:
        return None


Matching = Mapping[str, str | tuple[str, ...]]


def matches(labels: Mapping[str, str], match: Matching) -> bool:
    """Return whether an arm's labels are among those that are asked for."""
    return all(labels.get(name) in ((want,) if isinstance(want, str) else want) for name, want in match.items())
