"""Show the comparison of two sets of runs, and what differs between them."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from time import localtime, strftime

from bench.history.compare import Compared, RunSet
from bench.report.tables import Row, TextTable
from bench.results.comparison import Comparison
from bench.texts import counted

MOST_VALUES = 12


def sheets(compared: Compared) -> list[TextTable]:
    """Return the verdict with the values that it is based on, then what else differs."""
    c = compared.comparison
    title = f"{c.names[0]} compared with {c.names[1]}: {measure(c)}"
    return [TextTable(title, [("verdict", c.text, ""), *value_rows(compared)]), differences(compared)]


def measure(c: Comparison) -> str:
    """Return by what two systems are compared, such as `throughput (samples/s), higher is better`."""
    unit, best = f" ({c.unit})" if c.unit else "", "higher" if c.higher_is_better else "lower"
    return f"{c.measurement}{unit}, {best} is better"


def value_rows(compared: Compared) -> list[Row]:
    """Return the values that the verdict is based on."""
    c = compared.comparison
    rows = [*(_values_row(c, place) for place in (0, 1)), *_ratio_rows(c)]
    rows += [("pairs" if c.pairing.value.startswith("paired") else "runs", c.pairing.value, "")]
    rows += [
        ("when", _when(run_set), f"{name}, {counted(len(run_set.folders), 'run')}")
        for name, run_set in _named_sets(compared)
    ]
    return rows + [("note", note, "") for note in (*c.notes, *compared.notes)]


def _named_sets(compared: Compared) -> "zip[tuple[str, RunSet]]":
    return zip(compared.comparison.names, compared.run_sets, strict=True)


def _values_row(c: Comparison, place: int) -> Row:
    values = (c.first, c.second)[place]
    if not values:
        return c.names[place], "", "not measured"
    deviation = f" ± {number(stdev(values), like=values)}" if values[1:] else ""
    listed = ", ".join(number(value, like=values) for value in values[:MOST_VALUES])
    more = f" and {len(values) - MOST_VALUES} more" if values[MOST_VALUES:] else ""
    return c.names[place], f"{number(fmean(values), like=values)}{deviation}", f"n = {len(values)}: {listed}{more}"


def number(value: float, *, like: Sequence[float]) -> str:
    """Return a value with as many decimals as five significant digits of `like` need."""
    size = abs(fmean(like))
    return f"{value:,.{max(0, 4 - math.floor(math.log10(size))) if 0 < size < math.inf else 2}f}"


def _ratio_rows(c: Comparison) -> list[Row]:
    """Return the ratio with its intervals and tests; no row for a comparison without numbers."""
    if c.ratio is None or c.low is None or c.high is None or c.p_equivalent is None or c.spread is None:
        return []
    interval = f"{100 * c.confidence:g} % t-interval {c.low:.4f} to {c.high:.4f}"
    bootstrap = f"; BCa bootstrap {c.bootstrap[0]:.4f} to {c.bootstrap[1]:.4f}" if c.bootstrap else ""
    return [
        (f"{c.names[0]} / {c.names[1]}", f"{c.ratio:.4f}", f"{interval}{bootstrap}"),
        ("run-to-run variation", f"{100 * c.spread:.2f} %", "standard deviation"),
        ("equivalence", f"p = {c.p_equivalent:.2g}", f"two one-sided t-tests, margin ±{100 * c.margin:g} %"),
    ]


def _when(run_set: RunSet) -> str:
    times = [strftime("%Y-%m-%d %H:%M", localtime(trial.began_ms / 1000)) for trial in run_set.trials]
    return " to ".join(dict.fromkeys((times[0], times[-1])))


def differences(compared: Compared) -> TextTable:
    """Return what else differs between the systems."""
    names = compared.comparison.names
    if not compared.differences:
        return TextTable(
            "what else differs", [("nothing", "no known difference in hardware, software or settings", "")]
        )
    rows = [(name, *(value or "unknown" for value in values)) for name, *values in compared.differences]
    return TextTable("what else differs", rows, columns=("", *names))
