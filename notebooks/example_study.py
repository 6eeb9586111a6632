"""A study's folder for the notebook: the plan of the study `tiny` with synthetic logs.

The logs are written with `bench.contract.mllog`, as by rank 0, with simulated time. Nothing was run.
"""

import json
import random
from pathlib import Path

from example_logs import SETTINGS

from bench import studies
from bench.contract import mllog
from bench.runs import status
from bench.runs.status import Ending, Status
from bench.studies import folder as folders
from bench.studies.folder import RunName

STEPS, SAMPLES = 25, 8
"""Steps per run; samples per step."""
STEP_S = {"fp32": 0.120, "bf16": 0.095}
"""Median time of a step of each arm, in seconds."""
RUN_SPREAD, STEP_SPREAD = 0.004, 0.02
"""Relative standard deviations between runs and between steps."""
SYNTHETIC = {
    mllog.SUBMISSION_BENCHMARK: None,
    mllog.TARGET_ACCURACY: None,
    mllog.GLOBAL_BATCH_SIZE: SAMPLES,
    "initial_weights": "random",
    "data_source": "random",
    "max_sequence_length": 128,
    "num_ranks": 1,
    "accelerator": "synthetic",
    "commit": "synthetic",
}


def study(folder: Path) -> Path:
    """Return the folder of a study of two precisions in six blocks; a slow block affects both precisions."""
    session = studies.begin("tiny", ["cluster=local", f"cluster.paths.logs={folder}"], runs=6)
    generator = random.Random(0)
    with folders.locked(session.folder, session.stored, session.planned):
        for block in range(session.request.study.runs):
            drift = generator.gauss(1, 5 * RUN_SPREAD)
            for arm in session.request.arms:
                step_s = STEP_S[arm.name] * drift * generator.gauss(1, RUN_SPREAD)
                times = [step_s * generator.gauss(1, STEP_SPREAD) for _ in range(STEPS)]
                write_run(RunName(arm=arm, block=block).within(session.folder), times)
    return session.folder


def write_run(folder: Path, step_times_s: list[float]) -> None:
    """Write the files of a valid run into its folder; its losses are arbitrary."""
    folder.mkdir()
    now_s, done = 1_760_000_000.0, 0
    with mllog.Writer(folder / "result_0.txt", clocks=lambda: (round(now_s * 1000),) * 2) as log:
        log.start(mllog.INIT_START)
        for key, value in (SETTINGS | SYNTHETIC | {mllog.SEED: 1}).items():
            if value is not None:
                log.event(key, value)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        log.start(mllog.BLOCK_START, samples_count=0)
        for time_s in step_times_s:
            now_s, done = now_s + time_s, done + SAMPLES
            log.event(mllog.TRAIN_LOSS, 4 + 2 * 0.5 ** (done / 50), samples_count=done, lr=4e-4)
        rate = SAMPLES * len(step_times_s) / sum(step_times_s)
        stats = {"step_times": step_times_s, "throughput": rate, "train_step_time": SAMPLES / rate}
        log.event(mllog.TRACKED_STATS, stats, samples_count=done, step=len(step_times_s))
        log.stop(mllog.BLOCK_STOP, samples_count=done)
        log.start(mllog.EVAL_START, samples_count=done)
        now_s += 1.5
        log.event(mllog.EVAL_ACCURACY, 4.1, samples_count=done)
        log.stop(mllog.EVAL_STOP, samples_count=done)
        log.finish("success", samples_count=done)
    (folder / "ledger.json").write_text(json.dumps([{"trial": 0, "seed": 1, "outcome": "valid"}]))
    status.write(folder, Status(outcome=Ending.valid, exit_code=0))
