"""The rules of each MLPerf Training benchmark: its target, and for some also required keys, fixed values and schedule.

Sources: the closed division's rule files of mlperf-logging 4.1.68 (rulesets 3.1.0 to 6.1.0) for targets and required
keys; MLPerf Training rules of 2026-05 for alpha, clipping, weight decay, rows and evaluation schedule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
    is_exclusive: bool = False
    """Whether the value itself does not reach the goal."""
    least: float = 0
    """A loss that is not above this one is not a valid loss."""

    def __str__(self) -> str:
        sign = (">" if self.is_exclusive else "≥") if self.higher_is_better else "≤"
        return f"{self.metric + ' ' if self.metric else ''}{sign} {self.value:g}"

    def is_reached_by(self, value: float) -> bool:
        """Return whether a value is at or beyond the goal."""
        if self.higher_is_better:
            return value > self.value or (value == self.value and not self.is_exclusive)
        return self.least < value <= self.value

    def is_below_any_loss(self, value: float) -> bool:
        """Return whether a value is too low to be a loss."""
        return not self.higher_is_better and value <= self.least


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
class Grid:
    """The evaluations that the rule file itself requires, in samples by global batch size."""

    first: Callable[[int], int]
    every: Callable[[int], int] | None = None
    """None: only the first evaluation is fixed."""
    may_skip: bool = False
    """Whether a run may leave out evaluations after the first."""
    since: str = ""
    """The first ruleset that requires it; empty: all."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A value that the closed division derives from another logged value."""

    key: str
    base: str
    formula: Callable[[float], float]
    expected: str
    """The formula in words."""
    tolerance: float = 0
    """By how much the value may differ, besides rounding."""
    since: str = ""
    """The first ruleset that requires it; empty: all."""
    until: str = ""
    """The first ruleset after `since` that does not."""


@dataclass(frozen=True, slots=True)
class Range:
    """A value that the closed division limits, by another logged value."""

    key: str
    base: str
    low: Callable[[float], float]
    high: Callable[[float], float]
    expected: str
    """The range in words."""


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
    fixed: Mapping[str, Value | tuple[Value, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Values that the closed division fixes, for keys that are logged; several: one of them."""
    relations: tuple[Relation, ...] = ()
    ranges: tuple[Range, ...] = ()
    open_metric: str | None = None
    """Key under which a log of the open division has its evaluations a second time; one must reach the goal."""
    metric_range: tuple[float, float] | None = None
    """The possible values of an evaluation, in every division."""
    counts: str | None = None
    """What the metadata of an evaluation must have; None: a count of samples or of epochs."""
    grid: Grid | None = None
    order: tuple[tuple[str, str], ...] = ()
    """Pairs of keys; the official checker must read the first before the second."""
    schedule: Schedule | None = None
    """The evaluations of the rules' text, which the official checker does not check."""


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
    counts="samples_count",
    schedule=Schedule(384, skip_per_gbs=0.125, skip=2),
)

_DECAYS_UNTIL_THE_END = Relation(
    "opt_learning_rate_decay_steps",
    "opt_learning_rate_warmup_steps",
    lambda steps: 1_200_000 - steps,
    "1200000 minus the warm-up steps",
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
        _DECAYS_UNTIL_THE_END,
    ),
    order=(("opt_learning_rate_warmup_steps", "opt_learning_rate_decay_steps"),),
    counts="samples_count",
    schedule=Schedule(12288),
)


def _accuracy(target: float, **more: bool) -> Benchmark:
    return Benchmark(goals=(Goal(target, higher_is_better=True),), **more)  # type: ignore[arg-type]


_GBS, _LR, _WARMUP = mllog.GLOBAL_BATCH_SIZE, mllog.OPT_BASE_LEARNING_RATE, "opt_learning_rate_warmup_steps"
_DECAY, _SCHEDULE = "opt_learning_rate_decay_steps", "opt_learning_rate_decay_schedule"
_ADAMW = (
    *("opt_name", "opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon", mllog.OPT_ADAMW_WEIGHT_DECAY),
    *(mllog.OPT_GRADIENT_CLIP_NORM, _LR, _WARMUP),
)
_COSINE = "cosine with linear warmup"


