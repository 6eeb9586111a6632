"""What stands beside the tables of a study: how arms compare, when and on what they ran."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.report.tables import number_text
from bench.results.comparison import Comparison
from bench.results.study import Difference, StudyResult

NOT_LOGGED = "not logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """How two arms compare in one measurement."""

    pair: str
    measurement: str
    values: str
    """The means of both arms."""
    percent: str
    interval: str
    n: str
    verdict: str
    kind: str
    """The name of the verdict."""
    notes: str


def statements(result: StudyResult) -> tuple[Statement, ...]:
    titles = {column.measurement: column.title for column in result.columns}
    return tuple(_statement(one, titles.get(one.measurement, one.measurement)) for one in result.differences)


def _statement(one: Difference, title: str) -> Statement:
    pair = f"{one.first} / {one.second}"
    if one.comparison is None:
        return Statement(
            pair=pair, measurement=title, values="", percent="", interval="", n="", kind="not_compared", notes="",
            verdict=f"not compared: {one.reason}",
        )  # fmt: skip
    c = one.comparison
    return Statement(
        pair=pair,
        measurement=title,
        values=" / ".join(number_text(sum(values) / len(values)) for values in (c.first, c.second) if values),
        percent="" if c.percent is None else f"{c.percent:+.2f} %",
        interval=_interval(c),
        n=_count(c),
        verdict=c.text,
        kind=c.verdict.name,
        notes="; ".join(c.notes),
    )


def _interval(comparison: Comparison) -> str:
    if comparison.low is None or comparison.high is None:
        return ""
    low, high = (100 * (end - 1) for end in (comparison.low, comparison.high))
    return f"{low:+.2f} to {high:+.2f} %"


def _count(comparison: Comparison) -> str:
    numbers = dict.fromkeys(len(values) for values in (comparison.first, comparison.second))
    return " and ".join(map(str, numbers))


def provenance(result: StudyResult) -> Iterator[tuple[str, str]]:
    """Yield what a reader must know of all numbers: hardware, runs, dates, commit, command."""
    runs = {run for row in result.rows for cell in row.cells.values() for run in cell.runs}
    ran = sum(any(cell.runs for cell in row.cells.values()) for row in result.rows)
    yield "hardware", result.hardware or NOT_LOGGED
    yield "cluster", result.cluster
    yield "runs", f"{len(runs)}, of {ran} of {len(result.rows)} arms"
    yield "date", result.date or "nothing ran yet"
    yield "commit", result.commit or NOT_LOGGED
    yield "source of the question", result.source
    yield "command", result.command


def shared_facts(result: StudyResult) -> dict[str, str]:
    """Return the facts of hardware and software that all arms which ran have in common."""
    ran = [row.facts for row in result.rows if row.facts]
    return {name: value for name, value in (ran[0] if ran else {}).items() if all(f.get(name) == value for f in ran)}


def own_facts(result: StudyResult) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return the names of the facts in which arms differ, and their values for each arm that ran."""
    ran = [row for row in result.rows if row.facts]
    shared = shared_facts(result)
    names = tuple(dict.fromkeys(name for row in ran for name in row.facts if name not in shared))
    return names, tuple((row.arm, tuple(row.facts.get(name, "") for name in names)) for row in ran) if names else ()
