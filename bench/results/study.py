"""The tables of a study as data: what each arm measured, beside what is published; how arms compare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
