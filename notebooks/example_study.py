"""A study's folder for the notebook: the study `tiny` as it is planned, with logs that are made up.

The logs are written through `bench.contract.mllog`, as rank 0 writes them, with a clock of its own. Nothing ran.
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
"""Of each run; samples a step."""
STEP_S = {"fp32": 0.120, "bf16": 0.095}
"""Median time of a step of each arm, in seconds."""
RUN_SPREAD, STEP_SPREAD = 0.004, 0.02
"""Standard deviations from run to run and from step to step, as shares."""
MADE_UP = {
    mllog.SUBMISSION_BENCHMARK: None,
    mllog.TARGET_ACCURACY: None,
    mllog.GLOBAL_BATCH_SIZE: SAMPLES,
    "initial_weights": "random",
    "data_source": "random",
    "max_sequence_length": 128,
    "num_ranks": 1,
    "accelerator": "made up",
    "commit": "made up",
}


def study(folder: Path) -> Path:
    """Return the folder of a study of two precisions in six blocks, in which a block is as slow for one as for both."""
    session = studies.begin("tiny", ["cluster=local", f"cluster.paths.logs={folder}"], runs=6)
    draw = random.Random(0)
    with folders.opened(session.folder, session.kept, session.planned):
        for block in range(session.request.study.runs):
            drift = draw.gauss(1, 5 * RUN_SPREAD)
            for arm in session.request.arms:
                step_s = STEP_S[arm.name] * drift * draw.gauss(1, RUN_SPREAD)
                times = [step_s * draw.gauss(1, STEP_SPREAD) for _ in range(STEPS)]
                write_run(RunName(arm=arm, block=block).within(session.folder), times)
    return session.folder


def write_run(folder: Path, step_times_s: list[float]) -> None:
    """Write what a run leaves in its folder when it has ended proven; its losses fall as they please."""
    folder.mkdir()
    now_s, done = 1_760_000_000.0, 0
    with mllog.Writer(folder / "result_0.txt", clocks=lambda: (round(now_s * 1000),) * 2) as log:
        log.start(mllog.INIT_START)
        for key, value in (SETTINGS | MADE_UP | {mllog.SEED: 1}).items():
            if value is not None:
                log.event(key, value)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        log.start(mllog.BLOCK_START, samples_count=0)
        for time_s in step_times_s:
            now_s, done = now_s + time_s, done + SAMPLES
            log.event(mllog.TRAIN_LOSS, 4 + 2 * 0.5 ** (done / 50), samples_count=done, lr=4e-4)
        rate = SAMPLES * len(step_times_s) / sum(step_times_s)
        tracked = {"step_times": step_times_s, "throughput": rate, "train_step_time": SAMPLES / rate}
        log.event(mllog.TRACKED_STATS, tracked, samples_count=done, step=len(step_times_s))
        log.stop(mllog.BLOCK_STOP, samples_count=done)
        log.start(mllog.EVAL_START, samples_count=done)
        now_s += 1.5
        log.event(mllog.EVAL_ACCURACY, 4.1, samples_count=done)
        log.stop(mllog.EVAL_STOP, samples_count=done)
        log.finish("success", samples_count=done)
    (folder / "ledger.json").write_text(json.dumps([{"trial": 0, "seed": 1, "outcome": "proven"}]))
    status.write(folder, Status(outcome=Ending.proven, exit_code=0))
