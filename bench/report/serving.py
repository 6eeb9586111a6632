"""Show serving tasks: plans, results of trials, and a page with every load and request."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench.contract import mllog
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Config, Device, ProfileKind
from bench.contract.server_times import ServerTimes
from bench.contract.serving import Lengths, SampledLengths, ServingMemory, command
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report import costs, drawings, serving_charts
from bench.report.canvas import FAINT_INK, INK, TARGET_COLOR, canvas, save, shortened
from bench.report.drawings import Shown
from bench.report.kernels import COLORS
from bench.report.kinds import ShownTrial, TrialsKindReport
from bench.report.serving_charts import NamedResult, load_label, ok_latencies
from bench.report.tables import Row, TextTable, findings_table, value_text
from bench.report.template import Card, Charts
from bench.results import server_times
from bench.results.imported import Summary
from bench.results.serving import LoadResult, ServingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = (
    *("load", "requests", "failed", "output tokens/s", "requests/s", "goodput", "latency p50 (s)", "p90", "p99"),
    *("p100", "TTFT p50 (s)", "TTFT p99", "TPOT p50 (ms)", "TPOT p99", "loadgen", "client overhead"),
)


def title(result: Result, serving: ServingResult) -> str:
    """Return the name of the task, its server and its hardware."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "serving"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, count = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    place = f"{count} x {device}" if device else "remote server"
    where = ", ".join(str(part) for part in (serving.server, serving.model, place, result.platform) if part)
    return printable(f"{name}: {where}")


def row(load: LoadResult) -> tuple[str, ...]:
    """Return the cells of a load; what was not measured is a dash, and `notes` has the reason."""
    latencies = [_seconds(load.percentile_s(load.latency_s, share)) for share in (50, 90, 99, 100)]
    ttft = [_of_tokens(load, load.ttft_s, share, 1) for share in (50, 99)]
    tpot = [_of_tokens(load, load.tpot_s, share, 1000) for share in (50, 99)]
    rates = [_rate(rate) for rate in (load.output_throughput, load.request_throughput, load.goodput)]
    share = "-" if load.client_share is None else f"{100 * load.client_share:.1f} %"
    counts = (f"{len(load.status):,}", f"{load.num_failed:,}")
    return (load.load.name, *counts, *rates, *latencies, *ttft, *tpot, load.validity, share)


def notes(serving: ServingResult) -> list[str]:
    """Return the reasons for dashes and INVALID, and explanations of the columns."""
    general = [
        "Percentiles include failed requests, counted as the slowest. Client overhead: the largest delay caused by the "
        "client, as a share of the latency."
    ]
    loads_by_note: dict[str, list[str]] = {}
    for load in serving.loads:
        for note in _load_notes(load):
            loads_by_note.setdefault(note, []).append(load.load.name)
    many = len(serving.loads) if len(serving.loads) > 1 else 0
    return general + [
        f"{'every load' if len(names) == many else ', '.join(names)}: {note}." for note, names in loads_by_note.items()
    ]


def _load_notes(load: LoadResult) -> Iterator[str]:
    """Yield the reasons for dashes and INVALID in the cells of a load."""
    if load.validity != "VALID":
        yield f"{load.validity} by loadgen: {load.reason}"
    if load.no_token_times:
        yield f"no TTFT and TPOT: {load.no_token_times}"
    if any(load.percentile_s(load.latency_s, share) is None for share in (50, 90, 99, 100)):
        yield "a percentile is - if it falls on a failed request"
    if load.goodput is None:
        yield f"no goodput: {_no_goodput(load)}"


def _no_goodput(load: LoadResult) -> str:
    limits = load.limits
    if limits.ttft_s is None and limits.tpot_s is None and limits.latency_s is None:
        return "no latency limit is set"
    return load.no_token_times or "no request succeeded"


def _of_tokens(load: LoadResult, values: tuple[float | None, ...], share: float, scale: float) -> str:
    seconds = None if load.no_token_times else load.percentile_s(values, share)
    return "-" if seconds is None else _seconds(scale * seconds)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


_HEIGHT_INCHES, _BAR_INCHES, _FRAME_INCHES = 4.2, 0.34, 1.5
DASHES = ("-", "--", ":", "-.")
NAMES = ("latency_cdf", "output_throughput", "rate_sweep")
"""File names of the figures, without .png."""


