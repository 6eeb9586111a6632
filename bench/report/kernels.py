"""Show kernels tasks: plans, results of trials, and a page with every point."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import mllog
from bench.contract.plan_kinds import KernelsPlan
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report import drawings, kernel_charts
from bench.report.canvas import FAINT_INK, INK, TARGET_COLOR, canvas, empty, save
from bench.report.drawings import Shown
from bench.report.kernel_curves import COLLECTIVES, Curve, attention, collectives, copies, gemms, rates, times
from bench.report.kinds import ShownTrial, TrialsKindReport
from bench.report.tables import Row, TextTable, nodes_text, ranks_text, telemetry_rows, value_text
from bench.report.template import Card, Charts
from bench.results.kernels import Best, KernelsResult, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BEST_COLUMNS = (
    "kernel",
    "best rate",
    "unit",
    "p10",
    "p90",
    "n",
    "% of peak",
    "% of best known",
    "within tolerance",
    "shape",
)
POINT_COLUMNS = (
    "point",
    "latency (us)",
    "p10",
    "p90",
    "n",
    "rate",
    "unit",
    "% of peak",
    "slowest rank",
    "implementation",
)
POINTS_CAPTION = "Times are those of the slowest rank."


def title(result: Result) -> str:
    """Return the name of the task and its hardware."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "kernels"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, ranks = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    where = ", ".join(str(part) for part in (ranks_text(ranks, device), result.platform) if part)
    return printable(f"{name}: {where}")


def bests_caption(kernels: KernelsResult) -> str:
    """Return the caption of the table of best rates."""
    tolerance = "none" if kernels.tolerance is None else f"{100 * kernels.tolerance:g} %"
    return (
        "Rate: work of a point / its median time on the slowest rank. Best known: the highest rate measured on this "
        f"kind of device before. Tolerance: {tolerance}."
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
        printable(one.implementation),
    )


def rate_text(rate: float) -> str:
    """Return a rate with four significant digits."""
    return f"{rate:,.0f}" if rate >= 1e4 else f"{rate:.4g}"


COLORS = ("#1f5a8c", "#e08a00", "#5b9279", "#8e5a9b", "#9db4c8", "#555555", "#b5651d", "#7a9e2b")
MARKERS = "osD^vPX*"
_HEIGHT_INCHES = 4.2


def draw(kernels: KernelsResult, folder: Path, *, heading: str, note: str) -> list[Path]:
    """Draw every figure that has data, as PNGs in a folder; return their paths in the order of the page.

    A rate is that of the median time; the shade covers the 10th to the 90th percentile.
    """
    return [
        path
        for name, figure in _FIGURES.items()
        if figure(kernels.measured, path := folder / f"{name}.png", heading, note)
    ]


def gemm_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw TFLOP/s over M for each N and K, a panel for each precision; return whether there is anything to draw."""
    precisions = gemms(measured)
    if not precisions:
        return False
    figure, panels = canvas(_HEIGHT_INCHES, f"GEMMs: {heading}", note, panels=len(precisions))
    for axes, of_precision in zip(panels, precisions, strict=True):
        _plot(axes, of_precision.curves, rates)
        places, values = [m for m, _ in of_precision.single], [one.rate for _, one in of_precision.single]
        axes.plot(places, values, ".", color=FAINT_INK, label="other shapes")
        _lines(axes, of_precision.first)
        _label(axes, of_precision.title, "M", of_precision.first.point.unit)
    save(figure, path)
    return True


def memcpy_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw latency and GB/s of every kind of copy over bytes; return whether there is anything to draw."""
    return _over_bytes(copies(measured), path, f"memory copies: {heading}", note)


