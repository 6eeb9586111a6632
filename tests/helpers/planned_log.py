"""Logs of runs that a plan describes, as the ranks write them, with made-up losses and times."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.contract import mllog, plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.planning import compose
from helpers.clock import Clock
from jobs.tasks import describe

CLUSTER = {
    "llama31_8b": "cluster=dgxh200",
    "lora70b": "cluster=dgxh200",
}


def planned(task: str, *overrides: str) -> TrainingPlan:
    """Return the plan of a benchmark on eight H200."""
    return plan_kinds.required(compose.compose([f"task={task}", CLUSTER[task], *overrides]), TrainingPlan)


def without_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the hardware of this machine, for which the emitter needs torch and git."""
    monkeypatch.setattr(describe, "system", lambda plan: {"num_ranks": plan.world.num_ranks})


def write(plan: TrainingPlan, path: Path, losses: Sequence[float], *, trial: int = 0, step_s: float = 2.0) -> Path:
    """Write the log of a trial with these evaluations, at the steps of the plan."""
    now = Clock()
    with mllog.Writer(path, clocks=now.read_ms) as log:
        log.event(mllog.CACHE_CLEAR, True)
        log.start(mllog.INIT_START)
        describe.describe(plan, plan.trials[trial], {"torch": "2.13.0"}, log)
        now.now_s += 60
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        done, place = 0, {"samples_count": 0, "step": 0}
        for step, loss in zip(plan.evaluation.at_steps, losses, strict=False):
            log.start(mllog.BLOCK_START, **place)
            now.now_s += (step - done) * step_s
            done, place = step, {"samples_count": plan_kinds.samples(plan, step), "step": step}
            log.stop(mllog.BLOCK_STOP, **place)
            log.start(mllog.EVAL_START, **place)
            now.now_s += 20
            log.event(mllog.EVAL_ACCURACY, loss, **place, epoch_num=0.1)
            log.stop(mllog.EVAL_STOP, **place)
        log.finish("success", **place)
    return path
