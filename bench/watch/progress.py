"""The progress of a trial according to its log, with warnings of divergence, stalls and a short walltime."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.contract.stall import Stall
from bench.mlperf.benchmarks import BENCHMARKS, Goal, goals, has_lora

Phase = Literal["waiting", "preparing", "training", "evaluating", "measuring", "generating", "stopped"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One eval_accuracy record."""

    samples: int | None
    value: float
    time_ms: int
    metric: str | None = None
    """The name of the metric, where the benchmark has several."""


@dataclass(frozen=True, slots=True)
class Place:
    """Samples trained on at a moment."""

    samples: int
    time_ms: int


@dataclass(slots=True, kw_only=True)
class Progress:
    """The progress of the latest trial in a log, updated by `bench.watch.tracker`; None for what is not logged."""

    trial: int = 1
    """The number of the trial in this log, from 1."""
    phase: Phase = "waiting"
    benchmark: str | None = None
    platform: str | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    logged_target: float | None = None
    num_eval_rows: int | None = None
    lora_rank: int | None = None
    first_ms: int | None = None
    run_start_ms: int | None = None
    run_stop_ms: int | None = None
    last_ms: int | None = None
    """Time of the latest record."""
    status: str | None = None
    """The status in run_stop: success or aborted."""
    points_requested: int | None = None
    """The number of points of a kernels task or loads of a serving task; None for other kinds."""
    points_name: str = "points"
    answers_requested: int | None = None
    """The number of answers of a generation task; it logs the answers at the end."""
    points_done: int = 0
    last_point: str | None = None
    samples: int | None = None
    train_loss: float | None = None
    lr: float | None = None
    recent_losses: tuple[float, ...] = ()
    lowest_loss: float | None = None
    """The lowest smoothed training loss so far."""
    slow: tuple[str, ...] = ()
    """The ranks that became persistently slower than the others."""
    not_finite: str | None = None
    """The latest loss or evaluation, if it is not a finite number."""
    evaluations: tuple[Evaluated, ...] = ()
    step_times_ms: tuple[float, ...] = ()
    """Times of an optimizer step; each is the mean between two records of one training block."""
    line_gaps_ms: tuple[float, ...] = ()
    """The times between two records of one training block."""
    eval_times_s: tuple[float, ...] = ()
    eval_time_is_estimated: bool = False
    """True if evaluations have no start in the log; then their time is estimated from the step time."""
    place: Place | None = None
    """The latest position in this training block; None while there is no training."""
    eval_start_ms: int | None = None
    """The start of the running evaluation."""

    @property
    def has_lora(self) -> bool:
        """Whether only adapters are trained, by the log or by the rules of its benchmark."""
        known = BENCHMARKS.get(self.benchmark or "")
        return self.lora_rank is not None or has_lora(known)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The targets of evaluations: the logged target, else those of the benchmark."""
        return goals(BENCHMARKS.get(self.benchmark or ""), self.logged_target)

    @property
    def goal(self) -> Goal | None:
        """The only target; None if there is none, or several."""
        return self.goals[0] if len(self.goals) == 1 else None

    @property
    def step(self) -> int | None:
        """The number of optimizer steps done."""
        gbs = self.global_batch_size
        return None if gbs is None or self.samples is None else self.samples // gbs

    @property
    def step_time_ms(self) -> float | None:
        return median(self.step_times_ms) if self.step_times_ms else None

    @property
    def eval_time_s(self) -> float | None:
        return median(self.eval_times_s) if self.eval_times_s else None


SILENT_GAPS, SILENT_STEPS, SILENT_EVALS, SILENT_S = 4, 10, 3, 30
"""A log has stalled after this many usual gaps, step times or evaluation times without a line, and SILENT_S seconds."""
OVERDUE = 1.5
"""A log has stalled after this multiple of the expected time until the next evaluation."""
GAPS_KNOWN = 3
"""The number of gaps needed for a median."""
DIVERGED, WORSENED = 1.5, 1.05
"""Ratios of smoothed training loss and evaluation loss to their minimum so far, above those in published runs."""


def clock(seconds: float) -> str:
    """Return a duration as text: 4.1 s, 2:10, 1:02:03 or 12 days."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.0f} days"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def divergence(progress: Progress) -> Iterator[str]:
    if progress.not_finite is not None:
        yield f"diverges: {progress.not_finite}"
    lowest, recent = progress.lowest_loss, progress.recent_losses
    if lowest is not None and lowest > 0 and median(recent) > DIVERGED * lowest:
        yield f"diverges: train loss rose from {lowest:.4g} to {median(recent):.4g} (medians of {len(recent)})"
    values, target = [evaluated.value for evaluated in progress.evaluations], progress.goal
    if target and not target.higher_is_better and values and values[-1] > WORSENED * min(values):
        yield f"diverges: evaluation rose from {min(values):.4f} to {values[-1]:.4f}"