def collective_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw latency and bus bandwidth of the collectives of this figure over bytes; return whether there are any."""
    name = path.stem
    return _over_bytes(collectives(measured, COLLECTIVES[name]), path, f"{name.replace('_', '-')}: {heading}", note)


def _over_bytes(curves: Sequence[Curve], path: Path, heading: str, note: str) -> bool:
    if not curves:
        return False
    figure, (left, right) = canvas(_HEIGHT_INCHES, heading, note, panels=2)
    _plot(left, curves, times)
    _plot(right, curves, rates)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    first = curves[0].points[0][1]
    left.set_yscale("log")
    if first.point.family == "memcpy":  # host link and device memory differ by two orders of magnitude
        right.set_yscale("log")
    _label(left, "latency", "bytes", "microseconds")
    _label(right, "bandwidth" if first.point.family == "memcpy" else "bus bandwidth", "bytes", first.point.unit)
    save(figure, path)
    return True


def attention_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw TFLOP/s of each backend over the sequence length, forward and backward; return whether there is any."""
    curves_of = {way: attention(measured, way) for way in ("forward", "backward")}
    if not any(curves_of.values()):
        return False
    figure, panels = canvas(_HEIGHT_INCHES, f"causal attention: {heading}", note, panels=2)
    for axes, (way, curves) in zip(panels, curves_of.items(), strict=True):
        if not curves:
            empty(axes, "not measured")
            continue
        first = curves[0].points[0][1]
        _plot(axes, curves, rates)
        _lines(axes, first)
        axes.set_xscale("log", base=2)
        _label(axes, way, "sequence length (tokens)", first.point.unit)
    save(figure, path)
    return True


def _plot(axes: "Axes", curves: Sequence[Curve], values: Callable[[Measured], tuple[float, float, float]]) -> None:
    """Draw curves; `values` returns the 10th percentile, the median and the 90th percentile of a point."""
    for number, curve in enumerate(curves):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        dashes = "--" if curve.name.startswith("unaligned") else "-"
        places = [place for place, _ in curve.points]
        low, middle, high = zip(*(values(one) for _, one in curve.points), strict=True)
        axes.plot(places, middle, dashes, label=curve.name, markersize=3.5, color=color, marker=marker)
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _lines(axes: "Axes", one: Measured) -> None:
    """Draw the data sheet's peak and the best known rate as lines."""
    for rate, name, color in ((one.point.peak, "peak", FAINT_INK), (one.point.limit, "best known", TARGET_COLOR)):
        if rate is not None:
            axes.axhline(rate, color=color, linewidth=0.9, linestyle=":", label=name)


def _label(axes: "Axes", title: str, horizontal: str, vertical: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=6.5, edgecolor="none", framealpha=0.8)


Figure = Callable[[Sequence[Measured], Path, str, str], bool]
_FIGURES: dict[str, Figure] = {
    "gemm": gemm_figure,
    "memcpy": memcpy_figure,
    **dict.fromkeys(COLLECTIVES, collective_figure),
    "attention": attention_figure,
}
TITLES = {
    "gemm": "GEMMs",
    "memcpy": "Memory copies",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "collectives": "Collectives of all ranks",
    "attention": "Causal attention",
}
CAPTION = "Lines: medians; shaded: 10th to 90th percentile."
NAMES = tuple(_FIGURES)
"""File names of the figures, without .png."""


def _row(one: Measured) -> list[object]:
    point = one.point
    shares = (one.share_of_peak, point.limit)
    times = (one.latency_us, one.p10_us, one.p90_us, one.n)
    return [
        point.name,
        point.kernel,
        point.variant,
        point.ranks,
        *times,
        one.rate,
        point.unit,
        *shares,
        one.rank,
        one.implementation,
    ]


FAMILIES = {"memcpy": "memory copies", "collectives": "collectives", "attention": "attention", "gemm": "GEMMs"}


def plan_rows(plan: KernelsPlan) -> list[tuple[str, str]]:
    w, c = plan.world, plan.config
    counts = {family: sum(point.family == family for point in plan.points) for family in FAMILIES}
    nodes = nodes_text(c, num_nodes=w.num_nodes, ranks_per_node=w.ranks_per_node)
    gemm = c.task.kernels.gemm if c.task.kernels else None
    tokens = f", {gemm.model_tokens:,} tokens" if gemm and gemm.from_model else ""
    limits = sorted({f"{p.kernel} {p.limit:g} {p.unit}" for p in plan.points if p.limit is not None})
    return [
        ("shapes of model", f"{c.model.name}{tokens}, tp {c.parallel.tp or 1}"),
        ("ranks", f"{w.num_ranks}; {nodes}"),
        *((FAMILIES[family], f"{count} points") for family, count in counts.items() if count),
        ("best known rates", "; ".join(limits) or "none for this device"),
    ]


