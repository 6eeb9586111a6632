"""Describe the state of a trial in text. Text from logs has control characters escaped and secrets masked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.mlperf.reader import clean
from bench.watch.hardware import Hottest
from bench.watch.prediction import Outlook, Planned, goal, reached
from bench.watch.progress import Evaluated, Progress, clock

SHOWN_EVALUATIONS, SHOWN_CHANCES = 3, 3
"""How many of the latest evaluations, and of the most likely upcoming ones, are listed."""
BASIS, NOTE = "based on", "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of one trial at one moment."""

    name: str
    progress: Progress
    planned: Planned
    outlook: Outlook
    outcome: str | None = None
    """The outcome in the ledger of the run."""
    note: str | None = None
    """A remark about its log: it does not exist yet, or it was restarted."""
    hottest: Hottest | None = None
    """The hottest GPU, while the trial runs."""

    @property
    def is_reached(self) -> bool:
        return reached(self.progress, self.planned)

    @property
    def has_begun(self) -> bool:
        return self.progress.phase != "waiting"

    @property
    def is_running(self) -> bool:
        return self.progress.phase not in ("waiting", "stopped")

    @property
    def state(self) -> str:
        """The phase of the trial, or how it ended."""
        if self.progress.phase != "stopped":
            return self.progress.phase
        if self.is_reached:
            return "target reached" + (f", {clean(self.outcome)}" if self.outcome not in (None, "valid") else "")
        status = clean(self.progress.status or "no status")
        has_target = bool(self.progress.goals) or self.planned.target is not None
        return f"stopped: {status}" + (", but the target was not reached" if status == "success" and has_target else "")


def line(view: View) -> str:
    """Return the trial in one line."""
    elapsed_s = view.outlook.elapsed_s
    elapsed = [] if elapsed_s is None else [clock(elapsed_s)]
    parts = [text if label == NOTE else f"{label} {text}" for label, text in facts(view) if label != BASIS]
    return "  ".join([view.name, view.state, *elapsed, *parts])


def warning_lines(view: View) -> list[str]:
    return [f"{view.name}  ! {warning}" for warning in view.outlook.warnings]


def evaluation_line(view: View, evaluated: Evaluated) -> str:
    """Return one evaluation in one line."""
    at = "" if evaluated.samples is None else f" at {evaluated.samples:,} samples"
    target = goal(view.progress, view.planned, evaluated.metric)
    parts = f"{view.name}  evaluation {_value(evaluated)}{at}"
    if target is None:
        return parts
    return f"{parts}, target {target.value:g} {'reached' if target.is_reached_by(evaluated.value) else 'not reached'}"


def current(views: Sequence[View]) -> View:
    """Return the trial to show in detail: the running one, else the last one that started."""
    running = [view for view in views if view.is_running]
    begun = [view for view in views if view.has_begun]
    return (running or begun[::-1] or list(views))[0]


def facts(view: View, *, width: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield labels and values of everything that is known about the trial; `width` is the room for a value."""
    progress, seen = view.progress, view.outlook
    if view.note:
        yield NOTE, clean(view.note)
    if progress.points_requested is not None:
        latest = f"; last {clean(progress.last_point)}" if progress.last_point and view.is_running else ""
        yield "measured", f"{progress.points_done} of {progress.points_requested} {progress.points_name}{latest}"
    if progress.answers_requested is not None:
        yield "answers", f"{progress.answers_requested:,} requested"
    if progress.samples is not None:
        step = "" if progress.step is None else f", step {progress.step:,}"
        yield "trained", f"{progress.samples:,} samples{step}"
    if progress.train_loss is not None:
        lr = "" if progress.lr is None else f"  lr {progress.lr:.2e}"
        yield "train loss", f"{progress.train_loss:.4f}{lr}"
    if seen.step_time_ms is not None:
        yield "step time", _pace(view)
    if text := _evaluations(view, width):
        yield "evaluation", text
    if view.hottest is not None:
        yield "GPUs", clean(view.hottest.text())
    if progress.phase == "stopped":
        return
    if seen.next_samples is not None:
        yield "next", _next(view)
    if (
        progress.points_requested is None
        and progress.answers_requested is None
        and (forecast := _forecast(seen)) is not None
    ):
        yield "forecast", forecast
    if seen.samples_range is not None and seen.basis:
        yield BASIS, seen.basis
    if seen.left_s is not None:
        chance = "" if seen.chance_in_time is None else f", {percent(seen.chance_in_time)} to reach the target in time"
        yield "walltime", f"{clock(max(0.0, seen.left_s))} left{chance}"


def _pace(view: View) -> str:
    seen, gbs = view.outlook, view.progress.global_batch_size
    assert seen.step_time_ms is not None
    trend = "" if seen.step_time_trend is None else f" ({round(seen.step_time_trend * 100, 1) + 0.0:+.1f} %)"  # no -0.0
    rate = f"  {gbs / seen.step_time_ms * 1000:,.2f} samples/s" if gbs else ""
    return f"{seen.step_time_ms / 1000:.4g} s{trend}{rate}"


def _evaluations(view: View, width: int | None) -> str:
    """Return the latest evaluations and the target: as many as fit, and always the newest."""
    target, done = goal(view.progress, view.planned), view.progress.evaluations
    goal_text = "" if target is None else f"(target {target.value:g})"
    if not done:
        none = "none" if view.progress.phase == "stopped" else "none yet"
        return f"{none}  {goal_text}" if goal_text else ""
    parts = [_value(e) + ("" if e.samples is None else f" at {e.samples:,}") for e in done[-SHOWN_EVALUATIONS:]]
    older = len(done) > SHOWN_EVALUATIONS
    texts = [
        "  ".join(filter(None, ("…" * (older or first > 0), *parts[first:], goal_text))) for first in range(len(parts))
    ]
    texts += ["  ".join(filter(None, (_value(done[-1]), goal_text))), _value(done[-1])]
    return next((text for text in texts if width is None or len(text) <= width), texts[-1])


def _value(evaluated: Evaluated) -> str:
    return " ".join(filter(None, [evaluated.metric, f"{evaluated.value:.4f}"]))


def _next(view: View) -> str:
    seen, running = view.outlook, view.progress.phase == "evaluating"
    takes = (
        "" if seen.eval_time_s is None else f", takes {'about ' * seen.eval_time_is_estimated}{clock(seen.eval_time_s)}"
    )
    at = f"{'now, ' * running}at {seen.next_samples:,} samples{takes}"
    return at if seen.next_s is None else f"{at}; result in {clock(seen.next_s)}"


def _forecast(seen: Outlook) -> str | None:
    if seen.samples_range is None:
        return None if seen.basis is None else f"none: {seen.basis}"
    if not seen.coming or seen.minutes_range is None:
        low, middle, high = (_bound(bound, "{:,.0f}") for bound in seen.samples_range)
        return f"{middle} samples to target (90 % range {low} to {high})"
    likeliest = sorted(sorted(seen.coming, key=lambda c: -c.probability)[:SHOWN_CHANCES], key=lambda c: c.samples)
    chances = ", ".join(f"{percent(c.probability)} at {c.samples:,}" for c in likeliest)
    low, _, high = (_bound(bound, "{:.1f}") for bound in seen.minutes_range)
    return f"target in {low} to {high} min (90 % range); chances {chances} samples"


def _bound(bound: float | None, form: str) -> str:
    return "later" if bound is None else form.format(bound)


def percent(probability: float) -> str:
    return "<1 %" if 0 < probability < 0.005 else ">99 %" if 0.995 < probability < 1 else f"{probability * 100:.0f} %"
