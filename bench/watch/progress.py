"""How far a trial has come, as far as its log says; what the log does not say is None."""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.mlperf.benchmarks import BENCHMARKS, Goal, goals

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
    """Where training was at a moment."""

    samples: int
    time_ms: int


@dataclass(slots=True, kw_only=True)
class Progress:
    """What the log says of its latest trial so far; `bench.watch.tracker` keeps it up to date."""

    trial: int = 1
    """The number of the trial in this log, from 1."""
    phase: Phase = "waiting"
    benchmark: str | None = None
    platform: str | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    logged_target: float | None = None
    num_eval_rows: int | None = None
    first_ms: int | None = None
    run_start_ms: int | None = None
    run_stop_ms: int | None = None
    last_ms: int | None = None
    """Time of the latest record."""
    status: str | None = None
    """The status in run_stop: success or aborted."""
    points_asked: int | None = None
    """How many points a kernels task measures, or loads a serving task; None for tasks of other kinds."""
    points_are: str = "points"
    answers_asked: int | None = None
    """Of a generation task: how many answers it gives; its log has them when all are given."""
    points_done: int = 0
    last_point: str | None = None
    samples: int | None = None
    train_loss: float | None = None
    lr: float | None = None
    recent_losses: tuple[float, ...] = ()
    lowest_loss: float | None = None
    """The lowest smoothed training loss so far."""
    not_finite: str | None = None
    """The latest loss or evaluation, if it is not a finite number."""
    evaluations: tuple[Evaluated, ...] = ()
    step_times_ms: tuple[float, ...] = ()
    """Times of an optimizer step; each is the mean between two records of one training block."""
    line_gaps_ms: tuple[float, ...] = ()
    """The times between two records of one training block."""
    eval_times_s: tuple[float, ...] = ()
    eval_time_is_estimated: bool = False
    """True if the log does not say when evaluations start; then their time is what the training steps leave over."""
    place: Place | None = None
    """The latest place in this training block; None while there is no training."""
    eval_start_ms: int | None = None
    """The start of the evaluation that is under way."""

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What evaluations must reach: the logged target, else the benchmark's targets, which may be several."""
        return goals(BENCHMARKS.get(self.benchmark or ""), self.logged_target)

    @property
    def goal(self) -> Goal | None:
        """The only goal; None if there is none, or several."""
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