def draw(results: Sequence[NamedResult], folder: Path, *, heading: str, note: str) -> list[Path]:
    """Draw every figure that has data, as PNGs in a folder; return their paths."""
    figures = (cdf_figure, throughput_figure, sweep_figure)
    paths = [folder / f"{name}.png" for name in NAMES]
    return [
        path for figure, path in zip(figures, paths, strict=True) if figure(results, path, heading=heading, note=note)
    ]


def cdf_figure(results: Sequence[NamedResult], path: Path, *, heading: str, note: str) -> bool:
    """Draw the cumulative distribution of latencies over all requests, a curve for each load.

    A curve that does not reach 1 shows the share of failed requests. Return whether there is anything to draw.
    """
    loads = [(named, load) for named in results for load in named.serving.loads if ok_latencies(load)]
    if not loads:
        return False
    figure, (axes,) = canvas(_HEIGHT_INCHES, f"latency: {heading}", note)
    for number, (named, load) in enumerate(loads):
        seconds, total = ok_latencies(load), len(load.status)
        shares = [(n + 1) / total for n in range(len(seconds))]
        label = shortened(load_label(named, load, several=len(results) > 1))
        color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        axes.step([0, *seconds], [0, *shares], dashes, where="post", label=label, color=color)
        limit = load.limits.latency_s
        if number == 0 and limit is not None and limit <= 2 * seconds[-1]:
            axes.axvline(limit, color=TARGET_COLOR, linewidth=0.9, linestyle=":", label="limit")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    _name_axes(axes, "seconds from arrival to the last token", "share of all requests")
    axes.legend(fontsize=7, edgecolor="none", framealpha=0.8, loc="lower right")
    save(figure, path)
    return True


def throughput_figure(results: Sequence[NamedResult], path: Path, *, heading: str, note: str) -> bool:
    """Draw the output tokens per second of every load as bars; return whether there is any."""
    bars = [
        (load_label(named, load, several=len(results) > 1), rate, COLORS[number % len(COLORS)])
        for number, named in enumerate(results)
        for load in named.serving.loads
        if (rate := load.output_throughput) is not None
    ]
    if not bars:
        return False
    figure, (axes,) = canvas(_FRAME_INCHES + _BAR_INCHES * len(bars), f"output: {heading}", note)
    places = list(range(len(bars)))[::-1]
    axes.barh(places, [rate for _, rate, _ in bars], color=[color for *_, color in bars], height=0.6)
    axes.set_yticks(places, [shortened(name, limit=40) for name, *_ in bars], parse_math=False)
    for place, (_, rate, _) in zip(places, bars, strict=True):
        text = f" {rate:,.0f}" if rate >= 100 else f" {rate:.3g}"
        axes.text(rate, place, text, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.12 * max(rate for _, rate, _ in bars))
    axes.set_xlabel("output tokens per second, successful requests only")
    axes.grid(axis="y", visible=False)
    save(figure, path)
    return True


def sweep_figure(results: Sequence[NamedResult], path: Path, *, heading: str, note: str) -> bool:
    """Draw latency and completed requests per second over the arrival rate.

    Return whether any trial has several rates.
    """
    swept = [(named, loads) for named in results if (loads := named.serving.swept)]
    if not swept:
        return False
    figure, (left, right) = canvas(_HEIGHT_INCHES, f"rates: {heading}", note, panels=2)
    for number, (named, loads) in enumerate(swept):
        color, rates = COLORS[number % len(COLORS)], [load.load.rate or 0.0 for load in loads]
        prefix = f"{shortened(named.name, limit=24)} " if len(swept) > 1 else ""
        for share, dashes in ((50, "-"), (99, "--")):
            seconds = [load.percentile_s(load.latency_s, share) for load in loads]
            points = [(rate, value) for rate, value in zip(rates, seconds, strict=True) if value is not None]
            left.plot(*zip(*points, strict=True) if points else ([], []), dashes, marker="o", markersize=3.5,
                      color=color, label=f"{prefix}p{share}")  # fmt: skip
        done = [(rate, load.request_throughput or 0.0) for rate, load in zip(rates, loads, strict=True)]
        right.plot(*zip(*done, strict=True), "-", marker="o", markersize=3.5, color=color, label=f"{prefix}completed")
        if named.serving.knee is not None:
            for axes in (left, right):
                axes.axvline(named.serving.knee, color=TARGET_COLOR, linewidth=0.9, linestyle=":", label="knee")
        ideal = "all arriving requests" if number == 0 else None
        right.plot([0, rates[-1]], [0, rates[-1]], color=FAINT_INK, linewidth=0.9, linestyle=":", label=ideal)
        limit = loads[0].limits.latency_s
        if number == 0 and limit is not None and limit <= 2 * left.get_ylim()[1]:
            left.axhline(limit, color=INK, linewidth=0.9, linestyle=":", label="limit")
    for axes, vertical in ((left, "seconds to the last token"), (right, "requests completed per second")):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _name_axes(axes, "requests arriving per second", vertical)
        axes.legend(fontsize=7, edgecolor="none", framealpha=0.8)
    save(figure, path)
    return True


