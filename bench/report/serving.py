"""What serving tasks measured as files to hand on: a page, every load and request as CSV, and the figures."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import mllog
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report import drawings, output_folder, template
from bench.report.canvas import FAINT_INK, INK, TARGET_COLOR, canvas, save, shortened
from bench.report.kernels import COLORS
from bench.report.tables import inert
from bench.report.trials import ReadTrial
from bench.results.serving import LoadResult, ServingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = (
    *("load", "requests", "failed", "output tokens/s", "requests/s", "goodput", "latency p50 (s)", "p90", "p99"),
    *("p100", "TTFT p50 (s)", "TTFT p99", "TPOT p50 (ms)", "TPOT p99", "loadgen", "client's share"),
)


def title(result: Result, serving: ServingResult) -> str:
    """Return the name of the task, its server, and where it ran."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "serving"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, count = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    place = f"{count} x {device}" if device else "elsewhere"
    where = ", ".join(str(part) for part in (serving.server, serving.model, place, result.platform) if part)
    return printable(f"{name}: {where}")


def row(load: LoadResult) -> tuple[str, ...]:
    """Return the cells of a load; what was not measured is a dash, whose reason `notes` has."""
    latencies = [_seconds(load.percentile_s(load.latency_s, share)) for share in (50, 90, 99, 100)]
    ttft = [_of_tokens(load, load.ttft_s, share, 1) for share in (50, 99)]
    tpot = [_of_tokens(load, load.tpot_s, share, 1000) for share in (50, 99)]
    rates = [_rate(rate) for rate in (load.output_throughput, load.request_throughput, load.goodput)]
    share = "-" if load.client_share is None else f"{100 * load.client_share:.1f} %"
    counts = (f"{len(load.status):,}", f"{load.num_failed:,}")
    return (load.load.name, *counts, *rates, *latencies, *ttft, *tpot, load.validity, share)


def notes(serving: ServingResult) -> list[str]:
    """Return why cells of these loads are dashes or INVALID, and what the columns mean."""
    found = [
        "Percentiles are of all requests, failed ones as the slowest. The client's share is its own largest delay, of "
        "the latency."
    ]
    of_note: dict[str, list[str]] = {}
    for load in serving.loads:
        for note in _of_load(load):
            of_note.setdefault(note, []).append(load.load.name)
    many = len(serving.loads) if len(serving.loads) > 1 else 0
    return found + [
        f"{'every load' if len(names) == many else ', '.join(names)}: {note}." for note, names in of_note.items()
    ]


def _of_load(load: LoadResult) -> Iterator[str]:
    """Yield why cells of a load are dashes or INVALID."""
    if load.validity != "VALID":
        yield f"{load.validity} by loadgen: {load.reason}"
    if load.no_token_times:
        yield f"TTFT and TPOT are -: {load.no_token_times}"
    if any(load.percentile_s(load.latency_s, share) is None for share in (50, 90, 99, 100)):
        yield "a percentile that falls on a failed request is -"
    if load.goodput is None:
        yield f"goodput is -: {_no_goodput(load)}"


def _no_goodput(load: LoadResult) -> str:
    limits = load.limits
    if limits.ttft_s is None and limits.tpot_s is None and limits.latency_s is None:
        return "no limit is set"
    return load.no_token_times or "no request was answered"


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
"""Of the figures' files."""


@dataclass(frozen=True, slots=True)
class Named:
    """The serving result of a trial, and what the figures call it."""

    name: str
    serving: ServingResult


def draw(found: Sequence[Named], folder: Path, *, heading: str, note: str) -> list[Path]:
    """Draw every figure that there is data for, as PNGs in a folder; return them."""
    figures = (cdf_figure, throughput_figure, sweep_figure)
    paths = [folder / f"{name}.png" for name in NAMES]
    return [
        path for figure, path in zip(figures, paths, strict=True) if figure(found, path, heading=heading, note=note)
    ]


def cdf_figure(found: Sequence[Named], path: Path, *, heading: str, note: str) -> bool:
    """Draw the share of all requests that were answered within so many seconds, a curve for each load.

    A curve that does not reach 1 says how many requests failed. Return whether there is anything to draw.
    """
    loads = [(named, load) for named in found for load in named.serving.loads if _sound(load)]
    if not loads:
        return False
    figure, (axes,) = canvas(_HEIGHT_INCHES, f"latency: {heading}", note)
    for number, (named, load) in enumerate(loads):
        seconds, total = _sound(load), len(load.status)
        shares = [(n + 1) / total for n in range(len(seconds))]
        label = shortened(_label(named, load, several=len(found) > 1))
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