def _adamw(beta_1: float, beta_2: float, epsilon: float, weight_decay: float) -> dict[str, Value]:
    names = ("opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon", mllog.OPT_ADAMW_WEIGHT_DECAY)
    return {"opt_name": "adamw", **dict(zip(names, (beta_1, beta_2, epsilon, weight_decay), strict=True))}


def _at_least(key: str, least: float, expected: str) -> Range:
    return Range(key, key, lambda _: least, lambda _: math.inf, expected)


_ABOVE_ZERO = math.nextafter(0, 1)
_ADAMW_LLM = (*_ADAMW, _GBS, mllog.GRADIENT_ACCUMULATION_STEPS, "max_sequence_length")
_LLAMA3: Mapping[str, Value] = {
    **_adamw(0.9, 0.95, 1e-5, 0.1),
    "max_sequence_length": 8192,
    mllog.OPT_GRADIENT_CLIP_NORM: 1.0,
    _SCHEDULE: _COSINE,
}
"""The recipe of Llama 3.1, which gpt_oss_20b also has."""

LLAMA31_405B = Benchmark(
    goals=(Goal(5.6),),
    sequence_length=8192,
    once=(*_ADAMW_LLM, "opt_end_learning_rate", _DECAY, _SCHEDULE, "init_checkpoint_step"),
    fixed={**_LLAMA3, mllog.EVAL_SAMPLES: 5760, "init_checkpoint_step": 0},
    relations=(
        Relation(_LR, _GBS, lambda gbs: 8e-5 * gbs / 1152, "8e-5 x global_batch_size / 1152"),
        Relation(
            *(_DECAY, _GBS, lambda gbs: math.ceil(1_200_000 * 1152 / gbs) - math.ceil(8000 * 1152 / gbs)),
            "ceil(1200000 x 1152 / global_batch_size) - ceil(8000 x 1152 / global_batch_size)",
            since="5.1.0",
        ),
    ),
    order=((_GBS, _LR), (_GBS, _WARMUP), (_WARMUP, _DECAY)),
    counts="samples_count",
)

GPT3 = Benchmark(
    goals=(Goal(2.69, least=2.6),),
    sequence_length=2048,
    once=(
        *(_GBS, mllog.GRADIENT_ACCUMULATION_STEPS, "max_sequence_length", "opt_name", _LR, "opt_end_learning_rate"),
        *(_DECAY, _WARMUP, _SCHEDULE, "opt_adam_beta_1", "opt_adam_beta_2", "opt_adam_epsilon"),
        *(mllog.OPT_GRADIENT_CLIP_NORM, "init_checkpoint_step"),
    ),
    fixed={
        "max_sequence_length": 2048,
        "opt_name": "adam",
        _LR: (2e-5, 3e-5),
        _SCHEDULE: _COSINE,
        "opt_adam_beta_1": 0.9,
        "opt_adam_beta_2": 0.95,
        "opt_adam_epsilon": 1e-8,
        mllog.OPT_GRADIENT_CLIP_NORM: 1.0,
    },
    ranges=(_at_least("init_checkpoint_step", _ABOVE_ZERO, "a step above 0"),),
    counts="epoch_num",
)

GPT_OSS_20B = Benchmark(
    goals=(Goal(3.34),),
    sequence_length=8192,
    once=(*_ADAMW_LLM, "opt_end_learning_rate", _DECAY, _SCHEDULE, "max_steps"),
    fixed={**_LLAMA3, mllog.EVAL_SAMPLES: 1024, "max_steps": 1_200_000},
    relations=(_DECAYS_UNTIL_THE_END,),
    order=((_WARMUP, _DECAY),),
    counts="samples_count",
    schedule=Schedule(12288),
)

