"""The rows of a kernels task's tables: the best of each kernel beside what is known, and every point."""

from bench.contract import mllog
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.results.kernels import Best, KernelsResult, Measured

BEST_COLUMNS = ("kernel", "best rate", "unit", "p10", "p90", "n", "% of peak", "% of best known", "within", "of")
POINT_COLUMNS = ("point", "latency (us)", "p10", "p90", "n", "rate", "unit", "% of peak", "rank", "ran")
POINTS_CAPTION = "Times are those of the slowest rank, whose number stands beside them."


def title(result: Result) -> str:
    """Return the name of the task, and where it ran."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "kernels"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, ranks = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    where = ", ".join(str(part) for part in (f"{ranks} ranks on {device}", result.platform) if part)
    return printable(f"{name}: {where}")


def bests_caption(kernels: KernelsResult) -> str:
    """Return what the table of the best means."""
    tolerance = "no tolerance is set" if kernels.tolerance is None else f"within {100 * kernels.tolerance:g} %"
    return (
        "A rate is the work of a point over its median time, on the slowest rank. Limits are the best rates known of "
        f"this device, each by itself; {tolerance}."
    )


def best_row(best: Best) -> tuple[str, ...]:
    one = best.measured
    share, known = one.share_of_peak, best.share_of_limit
    return (
        best.kernel,
        rate_text(one.rate),
        one.point.unit,
        rate_text(one.rate_at(one.p90_us)),
        rate_text(one.rate_at(one.p10_us)),
        str(one.n),
        "" if share is None else f"{100 * share:.1f}",
        "" if known is None else f"{100 * known:.1f}",
        {True: "yes", False: "no", None: ""}[best.reached],
        one.point.name.removeprefix(one.point.kernel).strip(),
    )


def point_row(one: Measured) -> tuple[str, ...]:
    share = one.share_of_peak
    return (
        one.point.name,
        f"{one.latency_us:,.4g}" if one.latency_us < 1e4 else f"{one.latency_us:,.0f}",
        f"{one.p10_us:,.4g}" if one.p10_us < 1e4 else f"{one.p10_us:,.0f}",
        f"{one.p90_us:,.4g}" if one.p90_us < 1e4 else f"{one.p90_us:,.0f}",
        str(one.n),
        rate_text(one.rate),
        one.point.unit,
        "" if share is None else f"{100 * share:.1f}",
        str(one.rank),
        printable(one.ran),
    )


def rate_text(rate: float) -> str:
    """Return a rate with four significant digits."""
    return f"{rate:,.0f}" if rate >= 1e4 else f"{rate:.4g}"