def stall(progress: Progress, *, silent_s: float | None, usual_s: float | None, limits: Stall | None) -> Iterator[str]:
    """Yield a warning if the log has stalled, with the action of the ranks' watchdog if it is on."""
    if silent_s is None or usual_s is None or silent_s <= usual_s:
        return
    doing = "evaluation" if progress.phase == "evaluating" else "training"
    times_s = progress.eval_times_s if doing == "evaluation" else [gap / 1000 for gap in progress.line_gaps_ms]
    middle_s = median(times_s) if times_s else 0
    limit = (
        f"{silent_s / middle_s:.1f} times the median of {clock(middle_s)}" if middle_s else f"limit {clock(usual_s)}"
    )
    text = f"stalled: no new line for {clock(silent_s)} of {doing} ({limit})"
    last_s = None if limits is None else _ended_after_s(progress, limits)
    if last_s is None:
        yield text
    elif silent_s <= last_s:
        yield f"{text}; the watchdog ends the trial after at most {clock(last_s)} and reports the stalled rank (RUN-17)"
    else:
        yield f"{text}; the watchdog did not end the trial after {clock(last_s)} (RUN-17): all ranks may have stopped"


def _ended_after_s(progress: Progress, limits: Stall) -> float | None:
    """Return the longest silence before the ranks' watchdog ends a trial; None if unknown from this log."""
    if progress.phase == "evaluating":  # for the first one, the limit depends on the warm-up, which is not logged
        took_s = progress.eval_time_s
        return None if took_s is None else limits.limit_s(took_s) + limits.grace_s
    if progress.step_time_ms is None or not progress.line_gaps_ms:
        return None
    unlogged_s = median(progress.line_gaps_ms) / 1000  # the ranks may be further than the last line
    return unlogged_s + limits.limit_s(progress.step_time_ms / 1000) + limits.grace_s


def usual_silence_s(
    progress: Progress, *, step_time_ms: float | None, eval_time_s: float | None, next_samples: int | None
) -> float | None:
    """Return how long the log may be silent, or None if unknown; logging intervals differ between programs."""
    start_ms, gbs, place = progress.run_start_ms, progress.global_batch_size, progress.place
    if progress.eval_start_ms is not None and start_ms is not None:
        if progress.eval_times_s:
            return max(SILENT_S, SILENT_EVALS * median(progress.eval_times_s))
        # The first one may take as long as the training before it, or several times as long as estimated.
        return max(SILENT_S, (progress.eval_start_ms - start_ms) / 1000, SILENT_EVALS * (eval_time_s or 0))
    if place is None or step_time_ms is None:
        return None
    hidden_s = eval_time_s or 0 if progress.eval_time_is_estimated else 0  # evaluations without a start in the log
    least_s = max(SILENT_S, SILENT_STEPS * step_time_ms / 1000 + hidden_s)
    waits = []
    if len(progress.line_gaps_ms) >= GAPS_KNOWN:
        waits.append(SILENT_GAPS * median(progress.line_gaps_ms) / 1000)
    if next_samples is not None and gbs and eval_time_s is not None:
        steps = max(0, next_samples - place.samples) / gbs
        waits.append(OVERDUE * (steps * step_time_ms / 1000 + eval_time_s))
    return max(least_s, min(waits)) if waits else None


def too_late(left_s: float | None, *, next_s: float | None, chance: float | None) -> Iterator[str]:
    if left_s is None or chance is None or next_s is None:
        return
    left = f"{clock(max(0.0, left_s))} of walltime left"
    if chance == 0:
        yield f"cannot reach the target: {left}, and the next evaluation ends in {clock(next_s)}"
    elif chance < 0.5:
        yield f"will likely not reach the target: {left}, probability {chance * 100:.0f} %"
