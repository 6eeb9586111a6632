"""Watch running trials: a live screen on a terminal, lines with timestamps in a pipe, or JSON."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.mlperf.reader import Follower, printable
from bench.mlperf.result import UNVERIFIED
from bench.watch.hardware import Gpus
from bench.watch.lines import View, current, evaluation_line, line, warning_lines
from bench.watch.prediction import Planned
from bench.watch.screen import picture
from bench.watch.sources import Watched, WatchedTrials
from bench.watch.trackers import Curves

if TYPE_CHECKING:
    from rich.console import Console

LAUNCHED_POLL_S, POLL_S = 0.2, 1.0
"""Seconds between two reads of the logs: of ranks that this process started, and of others."""
LIVE_S, PLAIN_S = 1.0, 60.0
"""Seconds between two updates: of the screen, and of the lines in a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Options of `watch`."""

    interval_s: float | None = None
    """None means one second on a terminal and one minute in a pipe."""
    once: bool = False
    until_target: bool = False
    """End as soon as all trials have reached their targets."""
    show_json: "Callable[[int, Sequence[View]], None] | None" = None
    """Prints the time in milliseconds and the trials as JSON; None: text."""


def watch(job: WatchedTrials, how: How, *, console: "Console | None" = None, poll_s: float = POLL_S) -> bool:
    """Show a job until it ends; return whether every trial reached its target."""
    with closing(job), _shown(job, how, console) as (show, usual_s):
        interval_s, due = usual_s if how.interval_s is None else how.interval_s, 0.0
        while True:
            ends = job.is_over() or how.once  # before reading, so that the last lines are not missed
            job.poll()
            ends = ends or job.has_stopped() or (how.until_target and job.is_reached())
            now = time.monotonic()
            show(job.views(), ends or now >= due)
            if ends:
                return job.is_reached()
            due = now + interval_s if now >= due else due
            time.sleep(min(poll_s, interval_s))


def follow(
    log: Path,
    expected: Planned,
    *,
    name: str,
    is_alive: Callable[[], bool],
    console: "Console",
    curves: Curves | None = None,
    gpus: Gpus | None = None,
) -> None:
    """Show one trial until it ends and its log is read to the end; the last output stays on the screen."""
    trial = Watched(name, Follower(log), expected, curves=curves, gpus=gpus)
    job = WatchedTrials((trial,), is_over=lambda: not is_alive(), ends_with_logs=False)
    watch(job, How(), console=console, poll_s=LAUNCHED_POLL_S)


Show = Callable[[list[View], bool], None]
"""Arguments: the trials, and whether an update of the output is due."""


@contextmanager
def _shown(job: WatchedTrials, how: How, console: "Console | None") -> Iterator[tuple[Show, float]]:
    """Yield a function that shows trials, and the update interval in seconds."""
    from rich.console import Console

    screen = console or Console(highlight=False)
    if how.show_json is not None:
        yield partial(_show_json, job, how.show_json), LIVE_S if screen.is_terminal else PLAIN_S
    elif not screen.is_terminal:
        _say(screen, f"{UNVERIFIED} n = {len(job.trials)}")
        yield partial(_show_lines, job, screen, set()), PLAIN_S
    elif how.once:
        yield partial(_show_picture, screen), LIVE_S
    else:
        with _live(screen, whole_screen=console is None) as show:
            yield show, LIVE_S


@contextmanager
def _live(console: "Console", *, whole_screen: bool) -> Iterator[Show]:
    """Redraw the screen, in full-screen mode or below earlier output; the last state stays visible."""
    from rich.live import Live

    latest: list[View] = []
    try:
        with Live(console=console, auto_refresh=False, screen=whole_screen) as live:

            def show(views: list[View], is_due: bool) -> None:
                if is_due:
                    latest[:] = views
                    live.update(picture(views, width=console.width, height=console.height), refresh=True)

            yield show
    finally:
        if whole_screen and latest:
            _show_picture(console, latest, True)


def _show_picture(console: "Console", views: list[View], is_due: bool) -> None:
    if is_due:
        console.print(picture(views, width=console.width, height=console.height))


def _show_json(
    job: WatchedTrials, show: Callable[[int, Sequence[View]], None], views: list[View], is_due: bool
) -> None:
    if is_due:
        show(job.now_ms(), views)


def _show_lines(job: WatchedTrials, console: "Console", printed: set[str], views: list[View], is_due: bool) -> None:
    """Print each new evaluation; if an update is due, also a line for each trial that runs or has just ended."""
    lines = [
        f"{_date(evaluated.time_ms)}  {evaluation_line(view, evaluated)}"
        for view in views
        for evaluated in view.progress.evaluations
    ]
    lines = [text for text in lines if text not in printed]
    printed.update(lines)
    for view in views if is_due else ():
        text = line(view)
        if view.is_running or (text not in printed and (view.has_begun or view is current(views))):
            printed.add(text)
            lines += [f"{_date(job.now_ms())}  {shown}" for shown in (text, *warning_lines(view))]
    for text in lines:
        _say(console, text)


def _say(console: "Console", text: str) -> None:
    print(printable(text), file=console.file, flush=True)


def _date(time_ms: int) -> str:
    """Return a time in local time; a placeholder if the log's time is out of range."""
    try:
        return datetime.fromtimestamp(time_ms / 1000).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "unknown time"
