"""Text next to a study's tables: comparisons of arms, dates, hardware and software."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from bench.report.tables import number_text
from bench.results.comparison import Comparison, Pairing
from bench.results.study import Difference, Platform, StudyResult

NOT_LOGGED = "not logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """The comparison of two arms in one measurement."""

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


def comparison_rows(result: StudyResult) -> tuple[ComparisonRow, ...]:
    titles = {column.measurement: column.title for column in result.columns}
    return tuple(_comparison_row(one, titles.get(one.measurement, one.measurement)) for one in result.differences)


def _comparison_row(one: Difference, title: str) -> ComparisonRow:
    pair = f"{one.first} / {one.second}"
    if one.comparison is None:
        return ComparisonRow(
            pair=pair, measurement=title, values="", percent="", interval="", n="", kind="not_compared", notes="",
            verdict=f"not compared: {one.reason}",
        )  # fmt: skip
    c = one.comparison
    return ComparisonRow(
        pair=pair,
        measurement=title,
        values=" / ".join(number_text(sum(values) / len(values)) for values in (c.first, c.second) if values),
        percent="" if c.percent is None else f"{c.percent:+.2f} %",
        interval=_interval(c),
        n=_count(c),
        verdict=c.text,
        kind=c.verdict.name,
        notes="; ".join([*_of_pairs(c), *c.notes]),
    )


_VISIBLE = 0.005
"""A difference between two ratios that a reader of the means would notice."""


def _of_pairs(comparison: Comparison) -> Iterator[str]:
    """Say that a difference is that of pairs, if the ratio of the means is another."""
    c = comparison
    if c.pairing is Pairing.none or c.ratio is None or not (c.first and c.second) or not fmean(c.second):
        return
    of_means = fmean(c.first) / fmean(c.second)
    if abs(of_means - c.ratio) > _VISIBLE * abs(c.ratio):
        yield f"difference: paired geometric mean; ratio of the means: {100 * (of_means - 1):+.2f} %"


def _interval(comparison: Comparison) -> str:
    if comparison.low is None or comparison.high is None:
        return ""
    low, high = (100 * (end - 1) for end in (comparison.low, comparison.high))
    return f"{low:+.2f} to {high:+.2f} %"


def _count(comparison: Comparison) -> str:
    numbers = dict.fromkeys(len(values) for values in (comparison.first, comparison.second))
    return " and ".join(map(str, numbers))


def provenance(result: StudyResult) -> Iterator[tuple[str, str]]:
    """Yield the origin of all numbers: hardware, runs, date, commit, command."""
    runs = {run for row in result.rows for cell in row.cells.values() for run in cell.runs}
    num_arms = sum(any(cell.runs for cell in row.cells.values()) for row in result.rows)
    if result.platforms:
        yield from ((one.name, _platform(one)) for one in result.platforms)
    else:
        yield "hardware", result.hardware or NOT_LOGGED
        yield "cluster", result.cluster
    yield "runs", f"{len(runs)}, of {num_arms} of {len(result.rows)} arms"
    yield "date", result.date or "no runs yet"
    yield "commit", result.commit or NOT_LOGGED
    yield "source", result.source
    yield "command", result.command


def _platform(one: Platform) -> str:
    """Return where the numbers in the column of a platform come from."""
    if not one.cluster:
        return f"no runs; published: {', '.join(one.publications)}"
    parts = (one.hardware or NOT_LOGGED, f"cluster {one.cluster}", f"{one.num_runs} runs", one.date)
    return ", ".join(filter(None, (*parts, one.commit and f"commit {one.commit}")))


def shared_facts(result: StudyResult) -> dict[str, str]:
    """Return the hardware and software facts that all arms with runs share."""
    facts = [row.facts for row in result.rows if row.facts]
    first = facts[0] if facts else {}
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in facts)}


def own_facts(result: StudyResult) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return the names of the facts that differ between arms, and their values for each arm with runs."""
    rows = [row for row in result.rows if row.facts]
    shared = shared_facts(result)
    names = tuple(dict.fromkeys(name for row in rows for name in row.facts if name not in shared))
    return names, tuple((row.arm, tuple(row.facts.get(name, "") for name in names)) for row in rows) if names else ()