DEEPSEEKV3_671B = Benchmark(
    goals=(Goal(3.6),),
    sequence_length=4096,
    once=(*_ADAMW_LLM, "max_steps", _DECAY, _SCHEDULE, "moe_aux_loss_coeff"),
    fixed={
        **_adamw(0.9, 0.95, 1e-8, 0.1),
        "max_sequence_length": 4096,
        mllog.OPT_GRADIENT_CLIP_NORM: 1.0,
        _WARMUP: 4,
        _SCHEDULE: _COSINE,
        "moe_aux_loss_coeff": 0.01,
        mllog.EVAL_SAMPLES: 1024,
    },
    relations=(
        Relation(
            *(_LR, _GBS, lambda gbs: 2.4e-5 * (gbs / 16384) ** 0.5, "2.4e-5 x sqrt(global_batch_size / 16384)"),
            tolerance=1e-9,
        ),
        Relation(_DECAY, _WARMUP, lambda steps: 12_000 - steps, "12000 minus the warm-up steps"),
    ),
    ranges=(_at_least(_GBS, 15_360, "at least 15360"),),
    order=((_GBS, _LR), (_WARMUP, _DECAY)),
    counts="samples_count",
    grid=Grid(lambda gbs: gbs * math.floor(42 + 24_576 / gbs), since="6.1.0"),
)

FLUX1 = Benchmark(
    goals=(Goal(0.586),),
    once=(*_ADAMW, mllog.GRADIENT_ACCUMULATION_STEPS, "evaluation_frequency"),
    fixed={**_adamw(0.9, 0.95, 1e-8, 0.1), mllog.OPT_GRADIENT_CLIP_NORM: 1.0},
    relations=(
        Relation("evaluation_frequency", _GBS, lambda _: 262_144, "262144", until="6.1.0"),
        Relation(
            *("evaluation_frequency", _GBS, lambda gbs: math.ceil(262_144 / gbs) * gbs),
            "262144, rounded up to whole global batches",
            since="6.1.0",
        ),
    ),
    ranges=(
        _at_least(_LR, 0, "at least 0"),
        _at_least(_WARMUP, 0, "at least 0"),
    ),
    open_metric="averaged_validation_loss",
    order=((_GBS, "evaluation_frequency"),),
    counts="samples_count",
    schedule=Schedule(262_144),
)

_DLRM_ROWS = 2_290_835_423


def _dlrmv4_interval(gbs: int) -> int:
    """Return the samples between two evaluations: a thousandth of the rows, in whole steps."""
    return max(1, math.ceil(0.001 * _DLRM_ROWS / gbs)) * gbs


DLRMV4 = Benchmark(
    goals=(Goal(0.75, higher_is_better=True),),
    once=(
        *(_GBS, mllog.GRADIENT_ACCUMULATION_STEPS, "max_sequence_length", "opt_name", _LR, "opt_adam_beta_1"),
        *("opt_adam_beta_2", "opt_adam_epsilon", "opt_weight_decay", mllog.OPT_GRADIENT_CLIP_NORM),
        *("opt_sparse_name", "opt_sparse_base_learning_rate", _WARMUP, "opt_learning_rate_warmup_start_lr"),
        "eval_every_data_pct",
    ),
    fixed={
        mllog.TRAIN_SAMPLES: _DLRM_ROWS,
        mllog.EVAL_SAMPLES: 2_058_204,
        "max_sequence_length": 4096,
        "opt_name": "Adam",
        "opt_adam_beta_1": 0.95,
        "opt_adam_beta_2": 0.999,
        "opt_adam_epsilon": 1e-8,
        "opt_weight_decay": 0.0,
        mllog.OPT_GRADIENT_CLIP_NORM: 1.0,
        "opt_sparse_name": "RowWiseAdagrad",
        _WARMUP: 24_000,
        "opt_learning_rate_warmup_start_lr": 0.0,
        "eval_every_data_pct": 0.001,
    },
    relations=(Relation("opt_sparse_base_learning_rate", _LR, lambda lr: lr, "opt_base_learning_rate"),),
    ranges=(
        Range(
            *(_LR, _GBS, lambda gbs: 0.5e-6 * gbs / 8192, lambda gbs: 1.5e-6 * gbs / 8192),
            "0.5e-6 to 1.5e-6 x global_batch_size / 8192",
        ),
    ),
    metric_range=(0, 1),
    order=((_GBS, _LR), (_LR, "opt_sparse_base_learning_rate")),
    counts="samples_count",
    grid=Grid(
        lambda gbs: (
            math.ceil(math.floor((4480 * gbs + 135_331_840) / 3) / _dlrmv4_interval(gbs)) * _dlrmv4_interval(gbs)
        ),
        _dlrmv4_interval,
        may_skip=True,
    ),
)