def _name_axes(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)


CAPTIONS = {
    "latency_cdf": "Share of all requests completed within a time.",
    "output_throughput": "Output of each load.",
    "rate_sweep": "Latency and completed requests over the arrival rate; dotted: all requests completed.",
}


def _name(trial: ShownTrial[ServingResult], trials: Sequence[ShownTrial[ServingResult]]) -> str:
    """Return the name of a trial in figures: its server and model if these are unique, else also its name."""
    name = f"{trial.kind_result.server} {Path(trial.kind_result.model).name}"
    others = [f"{one.kind_result.server} {Path(one.kind_result.model).name}" for one in trials if one is not trial]
    return f"{name} ({trial.name})" if name in others else name


def _costs(serving: ServingResult) -> list[Row]:
    return costs.result_rows(serving.measurements)


def _rows(trial: ShownTrial[ServingResult]) -> Iterator[Sequence[object]]:
    for one in trial.kind_result.loads:
        columns = (one.arrival_s, one.latency_s, one.ttft_s, one.tpot_s, one.tokens_out, one.status)
        for number, values in enumerate(zip(*columns, strict=True)):
            at, took, *tokens, count, status = values
            times = ["", ""] if one.no_token_times else tokens
            yield [trial.kind_result.server, one.load.name, number, at, took, *times, count, status]


NUM_OPTIONAL = 2


def plan_rows(plan: ServingPlan) -> list[tuple[str, str]]:
    c, serving = plan.config, plan.config.task.serving
    assert serving is not None
    server, limits = serving.server, serving.limits
    device = c.cluster.device_name
    weights = plan.base_dir or "random weights"
    if server.url is None:
        is_profiled = c.launch.profile is ProfileKind.modules
        argv = command(
            server, precision=c.precision.name, is_cpu=c.cluster.device is Device.cpu, is_profiled=is_profiled
        )
        place = f"{server.name.name}: {' '.join(argv)}"
        model = f"{c.model.name}, {weights}; {c.precision.name}, tp {plan.world.tp} on {device}"
    else:
        place, model = f"{server.name.name} at {server.url}", str(server.model)
    set_limits = {"TTFT": limits.ttft_s, "TPOT": limits.tpot_s, "latency": limits.latency_s}
    shown = ", ".join(f"{name} {limit:g} s" for name, limit in set_limits.items() if limit is not None)
    return [
        ("server", place),
        ("model", model),
        ("loads", "; ".join(f"{load.name} ({load.arrivals.scenario})" for load in plan.loads)),
        (
            "requests",
            f"{serving.requests:,} per load: {serving.tokens_in} input and {serving.tokens_out} output tokens each"
            if plan.lengths is None
            else f"{serving.requests:,} per load, with the lengths below; request n of every load has the same lengths",
        ),
        *([] if plan.lengths is None else _length_rows(serving.lengths, plan.lengths)),
        ("limits", shown or "none"),
        *([] if plan.memory is None else [(_memory_label(c), _planned_memory(plan.memory))]),
    ]


