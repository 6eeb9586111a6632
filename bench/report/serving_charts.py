"""The charts of a serving page: latencies of all requests, output of each load, and a sweep of arrival rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import labels
from bench.report.bars import bar_chart
from bench.report.canvas import COLORS, INTERVAL_COLOR, INVALID_COLOR
from bench.report.curves import number, thinned
from bench.report.figures import Bar
from bench.report.template import Charts, Trace, axis, chart, text, view
from bench.results.serving import LoadResult, ServingResult

_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True)
class NamedResult:
    """The serving result of a trial, with its name in figures."""

    name: str
    serving: ServingResult


def charts(results: Sequence[NamedResult]) -> dict[str, Charts]:
    """Return the charts of each figure with their titles, by the name of the figure's file."""
    short = labels.short([named.name for named in results])
    named = [NamedResult(name, one.serving) for name, one in zip(short, results, strict=True)]
    of_figures = {"latency_cdf": _latencies(named), "output_throughput": _outputs(named), "rate_sweep": _sweep(named)}
    return {name: of_figure for name, of_figure in of_figures.items() if of_figure}


def ok_latencies(load: LoadResult) -> list[float]:
    """Return the latencies of successful requests, in ascending order."""
    return sorted(s for s, one in zip(load.latency_s, load.status, strict=True) if s is not None and one == "ok")


def load_label(named: NamedResult, load: LoadResult, *, several: bool) -> str:
    return f"{load.load.name}: {named.name}" if several else load.load.name  # a long name is cut at its end


def _latencies(results: Sequence[NamedResult]) -> Charts:
    loads = [(named, load) for named in results for load in named.serving.loads if ok_latencies(load)]
    traces: list[Trace] = []
    for place, (named, load) in enumerate(loads):
        seconds, total = ok_latencies(load), len(load.status)
        points = thinned([(0.0, 0.0), *((s, 100 * (n + 1) / total) for n, s in enumerate(seconds))])
        name, dash = (
            text(load_label(named, load, several=len(results) > 1)),
            _DASHES[place // len(COLORS) % len(_DASHES)],
        )
        traces.append(
            {
                "mode": "lines",
                "name": name,
                "x": [number(x) for x, _ in points],
                "y": [number(y) for _, y in points],
                "line": {"color": COLORS[place % len(COLORS)], "width": 1.8, "shape": "hv", "dash": dash},
                "hovertemplate": f"%{{y:.1f}} % within %{{x:,.3g}} s<extra>{name}</extra>",
            }
        )
    if not traces:
        return {}
    shown: dict[str, Any] = {"xaxis": axis("seconds from arrival to the last token", rangemode="tozero")}
    limit, longest = loads[0][1].limits.latency_s, ok_latencies(loads[0][1])[-1]
    if limit is not None and limit <= 2 * longest:
        shown["shapes"] = [_line("limit", x=limit)]
    shares = axis("share of all requests (%)", range=[0, 102])
    return {"latency_cdf": ("", chart(view("", traces, yaxis=shares, **shown)))}


def _outputs(results: Sequence[NamedResult]) -> Charts:
    bars, colors = [], []
    for place, named in enumerate(results):
        for load in named.serving.loads:
            if (rate := load.output_throughput) is not None:
                bars.append(Bar(name=load_label(named, load, several=len(results) > 1), value=rate, ours=True))
                colors.append(COLORS[place % len(COLORS)])
    what = "output tokens per second, successful requests only"
    return {"output_throughput": ("", bar_chart(bars, what=what, colors=colors))} if bars else {}


def _sweep(results: Sequence[NamedResult]) -> Charts:
    swept = [(named, loads) for named in results if (loads := named.serving.swept)]
    if not swept:
        return {}
    latencies: list[Trace] = []
    done: list[Trace] = []
    knees: list[dict[str, Any]] = []
    for place, (named, loads) in enumerate(swept):
        color, prefix = COLORS[place % len(COLORS)], f"{text(named.name)} " if len(swept) > 1 else ""
        rates = [load.load.rate or 0.0 for load in loads]
        for share, dash in ((50, "solid"), (99, "dash")):
            latencies.append(
                _curve(
                    rates,
                    [load.percentile_s(load.latency_s, share) for load in loads],
                    color,
                    f"{prefix}p{share}",
                    dash,
                )
            )
        done.append(_curve(rates, [load.request_throughput or 0.0 for load in loads], color, f"{prefix}completed"))
        if named.serving.knee is not None:
            knees.append(_line("knee", x=named.serving.knee))
    last = max(load.load.rate or 0.0 for _, loads in swept for load in loads)
    done.append(
        {
            "mode": "lines",
            "name": "all arriving requests",
            "x": [0, last],
            "y": [0, last],
            "line": {"color": INTERVAL_COLOR, "width": 1.2, "dash": "dot"},
            "hoverinfo": "skip",
        }
    )
    limit = swept[0][1][0].limits.latency_s
    highest = max((y for trace in latencies for y in trace["y"] if y is not None), default=0.0)
    limits = [_line("limit", y=limit)] if limit is not None and limit <= 2 * highest else []
    arriving = axis("requests arriving per second", rangemode="tozero")
    seconds, completed = (
        axis(title, rangemode="tozero") for title in ("seconds to the last token", "requests completed per second")
    )
    return {
        "rate_sweep_latency": (
            "Latency",
            chart(view("", latencies, xaxis=arriving, yaxis=seconds, shapes=[*knees, *limits])),
        ),
        "rate_sweep_completed": ("Completed", chart(view("", done, xaxis=arriving, yaxis=completed, shapes=knees))),
    }


def _curve(x: Sequence[float], y: Sequence[float | None], color: str, name: str, dash: str = "solid") -> Trace:
    return {
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": [None if value is None else number(value) for value in y],
        "line": {"color": color, "width": 1.8, "dash": dash},
        "marker": {"color": color, "size": 6},
        "hovertemplate": f"%{{y:,.4g}} at %{{x:g}} requests/s<extra>{name}</extra>",
    }


def _line(name: str, *, x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """Return a line across the chart with its name."""
    ends = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1} if x is not None else {}
    ends = ends or {"xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    label = {"text": name, "textposition": "end", "font": {"color": INVALID_COLOR, "size": 11}}
    return {"type": "line", **ends, "line": {"color": INVALID_COLOR, "width": 1.2, "dash": "dot"}, "label": label}
