"""The rules of each MLPerf Training benchmark: its target, and for some also required keys, fixed values and schedule.

Sources: the closed division's rule files of mlperf-logging 4.1.68 (rulesets 3.1.0 to 6.1.0) for targets and required
keys; MLPerf Training rules of 2026-05 for alpha, clipping, weight decay, rows and evaluation schedule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from bench.contract import mllog

Value = float | str


@dataclass(frozen=True, slots=True)
class Goal:
    """The target value of an evaluation; reaching it ends the run."""

    value: float
    higher_is_better: bool = False
    metric: str | None = None
    """The metric, if a benchmark has several."""

    def __str__(self) -> str:
        return f"{self.metric + ' ' if self.metric else ''}{'≥' if self.higher_is_better else '≤'} {self.value:g}"

    def is_reached_by(self, value: float) -> bool:
        """Return whether a value is at or beyond the goal. A loss of 0 or less is not a valid loss."""
        return value >= self.value if self.higher_is_better else 0 < value <= self.value


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the model is evaluated: every CEIL(every / GBS) * GBS samples, except the first FLOOR(a * GBS + b)."""

    every: int
    skip_per_gbs: float = 0
    skip: int = 0

    def interval(self, global_batch_size: int) -> int:
        """Return the samples from one evaluation to the next."""
        return math.ceil(self.every / global_batch_size) * global_batch_size

    def skipped(self, global_batch_size: int) -> int:
        """Return how many evaluations are skipped at the start."""
        return math.floor(self.skip_per_gbs * global_batch_size + self.skip)

    def first(self, global_batch_size: int) -> int:
        """Return after how many samples the first evaluation is due."""
        return (self.skipped(global_batch_size) + 1) * self.interval(global_batch_size)


@dataclass(frozen=True, slots=True)
class Relation:
    """A value that the closed division derives from another logged value."""

    key: str
    base: str
    formula: Callable[[float], float]
    expected: str
    """The formula in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The rules of one benchmark. A benchmark without `once` has only a target here."""

    goals: tuple[Goal, ...]
    sequence_length: int | None = None
    """Tokens of a sample, if all samples have the same number."""
    evaluates_afterwards: bool = False
    """Checkpoints are evaluated after run_stop; these records may be anywhere in the log."""
    epoch_num_is_samples: bool = False
    """The evaluations' epoch_num counts samples."""
    train_samples_is_batches: bool = False
    """train_samples is the number of batches of an epoch, of one or of all GPUs."""
    once: tuple[str, ...] = ()
    """Keys that a log of the closed division has exactly once."""
    fixed: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    """Values that the closed division fixes, for keys that are logged."""
    relations: tuple[Relation, ...] = ()
    order: tuple[tuple[str, str], ...] = ()
    """Pairs of keys; the official checker must read the first before the second."""
    schedule: Schedule | None = None


PRECISION_KEYS = (mllog.PRECISION_IN_LINEAR, mllog.PRECISION_IN_ATTN, mllog.PRECISION_IN_COMM)
PRECISIONS = (
    *("fp64", "fp32", "tf32", "fp16", "bfloat16", "fp8", "mxfp6", "nvfp4", "mxfp4"),
    *("Graphcore FLOAT 16.16", "int8", "uint8", "int4", "uint4"),
)
DISCLOSED = (
    *(*PRECISION_KEYS, mllog.TENSOR_PARALLELISM, mllog.PIPELINE_PARALLELISM, mllog.CONTEXT_PARALLELISM),
    *(mllog.EXPERT_PARALLELISM, mllog.MICRO_BATCH_SIZE, mllog.CONFIG_FILENAME),
)
"""Keys that ruleset 6.1.0 requires exactly once, in every division; older rulesets do not."""

_LLM_ONCE = (
    *(mllog.GLOBAL_BATCH_SIZE, mllog.GRADIENT_ACCUMULATION_STEPS, mllog.OPT_BASE_LEARNING_RATE),
    *(mllog.OPT_ADAMW_WEIGHT_DECAY, mllog.OPT_GRADIENT_CLIP_NORM),
)