def _length_rows(lengths: Lengths, sampled: SampledLengths) -> list[tuple[str, str]]:
    """Return the source of the lengths, and what was sampled for all trials together."""
    if lengths.file is not None:
        source = f"sampled from {lengths.file} (sha256 {sampled.sha256:.12}…)"
    else:
        stated = (("input", lengths.prompt), ("output", lengths.answer))
        source = "; ".join(
            f"{name} lognormal, mean {one.mean:g} before the limits, sigma {one.sigma:g}, limits {one.min} to {one.max}"
            for name, one in stated
        )
    trials = sampled.trials
    counts = {
        "input tokens": sorted(n for trial in trials for n in trial.tokens_in),
        "output tokens": sorted(n for trial in trials for n in trial.tokens_out),
        "input + output": sorted(n for trial in trials for n in trial.totals),
    }
    return [("lengths", source), *((name, _of_lengths(values)) for name, values in counts.items())]


def _of_lengths(ordered: Sequence[int]) -> str:
    """Return mean, median, 99th percentile (nearest rank) and maximum of sampled lengths."""
    p50, p99 = (ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 99))
    return f"mean {fmean(ordered):,.1f}, p50 {p50:,}, p99 {p99:,}, maximum {ordered[-1]:,}"


def _memory_label(config: Config) -> str:
    return "memory per GPU" if config.cluster.device is Device.cuda else "memory of the server"


def _planned_memory(needed: ServingMemory) -> str:
    """Return the estimated memory of a GPU, and how many requests it can hold."""
    limit = fitting = waiting = ""
    if needed.capacity_gib is not None and needed.fitting is not None:
        limit = f" of {needed.capacity_gib:g}, of which the server uses {100 * needed.fraction:g} %"
        fitting = f"{needed.fitting:,} of "
        if needed.fitting < needed.concurrent:
            waiting = f"; the others wait: all need {needed.all_gib:.1f}"
    return (
        f"{needed.total_gib:.1f} GiB{limit} (estimate): weights {needed.weights_gib:.1f}, workspace "
        f"{needed.workspace_gib:.1f}, KV cache {needed.kv_cache_gib:.1f} for {fitting}{needed.concurrent:,} concurrent "
        f"requests{waiting}"
    )


def loads_of_tools(summaries: Sequence[Summary]) -> TextTable:
    """Return a table of the loads of several tools; `-` is what a tool does not report."""
    numbers = (
        *("output_throughput", "request_throughput", "latency_p50", "latency_p99"),
        *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"),
    )
    rows = [
        (
            *(one.source, one.load, f"{one.requests:,}", "-" if one.failed is None else f"{one.failed:,}"),
            *(_cell(getattr(one, name)) for name in numbers),
        )
        for one in summaries
    ]
    columns = (
        *("measured by", "load", "requests", "failed", "output tokens/s", "requests/s", "latency p50 (s)", "p99"),
        *("TTFT p50 (s)", "TTFT p99", "TPOT p50 (s)", "TPOT p99"),
    )
    why = [f"{one.source}, {one.load}: {one.why_no_tokens}." for one in summaries if one.why_no_tokens]
    return TextTable("loads of all files", rows, columns=columns, caption="\n".join([CAUTION, *why]))


CAUTION = (
    "Percentiles of other tools exclude failed requests; ours count them as the slowest. Compare only loads with the "
    "same requests."
)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


UNTIMED = "not part of the measured time"
KNEE = "highest arrival rate at which 99 % of the requests meet the limits"


def _knee_row(serving: ServingResult) -> Row:
    name, knee = "knee (requests/s)", serving.knee
    return (name, "-", serving.no_knee) if knee is None else (name, f"{knee:g}", KNEE)


def _memory(serving: ServingResult) -> Row:
    name = "peak GPU memory"
    if serving.memory_gib is None:
        return name, "-", serving.no_memory
    return name, f"{serving.memory_gib:.1f} GiB", "highest of all GPUs"


def _loads(serving: ServingResult) -> TextTable:
    rows, caption = [row(load) for load in serving.loads], "\n".join(notes(serving))
    return TextTable("loads", rows, columns=COLUMNS, caption=caption, num_optional=NUM_OPTIONAL)


def _profile(times: ServerTimes) -> TextTable:
    return TextTable(
        "GPU time of the server",
        server_times.lines(times),
        columns=server_times.COLUMNS,
        caption=server_times.note(times),
    )