def throughput_figure(found: Sequence[Named], path: Path, *, heading: str, note: str) -> bool:
    """Draw the output tokens per second of every load as bars from zero; return whether there is any."""
    bars = [
        (_label(named, load, several=len(found) > 1), rate, COLORS[number % len(COLORS)])
        for number, named in enumerate(found)
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
    axes.set_xlabel("output tokens per second, of requests answered as asked for")
    axes.grid(axis="y", visible=False)
    save(figure, path)
    return True


def sweep_figure(found: Sequence[Named], path: Path, *, heading: str, note: str) -> bool:
    """Draw the latency, and the requests answered per second, over the rate at which they arrive.

    Return whether any trial has several rates.
    """
    swept = [(named, loads) for named in found if (loads := named.serving.swept)]
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
        right.plot(*zip(*done, strict=True), "-", marker="o", markersize=3.5, color=color, label=f"{prefix}answered")
        if named.serving.knee is not None:
            for axes in (left, right):
                axes.axvline(named.serving.knee, color=TARGET_COLOR, linewidth=0.9, linestyle=":", label="knee")
        as_they_arrive = "as many as arrive" if number == 0 else None
        right.plot([0, rates[-1]], [0, rates[-1]], color=FAINT_INK, linewidth=0.9, linestyle=":", label=as_they_arrive)
        limit = loads[0].limits.latency_s
        if number == 0 and limit is not None and limit <= 2 * left.get_ylim()[1]:
            left.axhline(limit, color=INK, linewidth=0.9, linestyle=":", label="limit")
    for axes, vertical in ((left, "seconds to the last token"), (right, "requests answered per second")):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _name_axes(axes, "requests arriving per second", vertical)
        axes.legend(fontsize=7, edgecolor="none", framealpha=0.8)
    save(figure, path)
    return True


def _sound(load: LoadResult) -> list[float]:
    """Return the latencies of the requests that were answered as asked for, in rising order."""
    return sorted(s for s, one in zip(load.latency_s, load.status, strict=True) if s is not None and one == "ok")


def _label(named: Named, load: LoadResult, *, several: bool) -> str:
    return f"{load.load.name}: {named.name}" if several else load.load.name  # the end of a long name is left out


def _name_axes(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)


PAGE, TABLE, TEMPLATE = "report.html", "requests.csv", "serving.html.j2"
_FILES = re.compile(rf"report\.html|requests\.csv|({'|'.join(NAMES)})\.png")
"""Names of what such a report consists of."""
_COLUMNS = ("trial", "server", "load", "request", "arrival_s", "latency_s", "ttft_s", "tpot_s", "tokens_out", "status")


def write(trials: Sequence[ReadTrial[ServingResult]], out: Path, *, heading: str) -> Path:
    """Write the page, the table of every request and the figures into a folder; return the page's path.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    output_folder.write(out, lambda part: _write(trials, part, heading=heading), page=PAGE, names=_FILES)
    return out / PAGE


def _write(trials: Sequence[ReadTrial[ServingResult]], out: Path, *, heading: str) -> None:
    (out / TABLE).write_text(csv_text(trials), encoding="utf-8")
    places = ", ".join(dict.fromkeys(trial.result.platform or "platform not logged" for trial in trials))
    random = " Random weights: times mean something, answers do not." * any(t.found.is_random for t in trials)
    note = f"{places}, n = {len(trials)} run{'s' if len(trials) > 1 else ''}.{random}"
    named = [Named(_name(trial, trials), trial.found) for trial in trials]
    files = draw(named, out, heading=heading, note=note)
    context = {
        "title": heading,
        "sections": [_section(trial) for trial in trials],
        "columns": COLUMNS,
        "figures": [drawings.shown(file, CAPTIONS[file.stem]) for file in files],
        "charts": {},
        "versions": {"runstop": version("runstop")},
    }
    (out / PAGE).write_text(template.page(TEMPLATE, context | template.context(has_charts=False)), encoding="utf-8")


CAPTIONS = {
    "latency_cdf": "The share of all requests that were answered within so many seconds:",
    "output_throughput": "Output of each load:",
    "rate_sweep": "Latency and answered requests over the rate of arrival; dotted: every request answered:",
}


def _name(trial: ReadTrial[ServingResult], trials: Sequence[ReadTrial[ServingResult]]) -> str:
    """Return what a figure calls a trial: its server and model where that tells it from the others."""
    name = f"{trial.found.server} {Path(trial.found.model).name}"
    others = [f"{one.found.server} {Path(one.found.model).name}" for one in trials if one is not trial]
    return f"{name} ({trial.name})" if name in others else name


def _section(trial: ReadTrial[ServingResult]) -> dict[str, Any]:
    """Return what the page says of a trial."""
    serving = trial.found
    memory = f"{serving.memory_gib:.1f} GiB" if serving.memory_gib is not None else f"- ({serving.no_memory})"
    verdict = "every load was measured, and answered as asked for" if trial.is_proven else "not proven"
    errors = [finding.titled for finding in trial.result.findings if finding.severity == "error"]
    return {
        "name": f"{trial.name}: {serving.server}, {serving.model}",
        "lead": f"{serving.about}; GPU memory at its peak {memory}{_knee(serving)}: {verdict}.",
        "problems": [*errors, *serving.problems],
        "rows": [row(one) for one in serving.loads],
        "notes": notes(serving),
    }


def _knee(serving: ServingResult) -> str:
    if not serving.swept:
        return ""
    return f"; knee - ({serving.no_knee})" if serving.knee is None else f"; knee {serving.knee:g} requests/s"


def csv_text(trials: Sequence[ReadTrial[ServingResult]]) -> str:
    """Return every request of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in trials:
        writer.writerows([inert(value) for value in row] for row in _rows(trial))
    return text.getvalue()


def _rows(trial: ReadTrial[ServingResult]) -> Iterator[Sequence[object]]:
    for one in trial.found.loads:
        columns = (one.arrival_s, one.latency_s, one.ttft_s, one.tpot_s, one.tokens_out, one.status)
        for number, values in enumerate(zip(*columns, strict=True)):
            at, took, *tokens, count, status = values
            times = ["", ""] if one.no_token_times else tokens
            yield [trial.name, trial.found.server, one.load.name, number, at, took, *times, count, status]