QWEN35_397B_GRPO = Benchmark(
    goals=(Goal(0.69, higher_is_better=True, is_exclusive=True),),
    once=(
        *(*_ADAMW_LLM, "init_checkpoint_step", "max_steps", _SCHEDULE, "num_prompts_per_step"),
        "num_generations_per_prompt",
        *(
            f"generation_{kind}_rollout_{name}"
            for kind in ("training", "validation")
            for name in ("temperature", "top_p")
        ),
    ),
    fixed={
        **_adamw(0.9, 0.999, 1e-8, 0.0),
        "max_sequence_length": 65_536,
        mllog.EVAL_SAMPLES: 251,
        "init_checkpoint_step": 0,
        _WARMUP: 0,
        _SCHEDULE: "constant",
        "generation_training_rollout_temperature": 1.0,
        "generation_training_rollout_top_p": 1.0,
        "generation_validation_rollout_temperature": 0.1,
        "generation_validation_rollout_top_p": 0.95,
        "num_generations_per_prompt": 16,
    },
    relations=(
        Relation(
            *(_LR, _GBS, lambda gbs: 1e-6 * (gbs / 256) ** 0.5, "1e-6 x sqrt(global_batch_size / 256)"), tolerance=1e-9
        ),
        Relation(
            *(mllog.OPT_GRADIENT_CLIP_NORM, _GBS, lambda gbs: 0.125 * (256 / gbs) ** 0.5),
            "0.125 x sqrt(256 / global_batch_size)",
            tolerance=1e-9,
        ),
        Relation("num_prompts_per_step", _GBS, lambda gbs: gbs / 16, "global_batch_size / 16"),
    ),
    metric_range=(0, 1),
    order=(
        *((_GBS, _LR), (_GBS, mllog.OPT_GRADIENT_CLIP_NORM), (_GBS, "num_generations_per_prompt")),
        ("num_prompts_per_step", "num_generations_per_prompt"),
    ),
    counts="samples_count",
    grid=Grid(lambda gbs: gbs * math.ceil(2.5 + 3840 / gbs), lambda gbs: gbs),
)

BENCHMARKS: Mapping[str, Benchmark] = {
    "llama2_70b_lora": LLAMA2_70B_LORA,
    "llama31_8b": LLAMA31_8B,
    "llama31_405b": LLAMA31_405B,
    "gpt3": GPT3,
    "gpt_oss_20b": GPT_OSS_20B,
    "deepseekv3_671b": DEEPSEEKV3_671B,
    "flux1": FLUX1,
    "dlrmv4": DLRMV4,
    "qwen35_397b_grpo": QWEN35_397B_GRPO,
    "rnnt": Benchmark(goals=(Goal(0.058),)),
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


def has_lora(known: Benchmark | None) -> bool:
    """Return whether a benchmark trains adapters only."""
    return known is not None and mllog.LORA_RANK in known.once


def goals(known: Benchmark | None, logged: float | None) -> tuple[Goal, ...]:
    """Return the goals of the evaluations: the logged target in the benchmark's direction, else the benchmark's own.

    A benchmark with several goals keeps its own, because one logged target cannot replace them.
    """
    official = known.goals if known else ()
    if logged is None or len(official) > 1:
        return official
    return (replace(official[0], value=logged) if official else Goal(logged),)
