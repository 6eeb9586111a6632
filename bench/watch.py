"""Show a trial while it runs, from its log alone."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import mllog
from bench.mllog import Event, Follower, is_number

if TYPE_CHECKING:
    from rich.console import Console, Group

POLL_S = 0.2
PLAIN_LINE_EVERY_MS = 5000


@dataclass(frozen=True, slots=True)
class Goal:
    """What the trial is for: known from its plan, before it has logged anything."""

    title: str
    max_samples: int
    eval_samples: tuple[int, ...]
    """When it evaluates, in samples trained on."""
    target: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the log says the trial is; None is not logged yet."""

    phase: str = "starting"
    stopped: bool = False
    step: int | None = None
    samples: int = 0
    train_loss: float | None = None
    lr: float | None = None
    throughput_samples_s: float | None = None
    eval_loss: float | None = None
    eval_samples: int = 0


_PHASES = {
    mllog.INIT_START: "preparing",
    mllog.RUN_START: "training",
    mllog.BLOCK_START: "training",
    mllog.EVAL_START: "evaluating",
    mllog.EVAL_STOP: "training",
}


def advance(progress: Progress, event: Event) -> Progress:
    """Return the progress after an event; what it does not say stays as it was."""
    said = event.metadata
    samples = max(progress.samples, int(_number(said.get("samples_count"), 0)))
    if event.key == mllog.TRAIN_LOSS:
        step = int(_number(said.get("step"), progress.step or 0))
        lr, loss = _number(said.get("lr"), progress.lr), _number(event.value, None)
        return replace(progress, samples=samples, step=step, lr=lr, train_loss=loss)
    if event.key == mllog.TRACKED_STATS and isinstance(event.value, dict):
        throughput = _number(event.value.get("throughput"), progress.throughput_samples_s)
        return replace(progress, throughput_samples_s=throughput)
    if event.key == mllog.EVAL_ACCURACY:
        return replace(progress, samples=samples, eval_samples=samples, eval_loss=_number(event.value, None))
    if event.key == mllog.RUN_STOP:
        return replace(progress, samples=samples, stopped=True, phase=f"stopped: {said.get('status')}")
    return replace(progress, phase=_PHASES.get(event.key, progress.phase))


def _number(value: Any, otherwise: Any) -> Any:
    return value if is_number(value) else otherwise


def next_evaluation(progress: Progress, goal: Goal) -> int | None:
    """Return at how many samples the next evaluation is due."""
    return next((samples for samples in goal.eval_samples if samples > progress.eval_samples), None)


def seconds_left(progress: Progress, goal: Goal) -> float | None:
    """Return the most that training can still take at the present pace, evaluations apart; the target may end it sooner."""
    if progress.stopped or not progress.throughput_samples_s or progress.throughput_samples_s < 0:
        return None
    return max(0, goal.max_samples - progress.samples) / progress.throughput_samples_s


def follow(log: Path, goal: Goal, *, is_alive: Callable[[], bool], console: "Console") -> None:
    """Show the trial until it is no longer alive and its log is read to the end.

    A terminal gets a picture that is redrawn, anything else plain lines. Evaluations stay on the screen either way.
    """
    if console.is_terminal:
        _follow_live(log, goal, is_alive, console)
    else:
        _follow_plain(log, goal, is_alive, console)


def _batches(log: Path, is_alive: Callable[[], bool]) -> Iterator[list[Event]]:
    follower, alive = Follower(log), True
    while alive:
        alive = is_alive()  # asked before the log is read: what was written last is then read too
        yield follower.poll()
        time.sleep(POLL_S * alive)


def _follow_live(log: Path, goal: Goal, is_alive: Callable[[], bool], console: "Console") -> None:
    from rich.live import Live

    progress = Progress()
    with Live(_picture(progress, goal), console=console, auto_refresh=False) as live:
        for events in _batches(log, is_alive):
            for event in events:
                progress = advance(progress, event)
                if event.key == mllog.EVAL_ACCURACY:
                    console.print(_evaluation(progress, goal), markup=False, highlight=False)
            live.update(_picture(progress, goal), refresh=True)


def _follow_plain(log: Path, goal: Goal, is_alive: Callable[[], bool], console: "Console") -> None:
    progress, due_ms = Progress(), 0
    for event in chain.from_iterable(_batches(log, is_alive)):
        progress = advance(progress, event)
        line = None
        if event.key == mllog.EVAL_ACCURACY:
            line = _evaluation(progress, goal)
        elif event.key == mllog.TRAIN_LOSS and event.time_ms >= due_ms:
            due_ms = event.time_ms + PLAIN_LINE_EVERY_MS
            line = "  ".join(filter(None, [_share(progress, goal), _numbers(progress), _left(progress, goal)]))
        if line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _picture(progress: Progress, goal: Goal) -> "Group":
    """Return four lines: what, how far, the numbers of training, the evaluations."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    title = Text.assemble((goal.title, "bold"), "  ", (progress.phase, "dim"))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=goal.max_samples, completed=progress.samples, width=30),
        _share(progress, goal),
        _left(progress, goal),
    )
    numbers = Text(_numbers(progress))
    evaluation = Text(_evaluation(progress, goal), style="green" if _reached(progress, goal) else "")
    for line in (title, numbers, evaluation):
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(title, bar, numbers, evaluation)


def _share(progress: Progress, goal: Goal) -> str:
    return f"{progress.samples:,} of {goal.max_samples:,} samples"


def _left(progress: Progress, goal: Goal) -> str:
    seconds = seconds_left(progress, goal)
    if seconds is None:
        return ""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"≤ {hour}:{minute:02}:{second:02} of training left" if hour else f"≤ {minute}:{second:02} of training left"


def _numbers(progress: Progress) -> str:
    parts = (
        ("step {:,}", progress.step),
        ("train loss {:.4f}", progress.train_loss),
        ("lr {:.2e}", progress.lr),
        ("{:.2f} samples/s", progress.throughput_samples_s),
    )
    return "  ".join(text.format(value) for text, value in parts if value is not None)


def _evaluation(progress: Progress, goal: Goal) -> str:
    parts = []
    if progress.eval_loss is not None:
        parts.append(f"eval loss {progress.eval_loss:.4f} at {progress.eval_samples:,} samples")
    if goal.target is not None:
        verdict = "reached" if _reached(progress, goal) else "not reached"
        parts.append(f"target {goal.target:g}" + (f" {verdict}" if parts else ""))
    if not _reached(progress, goal) and (upcoming := next_evaluation(progress, goal)):
        parts.append(f"next at {upcoming:,}")
    return ", ".join(parts)


def _reached(progress: Progress, goal: Goal) -> bool:
    return goal.target is not None and progress.eval_loss is not None and progress.eval_loss <= goal.target
