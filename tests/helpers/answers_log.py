"""Logs of generation tasks as a trial writes them, with made-up times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.contract.plan_kinds import GenerationPlan
from helpers.clock import Clock
from jobs.tasks import generate

Row = Sequence[Any]


def rows(plan: GenerationPlan, *, token_s: float = 0.01) -> list[list[Any]]:
    """Return the row of each answer, one after the other on each replica: so much time for each token."""
    free_s = [0.0] * plan.world.dp
    answer_rows = []
    for one in plan.requests:
        done_s = token_s * one.length
        row = [one.index, one.replica, one.prompt_tokens, one.length, free_s[one.replica], 2 * token_s, done_s]
        answer_rows.append(row)
        free_s[one.replica] += done_s
    return answer_rows


def write(plan: GenerationPlan, path: Path, answers: Sequence[Row] | None, *, run_s: float, **about: Any) -> Path:
    """Write the plan's first trial, of so many seconds; None has no record of its answers."""
    clock = Clock()
    with mllog.Writer(path, clocks=clock.read_ms) as log:
        log.start(mllog.INIT_START)
        log.event(mllog.SUBMISSION_PLATFORM, "made up")
        log.event(mllog.SEED, plan.trials[0].seed)
        log.event(mllog.INITIAL_WEIGHTS, "checkpoint" if plan.base_dir else mllog.RANDOM)
        log.event(mllog.CONFIG_FILENAME, f"task/{plan.config.task.name}.yaml")
        log.event("num_ranks", plan.world.num_ranks)
        log.event("accelerator", "made up")
        log.event(
            mllog.ANSWERS_REQUESTED, [one.length for one in plan.requests], **generate.request_settings(plan) | about
        )
        log.event(mllog.STRATEGY, "ddp", engine=plan.config.engine.name.name, cache="static", compile=True)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        clock.now_s += run_s
        log.finish(mllog.SUCCESS)
        if answers is not None:
            log.event(mllog.ANSWERS, answers)
    return path
