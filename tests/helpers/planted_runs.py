"""Run folders as ended runs leave them, with valid trials of planted speeds or an aborted one; a run that trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.contract import mllog, plan_kinds
from bench.contract.mllog import Writer
from bench.contract.plan import Plan
from bench.runs import ledger, manifest, trial
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from helpers.clock import Clock
from helpers.written_log import ONCE

NUM_SAMPLES = 1_000_000
"""Trained on by each trial: so many that milliseconds do not round the speed."""
_SILENT = dict.fromkeys(("submission_benchmark", "target_accuracy", "cache_clear"))


def plant(folder: Path, clock: Clock, *samples_s: float, plan: Plan | None = None, **changes: Any) -> Path:
    """Write a run with one valid trial of each speed, one after the other by this clock; return its folder.

    `gpu_telemetry` is the GPU telemetry, which is logged after run_stop.
    """
    folder.mkdir(parents=True)
    if plan is not None:
        (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    for number, speed in enumerate(samples_s):
        _log(folder / f"result_{number}.txt", clock, speed, ONCE | _SILENT | {"seed": number} | changes)
    return prove(folder, len(samples_s))


@contextmanager
def under_way(folder: Path) -> Iterator[Writer]:
    """Write a run whose only trial is training; yield its log, to continue."""
    folder.mkdir()
    ledger._write(folder, [ledger.Entry(trial=0, seed=7, outcome=Outcome.running)])
    with Writer(folder / "result_0.txt") as log:
        _configure(log, ONCE | {"cache_clear": None})
        _start(log)
        yield log


def prove(folder: Path, num_trials: int = 1) -> Path:
    """Write the ledger of a folder whose logs are there, which calls each trial valid; return the folder."""
    entries = [ledger.Entry(trial=k, seed=k, outcome=Outcome.running) for k in range(num_trials)]
    ledger._write(folder, entries)
    for number in range(num_trials):
        ledger.end(folder, number, Outcome.valid, **trial.content(folder / f"result_{number}.txt"))
    return folder


def abort(folder: Path, plan: Plan) -> Path:
    """End a run whose only trial was aborted before it had a log; the manifest lists what the folder has already."""
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(folder, plan)
    ledger.end(folder, 0, Outcome.aborted)
    statuses.write(folder, Status(outcome=Ending.failed, exit_code=1))
    manifest.write(folder)
    return folder


def _log(path: Path, clock: Clock, samples_s: float, once: dict[str, Any]) -> None:
    telemetry = once.pop(mllog.GPU_TELEMETRY, None)
    with Writer(path) as log:
        _configure(log, once)
        clock.now_s += 60
        _start(log)
        clock.now_s += NUM_SAMPLES / samples_s
        log.event(mllog.TRAIN_LOSS, 1.0, samples_count=NUM_SAMPLES)
        log.stop(mllog.BLOCK_STOP, samples_count=NUM_SAMPLES)
        log.finish("success", samples_count=NUM_SAMPLES)
        if telemetry is not None:
            log.event(mllog.GPU_TELEMETRY, telemetry, node="n")
        clock.now_s += 60


def _configure(log: Writer, once: dict[str, Any]) -> None:
    log.start(mllog.INIT_START)
    for key, value in once.items():
        if value is not None:
            log.event(key, value)
    log.stop(mllog.INIT_STOP)


def _start(log: Writer) -> None:
    log.start(mllog.RUN_START)
    log.start(mllog.BLOCK_START, samples_count=0)