class ServingReport(TrialsKindReport[ServingPlan, ServingResult]):
    """Shows serving tasks."""

    work, page_shows = "load a server", "every load and its figures"
    table_name, figure_names = "requests.csv", NAMES
    table_columns = ("server", "load", "request", "arrival_s", "latency_s", "ttft_s", "tpot_s", "tokens_out", "status")

    def plan_rows(self, plan: ServingPlan) -> list[tuple[str, str]]:
        return plan_rows(plan)

    def title(self, trial: ShownTrial[ServingResult]) -> str:
        return title(trial.judged.result, trial.kind_result)

    def tables(self, trial: ShownTrial[ServingResult], *, more: Sequence[Row] = ()) -> list[TextTable]:
        serving, result = trial.kind_result, trial.judged.result
        num_requested = len(serving.loads) + len(serving.missing)
        rows = [
            ("server", serving.server, serving.about),
            ("run_start → run_stop (min)", value_text(result.minutes, "{:.2f}"), ""),
            ("loads measured", f"{len(serving.loads)} of {num_requested}", ""),
            trial.valid_row,
            *([] if serving.healthy_s is None else [("server ready after (s)", f"{serving.healthy_s:.1f}", UNTIMED)]),
            _memory(serving),
            *_costs(serving),
            *([_knee_row(serving)] if serving.swept else []),
            ("software", ", ".join(f"{name} {version}" for name, version in result.software.items()), ""),
        ]
        profile = [] if serving.times is None else [_profile(serving.times)]
        return [TextTable(self.title(trial), [*rows, *more], caption="n = 1 run"), _loads(serving), *profile]

    def detail_tables(self, trial: ShownTrial[ServingResult]) -> list[TextTable]:
        findings = (*trial.judged.result.findings, *trial.kind_result.findings)
        return [findings_table(findings)] if findings else []

    def json_fields(self, result: ServingResult) -> dict[str, Any]:
        return {
            "loads": [{"load": one.load.name, "loadgen": one.validity, "reason": one.reason} for one in result.loads]
        }

    def table_rows(self, trial: ShownTrial[ServingResult]) -> Iterator[Sequence[object]]:
        return _rows(trial)

    def cards(self, trial: ShownTrial[ServingResult]) -> list[Card]:
        serving = trial.kind_result
        num_requested = len(serving.loads) + len(serving.missing)
        cards = [Card(name="loads measured", value=f"{len(serving.loads)}", unit=f"of {num_requested}")]
        rates = [(rate, load) for load in serving.loads if (rate := load.output_throughput) is not None]
        if rates:
            rate, load = max(rates, key=lambda pair: pair[0])
            cards.append(Card(name="highest output", value=_rate(rate), unit="tokens/s", note=f"load {load.load.name}"))
            p99 = _seconds(load.percentile_s(load.latency_s, 99))
            cards.append(Card(name="its latency p99", value=p99, unit="s" if p99 != "-" else ""))
        if serving.swept:
            _, knee, note = _knee_row(serving)
            cards.append(Card(name="knee", value=knee, unit="requests/s" if knee != "-" else "", note=note))
        if serving.memory_gib is not None:
            cards.append(Card(name="peak GPU memory", value=f"{serving.memory_gib:.1f}", unit="GiB"))
        return cards

    def figures(self, trials: Sequence[ShownTrial[ServingResult]], out: Path, *, heading: str) -> list[Shown]:
        places = ", ".join(dict.fromkeys(one.judged.result.platform or "platform not logged" for one in trials))
        random = " Random weights: the times are valid, the generated text is not." * any(
            t.kind_result.is_random for t in trials
        )
        note = f"{places}, n = {len(trials)} run{'s' if len(trials) > 1 else ''}.{random}"
        named = self._named(trials)
        charts = serving_charts.charts(named)
        return [
            drawings.titled(file, f"{CAPTIONS[file.stem]}{random}", charts.get(file.stem, {}))
            for file in draw(named, out, heading=heading, note=note)
        ]

    def charts(self, trials: Sequence[ShownTrial[ServingResult]]) -> Charts:
        of_figures = serving_charts.charts(self._named(trials))
        return {name: chart for of_figure in of_figures.values() for name, chart in of_figure.items()}

    def _named(self, trials: Sequence[ShownTrial[ServingResult]]) -> list[NamedResult]:
        return [NamedResult(_name(trial, trials), trial.kind_result) for trial in trials]


REPORT = ServingReport()