def _bests(kernels: KernelsResult) -> TextTable:
    rows = [best_row(best) for best in kernels.bests]
    caption = bests_caption(kernels)
    return TextTable("best rate of each kernel", rows, columns=BEST_COLUMNS, caption=caption, num_optional=1)


def points_table(kernels: KernelsResult) -> TextTable:
    rows = [point_row(one) for one in kernels.measured]
    caption = POINTS_CAPTION
    return TextTable("all points", rows, columns=POINT_COLUMNS, caption=caption, num_optional=2)


class KernelsReport(TrialsKindReport[KernelsPlan, KernelsResult]):
    """Shows kernels tasks."""

    work, page_shows = "measure kernels", "every point and its figures"
    table_name, figure_names = "kernels.csv", NAMES
    table_columns = (
        *("point", "kernel", "variant", "ranks", "latency_us", "p10_us", "p90_us", "n"),
        *("rate", "unit", "share_of_peak", "limit", "rank", "implementation"),
    )

    def plan_rows(self, plan: KernelsPlan) -> list[tuple[str, str]]:
        return plan_rows(plan)

    def title(self, trial: ShownTrial[KernelsResult]) -> str:
        return title(trial.judged.result)

    def tables(self, trial: ShownTrial[KernelsResult], *, more: Sequence[Row] = ()) -> list[TextTable]:
        kernels, result = trial.kind_result, trial.judged.result
        num_requested, done = len(kernels.measured) + len(kernels.missing), len(kernels.measured)
        rows = [
            ("run_start → run_stop (min)", value_text(result.minutes, "{:.2f}"), ""),
            ("points measured", f"{done} of {num_requested}", ""),
            trial.valid_row,
            *telemetry_rows(result.telemetry),
            ("software", ", ".join(f"{name} {version}" for name, version in result.software.items()), ""),
        ]
        return [TextTable(self.title(trial), [*rows, *more], caption="n = 1 run"), _bests(kernels)]

    def detail_tables(self, trial: ShownTrial[KernelsResult]) -> list[TextTable]:
        return [points_table(trial.kind_result)]

    def table_rows(self, trial: ShownTrial[KernelsResult]) -> Iterator[Sequence[object]]:
        yield from (_row(one) for one in trial.kind_result.measured)

    def cards(self, trial: ShownTrial[KernelsResult]) -> list[Card]:
        kernels, minutes = trial.kind_result, trial.judged.result.minutes
        num_requested, done = len(kernels.measured) + len(kernels.missing), len(kernels.measured)
        took = "" if minutes is None else f"in {minutes:.2f} min"
        fastest: dict[str, Best] = {}
        for best in kernels.bests:
            unit = best.measured.point.unit
            if unit not in fastest or best.measured.rate > fastest[unit].measured.rate:
                fastest[unit] = best
        points = Card(name="points measured", value=f"{done}", unit=f"of {num_requested}", note=took)
        return [
            points,
            *(
                Card(name=f"highest {unit}", value=rate_text(best.measured.rate), unit=unit, note=best.kernel)
                for unit, best in fastest.items()
            ),
        ]

    def figures(self, trials: Sequence[ShownTrial[KernelsResult]], out: Path, *, heading: str) -> list[Shown]:
        """Return the figures of the last trial with measurements."""
        last = _last_measured(trials)
        if last is None:
            return []
        place = last.judged.result.platform or "platform not logged"
        note = f"{place}, n = 1 run; shaded: 10th to 90th percentile"
        charts = kernel_charts.charts(last.kind_result.measured)
        of_which = f" Of {last.name}." if len(trials) > 1 else ""
        return [
            drawings.titled(file, f"{TITLES[file.stem]}. {CAPTION}{of_which}", charts.get(file.stem, {}))
            for file in draw(last.kind_result, out, heading=heading, note=note)
        ]

    def charts(self, trials: Sequence[ShownTrial[KernelsResult]]) -> Charts:
        last = _last_measured(trials)
        of_figures = kernel_charts.charts(last.kind_result.measured) if last else {}
        return {name: chart for of_figure in of_figures.values() for name, chart in of_figure.items()}


def _last_measured(trials: Sequence[ShownTrial[KernelsResult]]) -> ShownTrial[KernelsResult] | None:
    return next((one for one in reversed(trials) if one.kind_result.measured), None)


REPORT = KernelsReport()
