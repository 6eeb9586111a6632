"""Show a run of a kernels task: what it will measure, and what it measured."""

from collections.abc import Sequence

from bench.console.sheet import Row, Sheet
from bench.contract.plan import KernelsPlan
from bench.mlperf.result import Result
from bench.report import kernels as kernels_report
from bench.report.tables import telemetry_rows, value_text
from bench.results.kernels import KernelsResult

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
    return Sheet(kernels_report.title(result), [*rows, *more], caption="n = 1 run")


def _bests(kernels: KernelsResult) -> Sheet:
    rows = [kernels_report.best_row(best) for best in kernels.bests]
    caption = kernels_report.bests_caption(kernels)
    return Sheet("the best of each kernel", rows, columns=kernels_report.BEST_COLUMNS, caption=caption, num_optional=1)


def points_sheet(kernels: KernelsResult) -> Sheet:
    """Return every point that was measured."""
    rows = [kernels_report.point_row(one) for one in kernels.measured]
    caption = kernels_report.POINTS_CAPTION
    return Sheet("every point", rows, columns=kernels_report.POINT_COLUMNS, caption=caption, num_optional=2)
