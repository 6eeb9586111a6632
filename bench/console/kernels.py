"""Show a run of a kernels task: what it will measure, and what it measured."""

from collections.abc import Sequence

from bench.console.sheet import Row, Sheet
from bench.contract import mllog
from bench.contract.plan import KernelsPlan
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report.rows import telemetry_rows, value_text
from bench.results.kernels import Best, KernelsResult, Measured

FAMILIES = {"memcpy": "memory copies", "collectives": "collectives", "attention": "attention", "gemm": "GEMMs"}
SHOWN = 5
"""So many problems are listed; the others are counted."""


def plan_rows(plan: KernelsPlan) -> list[tuple[str, str]]:
    """Return what the plan says, by name, without what every plan says."""
    w, c = plan.world, plan.config
    device = c.cluster.gpu.name if c.cluster.gpu else c.cluster.device.name
    counts = {family: sum(point.family == family for point in plan.points) for family in FAMILIES}
    nodes = f"{w.num_nodes} node{'s' if w.num_nodes > 1 else ''} with {w.ranks_per_node} x {device}"
    rows = f"{c.recipe.micro_batch_size or 1} x {c.data.seq_length:,} tokens, tp {c.parallel.tp or 1}"
    limits = sorted({f"{p.kernel} {p.limit:g} {p.unit}" for p in plan.points if p.limit is not None})
    return [
        ("shapes of", f"{c.model.name}, {rows}"),
        ("ranks", f"{w.num_ranks}; {nodes}"),
        *((FAMILIES[family], f"{count} points") for family, count in counts.items() if count),
        ("best rates known", "; ".join(limits) or "none of this device"),
    ]


def sheets(result: Result, kernels: KernelsResult, *, more: Sequence[Row] = ()) -> list[Sheet]:
    """Return what a trial of a kernels task is worth, and the best of each kernel."""
    return [_verdict(result, kernels, more), _bests(kernels)]


def _verdict(result: Result, kernels: KernelsResult, more: Sequence[Row]) -> Sheet:
    asked, done = len(kernels.measured) + len(kernels.missing), len(kernels.measured)
    errors = [finding.what for finding in result.findings if finding.severity == "error"]
    problems = [*errors, *kernels.problems]
    shown = "; ".join(problems[:SHOWN]) + (f"; {len(problems) - SHOWN} more" if problems[SHOWN:] else "")
    proven = result.valid and kernels.proven
    rows = [
        ("run_start → run_stop (min)", value_text(result.minutes, "{:.2f}"), ""),
        ("points measured", f"{done} of {asked}", ""),
        ("valid trial", "yes" if proven else "no", shown),
        *telemetry_rows(result.telemetry),
        ("software", ", ".join(f"{name} {version}" for name, version in result.software.items()), ""),
    ]
    return Sheet(title(result), [*rows, *more], caption="n = 1 run")


def title(result: Result) -> str:
    """Return the name of the task, and where it ran."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "kernels"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, ranks = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    where = ", ".join(str(part) for part in (f"{ranks} ranks on {device}", result.platform) if part)
    return printable(f"{name}: {where}")


def _bests(kernels: KernelsResult) -> Sheet:
    columns = ("kernel", "best rate", "unit", "p10", "p90", "n", "% of peak", "% of best known", "within", "of")
    tolerance = "no tolerance is set" if kernels.tolerance is None else f"within {100 * kernels.tolerance:g} %"
    caption = (
        f"A rate is the work of a point over its median time, on the slowest rank. Limits are the best rates known of "
        f"this device, each by itself; {tolerance}."
    )
    rows = [_best_row(best) for best in kernels.bests]
    return Sheet("the best of each kernel", rows, columns=columns, caption=caption, num_optional=1)


def _best_row(best: Best) -> tuple[str, ...]:
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


def points_sheet(kernels: KernelsResult) -> Sheet:
    """Return every point that was measured."""
    columns = ("point", "latency (us)", "p10", "p90", "n", "rate", "unit", "% of peak", "rank", "ran")
    rows = [_point_row(one) for one in kernels.measured]
    caption = "Times are those of the slowest rank, whose number stands beside them."
    return Sheet("every point", rows, columns=columns, caption=caption, num_optional=2)


def _point_row(one: Measured) -> tuple[str, ...]:
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
