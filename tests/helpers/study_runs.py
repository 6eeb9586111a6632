"""Run folders of a study as valid runs leave them, with step times that a test chooses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.contract.mllog import Writer
from bench.runs import status
from bench.runs.status import Ending, Status
from helpers.written_log import ONCE

SAMPLES = 4
SETTINGS: dict[str, Any] = ONCE | {
    **dict.fromkeys(("submission_benchmark", "target_accuracy")),
    "initial_weights": "random",
    "data_source": "random",
    "global_batch_size": SAMPLES,
    "max_sequence_length": 10,
    "num_ranks": 2,
    "accelerator": "GPU",
    "commit": "abc",
    "software": {"torch": "2.11.0"},
}


def valid_run(folder: Path, step_times_s: Sequence[float], **changes: Any) -> None:
    """Write a run that has ended valid, with one record that lists all of its steps."""
    folder.mkdir(parents=True)
    prove(folder, step_times_s, **changes)


def prove(folder: Path, step_times_s: Sequence[float], **changes: Any) -> None:
    """Write the files of a valid run into its folder."""
    now = mllog.clocks_ms()  # a constant clock: the logged step times define the speed
    with Writer(folder / "result_0.txt", clocks=lambda: now) as log:
        log.start(mllog.INIT_START)
        for key, value in (SETTINGS | changes).items():
            if value is not None:
                log.event(key, value)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        done = {"samples_count": SAMPLES * len(step_times_s), "step": len(step_times_s)}
        stats = {"step_times": list(step_times_s), "throughput": 1.0, "train_step_time": 1.0}
        log.start(mllog.BLOCK_START, samples_count=0)
        log.event(mllog.TRACKED_STATS, stats, **done)
        log.stop(mllog.BLOCK_STOP, **done)
        log.start(mllog.EVAL_START, **done)
        log.event(mllog.EVAL_ACCURACY, 1.0, **done)
        log.stop(mllog.EVAL_STOP, **done)
        log.finish("success", **done)
    ended(folder, "valid", Status(outcome=Ending.valid, exit_code=0))


def failed(folder: Path, rule: str, what: str) -> None:
    """Write a run that failed by a rule."""
    folder.mkdir(parents=True)
    fail(folder, rule, what)


def fail(folder: Path, rule: str, what: str) -> None:
    """Write the files of a failed run into its folder."""
    ended(folder, "aborted", Status(outcome=Ending.failed, exit_code=1, rule=rule, what=what))


def ended(folder: Path, outcome: str, final_status: Status) -> None:
    entries: list[Mapping[str, Any]] = [{"trial": 0, "seed": 1, "outcome": outcome}]
    (folder / "ledger.json").write_text(json.dumps(entries))
    status.write(folder, final_status)