LLAMA2_70B_LORA = Benchmark(
    goals=(Goal(0.925),),
    sequence_length=8192,
    once=(*_LLM_ONCE, mllog.OPT_LEARNING_RATE_TRAINING_STEPS, mllog.LORA_RANK, mllog.LORA_ALPHA),
    fixed={
        mllog.LORA_RANK: 16,
        mllog.LORA_ALPHA: 32,
        "lora_dropout": 0.1,
        "max_sequence_length": 8192,
        mllog.OPT_ADAMW_WEIGHT_DECAY: 1e-4,
        mllog.OPT_GRADIENT_CLIP_NORM: 0.3,
        mllog.TRAIN_SAMPLES: 3901,
        mllog.EVAL_SAMPLES: 173,
    },
    schedule=Schedule(384, skip_per_gbs=0.125, skip=2),
)

LLAMA31_8B = Benchmark(
    goals=(Goal(3.3),),
    sequence_length=8192,
    once=(
        *_LLM_ONCE,
        *("max_sequence_length", "opt_name", "opt_end_learning_rate", "opt_learning_rate_warmup_steps"),
        *("opt_learning_rate_decay_steps", "opt_learning_rate_decay_schedule", "opt_adamw_beta_1"),
        *("opt_adamw_beta_2", "opt_adamw_epsilon", "max_steps"),
    ),
    fixed={
        "max_sequence_length": 8192,
        "opt_name": "adamw",
        mllog.OPT_ADAMW_WEIGHT_DECAY: 0.1,
        "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.95,
        "opt_adamw_epsilon": 1e-5,
        mllog.OPT_GRADIENT_CLIP_NORM: 1.0,
        "opt_learning_rate_decay_schedule": "cosine with linear warmup",
        mllog.EVAL_SAMPLES: 1024,
        "max_steps": 1_200_000,
    },
    relations=(
        Relation(
            "opt_end_learning_rate", "opt_base_learning_rate", lambda lr: 0.1 * lr, "0.1 x opt_base_learning_rate"
        ),
        Relation(
            "opt_learning_rate_decay_steps",
            "opt_learning_rate_warmup_steps",
            lambda steps: 1_200_000 - steps,
            "1200000 minus the warm-up steps",
        ),
    ),
    order=(("opt_learning_rate_warmup_steps", "opt_learning_rate_decay_steps"),),
    schedule=Schedule(12288),
)


def _accuracy(target: float, **more: bool) -> Benchmark:
    return Benchmark(goals=(Goal(target, higher_is_better=True),), **more)  # type: ignore[arg-type]


def _loss(target: float, sequence_length: int | None = None) -> Benchmark:
    return Benchmark(goals=(Goal(target),), sequence_length=sequence_length)


BENCHMARKS: Mapping[str, Benchmark] = {
    "llama2_70b_lora": LLAMA2_70B_LORA,
    "llama31_8b": LLAMA31_8B,
    "llama31_405b": _loss(5.6, 8192),
    "gpt3": _loss(2.69, 2048),
    "gpt_oss_20b": _loss(3.34),
    "deepseekv3_671b": _loss(3.6),
    "flux1": _loss(0.586),
    "rnnt": _loss(0.058),
    "bert": _accuracy(0.72, epoch_num_is_samples=True),
    "dlrm": _accuracy(0.8025),
    "dlrm_dcnv2": _accuracy(0.80275),
    "gnn": _accuracy(0.72),
    "rgat": _accuracy(0.72),
    "minigo": _accuracy(0.5),
    "resnet": _accuracy(0.759),
    "retinanet": _accuracy(0.34, train_samples_is_batches=True),
    "ssd": _accuracy(0.34, train_samples_is_batches=True),
    "unet3d": _accuracy(0.908),
    "stable_diffusion": Benchmark(
        goals=(Goal(90.0, metric="FID"), Goal(0.15, higher_is_better=True, metric="CLIP")), evaluates_afterwards=True
    ),
}
"""By submission_benchmark."""


def goals(known: Benchmark | None, logged: float | None) -> tuple[Goal, ...]:
    """Return the goals of the evaluations: the logged target in the benchmark's direction, else the benchmark's own.

    A benchmark with several goals keeps its own, because one logged target cannot replace them.
    """
    official = known.goals if known else ()
    if logged is None or len(official) > 1:
        return official
    return (Goal(logged, bool(official) and official[0].higher_is_better),)
