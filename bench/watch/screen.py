"""Draw running trials as a screen that fits the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.mlperf.reader import clean
from bench.mlperf.result import UNVERIFIED
from bench.watch.lines import BASIS, View, current, facts, percent
from bench.watch.prediction import Coming
from bench.watch.progress import Progress, clock

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

LABEL_WIDTH, COLUMN_WIDTH, BAR_WIDTH, NAME_WIDTH = 12, 8, 24, 18
LEAST_ROWS = 4
"""Minimum number of listed trials; the table of probabilities is left out to make room for them."""
UNLIKELY = 0.005
"""Upcoming evaluations with a lower probability are left out, except the next one."""
QUIET_S = 60
"""After this time without a line, the age of the last line is shown."""
SPARKS, SPARKED = "▁▂▃▄▅▆▇█", 20
SPARK_RANGE = 0.1
"""Step times are drawn within median ± 10 %, so that small variations look small."""


def picture(views: Sequence[View], *, width: int, height: int) -> "Group":
    """Return the screen for a terminal of this size: one trial in detail, and a table if there are several."""
    from rich.console import Group
    from rich.text import Text

    shown = current(views)
    foot = Text(f"{UNVERIFIED} n = {len(views)}", style="dim")
    lines = [_headline(shown), *_details(shown, _chances(shown.outlook.coming, width), width), foot]
    least = 1 + min(len(views), LEAST_ROWS) if len(views) > 1 else 0
    if len(lines) + least >= height:
        lines = [_headline(shown), *_details(shown, [], width), foot]
    for text in lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    rows = height - len(lines) - 2
    overview = [_overview(views, shown, rows=rows)] if len(views) > 1 and rows > 0 else []
    return Group(*overview, *lines)


def _headline(view: View) -> "Text":
    from rich.text import Text

    progress, seen = view.progress, view.outlook
    text = Text.assemble((clean(view.name), "bold"), "  ", (view.state, _style(view)))
    if seen.elapsed_s is not None:
        text.append(f"  {clock(seen.elapsed_s)}", "bold")
    if seen.silent_s is not None and seen.silent_s >= QUIET_S:
        text.append(f"  last line {clock(seen.silent_s)} ago", "yellow")
    names = [view.planned.title or progress.benchmark, progress.platform]
    return text.append("  " + " on ".join(clean(name) for name in names if name))


def _style(view: View) -> str:
    if view.outlook.warnings:
        return "bold red"
    if view.progress.phase == "stopped":
        return "bold green" if view.is_reached else "bold red"
    return {"evaluating": "cyan", "training": "green", "measuring": "green", "generating": "green"}.get(
        view.progress.phase, "yellow"
    )


def _details(view: View, chances: "list[Text]", width: int) -> "list[Text]":
    """Return a line for each fact, the probabilities below the forecast, and warnings."""
    from rich.text import Text

    more = {"trained": _bar(view), "step time": _sparkline(view.progress)}
    lines = []
    for label, text in facts(view, width=width - LABEL_WIDTH):
        lines.append(
            Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), "  ".join(filter(None, [text, more.get(label)])))
        )
        lines += chances if label == BASIS else []
    return lines + [Text(f"! {warning}", "bold red") for warning in view.outlook.warnings]


def _bar(view: View) -> str:
    """Return a progress bar up to the likely end of training, else up to the end in its plan."""
    seen, samples = view.outlook, view.progress.samples
    likely = seen.samples_range[1] if seen.samples_range else None
    total = likely or view.planned.max_samples
    if total is None or samples is None or not view.is_running:
        return ""
    share = min(1.0, samples / total)
    done = round(share * BAR_WIDTH)
    limit = "of" if likely or view.planned.target is None else "of at most"  # a target may be reached earlier
    return f"{'━' * done}{'╌' * (BAR_WIDTH - done)} {percent(share)} {limit} {total:,.0f}"


def _sparkline(progress: Progress) -> str:
    middle = progress.step_time_ms
    if middle is None or len(progress.step_times_ms) < 2:
        return ""
    places = [(time_ms / middle - 1 + SPARK_RANGE) / (2 * SPARK_RANGE) for time_ms in progress.step_times_ms[-SPARKED:]]
    return "".join(SPARKS[min(len(SPARKS) - 1, max(0, int(place * len(SPARKS))))] for place in places)


def _chances(coming: Sequence[Coming], width: int) -> "list[Text]":
    """Return a table of the upcoming evaluations: when each ends, and its probability to reach the target."""
    from rich.text import Text

    likely = [c for n, c in enumerate(coming) if n == 0 or c.probability >= UNLIKELY]
    likely = likely[: max(1, (width - LABEL_WIDTH) // COLUMN_WIDTH)]
    if not likely:
        return []
    rows = {
        "samples": [f"{c.samples:,}" for c in likely],
        "minutes": [f"{c.minutes:.1f}" for c in likely],
        "min low": [f"{c.minutes_low:.1f}" for c in likely],
        "min high": [f"{c.minutes_high:.1f}" for c in likely],
        "P(target)": [percent(c.probability) for c in likely],
        "cumulative": [percent(c.cumulative) for c in likely],
    }
    return [
        Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells))
        for label, cells in rows.items()
    ]


def _overview(views: Sequence[View], shown: View, *, rows: int) -> "Table":
    """Return a row for each trial; if there is no room for all, those around the one shown in detail."""
    from rich.table import Table
    from rich.text import Text

    first = max(0, min(list(views).index(shown) - rows // 2, len(views) - rows))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    for name in ("trial", "state", "samples", "evaluation", "s/step", "time", "expected min"):
        table.add_column(name, justify="left" if name in ("trial", "state") else "right", no_wrap=True)
    for view in list(views)[first : first + rows]:
        name_cell = Text(_short(view.name), "bold" if view is shown else "")
        table.add_row(name_cell, Text(view.state, _style(view)), *_row(view))
    return table


def _short(name: str) -> str:
    """Return a name, cut at its start if it is long, since names of a set differ at their end."""
    name = clean(name)
    return name if len(name) <= NAME_WIDTH else f"…{name[1 - NAME_WIDTH :]}"


def _row(view: View) -> list[str]:
    progress, seen = view.progress, view.outlook
    expected = seen.minutes_range[1] if seen.minutes_range else None
    return [
        "" if progress.samples is None else f"{progress.samples:,}",
        f"{progress.evaluations[-1].value:.4f}" if progress.evaluations else "",
        "" if seen.step_time_ms is None else f"{seen.step_time_ms / 1000:.4g}",
        "" if seen.elapsed_s is None else clock(seen.elapsed_s),
        "" if expected is None else f"{expected:.1f}",
    ]
