"""Project the time of a training run from the estimated time of a step."""

import math
from dataclasses import dataclass

from bench.contract.plan_kinds import TrainingPlan
from bench.mlperf import published

ROOM = 1.1
"""A proposed walltime is this many times the projection, which has no evaluations and no checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Steps and seconds per step of a run, without evaluations."""

    steps: int
    step_s: float
    evaluation_s: float
    """Of one evaluation, as long relative to a step as in published runs."""
    num_published_runs: int | None
    """The published runs whose mean is `steps`; None: the plan's maximum number of steps."""

    @property
    def minutes(self) -> float:
        return self.steps * self.step_s / 60

    @property
    def walltime_min(self) -> int:
        """The walltime of a trial that leaves room for evaluations, in whole tens of minutes."""
        return 10 * math.ceil(ROOM * self.minutes / 10)


def training_time(plan: TrainingPlan) -> Projection | None:
    """Return the projected time of a trial; None without an estimate of its step.

    With local SGD a step has its share of averaging the weights.
    """
    estimated_s = plan.cost.step_s if plan.cost else None
    step_s = plan.local_sgd.mean_step_s if plan.local_sgd else estimated_s
    if step_s is None:
        return None
    gbs, benchmark = plan.batch.global_batch_size, plan.submission.benchmark
    row = published.evaluation_row(has_lora=plan.config.training.lora is not None)
    evaluation_s = row.typical * step_s * plan.config.training_data.eval_rows / gbs
    known = published.samples_to_target(benchmark, gbs) if benchmark and plan.config.task.submittable else None
    if known is None:
        steps, num_runs = plan.max_steps, None
    else:
        steps, num_runs = round(known.mean_samples / gbs), known.num_runs
    return Projection(steps=steps, step_s=step_s, evaluation_s=evaluation_s, num_published_runs=num_runs)
