"""Logs for the notebooks: published ones if RUNSTOP_LOGS is a folder of MLPerf logs, else synthetic ones.

A synthetic log is written with `bench.contract.mllog`, as by a rank, with simulated time. Its org and platform mark it
as synthetic. Losses follow the published reference on average.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

from bench.contract import mllog

PUBLISHED = os.environ.get("RUNSTOP_LOGS")
STEP_S, EVALUATION_S, INIT_S = 3.1, 28.0, 60.0
START_S = 1_760_000_000
"""Start of the synthetic runs, in seconds since 1970: October 2025, ruleset 5.1.0."""
GLOBAL_BATCH_SIZE, FIRST, EVERY = 8, 1536, 384
"""Samples per step, at the first evaluation and between evaluations, by the rules of llama2_70b_lora."""
SETTINGS = {
    mllog.CACHE_CLEAR: True,
    mllog.SUBMISSION_BENCHMARK: "llama2_70b_lora",
    mllog.SUBMISSION_DIVISION: "closed",
    mllog.SUBMISSION_ORG: "example",
    mllog.SUBMISSION_PLATFORM: "synthetic, no training",
    mllog.SUBMISSION_STATUS: "onprem",
    mllog.TARGET_ACCURACY: 0.925,
    mllog.GLOBAL_BATCH_SIZE: GLOBAL_BATCH_SIZE,
    mllog.GRADIENT_ACCUMULATION_STEPS: 1,
    mllog.TRAIN_SAMPLES: 3901,
    mllog.EVAL_SAMPLES: 173,
    "opt_base_learning_rate": 4e-4,
    "opt_learning_rate_training_steps": 1024,
    "opt_adamw_weight_decay": 1e-4,
    "opt_gradient_clip_norm": 0.3,
    "lora_rank": 16,
    "lora_alpha": 32,
    "lowest_numerical_precision_in_linear": "fp8",
    "lowest_numerical_precision_in_attn": "bfloat16",
    "lowest_numerical_precision_in_comm": "bfloat16",
    "tensor_parallelism": 1,
    "pipeline_parallelism": 1,
    "context_parallelism": 1,
    "expert_parallelism": 1,
    mllog.MICRO_BATCH_SIZE: 1,
    "config_filename": "config.yaml",
}


def trial(name: str, folder: Path) -> Path:
    """Return a log: the published one of this name below RUNSTOP_LOGS, or a synthetic one that converges."""
    if PUBLISHED and (published := Path(PUBLISHED) / name).exists():
        return published
    return write_trial(folder / "result_0.txt", losses=(0.9410, 0.9342, 0.9294, 0.9263, 0.9238), seed=1)


def trials(name: str, folder: Path) -> Path:
    """Return a folder of ten logs: the published one of this name below RUNSTOP_LOGS, or ten synthetic ones."""
    if PUBLISHED and len([*(published := Path(PUBLISHED) / name).glob("result_*.txt")]) >= 10:
        return published
    generator = random.Random(0)
    for number in range(10):
        evaluations = 5 + (number % 5 == 0) - (number % 4 == 0)
        losses = [0.9250 + 0.004 * (evaluations - 1 - k) - 0.001 * (k == evaluations - 1) for k in range(evaluations)]
        speed = generator.uniform(0.99, 1.01)
        write_trial(folder / f"result_{number}.txt", losses=losses, seed=number + 1, step_s=STEP_S * speed)
    return folder


def write_trial(path: Path, *, losses: Sequence[float], seed: int, step_s: float = STEP_S) -> Path:
    """Write a llama2_70b_lora trial with these evaluation losses, the last of which reaches the target."""
    path.unlink(missing_ok=True)
    now_s = float(START_S + 3600 * seed)
    with mllog.Writer(path, clocks=lambda: (round(now_s * 1000),) * 2) as log:
        log.start(mllog.INIT_START)
        for key, value in (SETTINGS | {mllog.SEED: seed, "num_ranks": 8}).items():
            log.event(key, value)
        now_s += INIT_S
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        samples = 0
        for number, loss in enumerate(losses):
            log.start(mllog.BLOCK_START, samples_count=samples)
            until = FIRST + EVERY * number
            while samples < until:
                trained = min(10 * GLOBAL_BATCH_SIZE, until - samples)
                samples += trained
                now_s += trained / GLOBAL_BATCH_SIZE * step_s
                log.event(mllog.TRAIN_LOSS, 1.33 + 0.4 * 0.5 ** (samples / 400), samples_count=samples, lr=4e-4)
            log.stop(mllog.BLOCK_STOP, samples_count=samples)
            log.start(mllog.EVAL_START, samples_count=samples)
            now_s += EVALUATION_S
            log.event(mllog.EVAL_ACCURACY, loss, samples_count=samples)
            log.stop(mllog.EVAL_STOP, samples_count=samples)
        log.finish("success", samples_count=samples)
    return path
