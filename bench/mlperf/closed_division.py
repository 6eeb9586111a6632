"""List the differences between a config and the rules of the closed division."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.contract import mllog
from bench.contract.model import Activation, Norm, Position
from bench.contract.schema import Config
from bench.contract.training import LORA_TARGETS, StartsFrom, Trains
from bench.mlperf.benchmarks import LLAMA2_70B_LORA, LLAMA31_8B, Benchmark

Fixed = tuple[str, object, object]
"""A key of the config, its value, and the value that the rules require."""

_LLAMA = {
    "num_query_groups": 8,
    "norm": Norm.RMSNorm,
    "norm_epsilon": 1e-5,
    "activation": Activation.swiglu,
    "position": Position.rope,
    "bias": False,
    "tied_embeddings": False,
}
LLAMA2_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "vocab_size": 32000,
    "rope_base": 10000,
    "rope_scaling_factor": 1.0,
    **_LLAMA,
}
"""Source: Hugging Face meta-llama/Llama-2-70b-hf, config.json."""
LLAMA31_8B_SIZES = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "vocab_size": 128256,
    "rope_base": 500000,
    "rope_scaling_factor": 8.0,
    **_LLAMA,
}
"""Source: Hugging Face meta-llama/Llama-3.1-8B, config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedDivision:
    """What the closed division of one benchmark fixes in a config."""

    benchmark: Benchmark
    model_name: str
    model: Mapping[str, object]
    work: Callable[[Config], list[Fixed]]
    """The fixed values that decide how much work a step and an evaluation are, besides the model's sizes."""
    recipe: Callable[[Config], list[Fixed]]
    """The other fixed values, besides target, clipping, weight decay and evaluation schedule."""


def _lora_work(config: Config) -> list[Fixed]:
    lora, d, rules = config.training.lora, config.training_data, LLAMA2_70B_LORA.fixed
    return [
        ("data.train_rows", d.num_train_rows, rules[mllog.TRAIN_SAMPLES]),
        ("task.training.lora.rank", lora and lora.rank, rules[mllog.LORA_RANK]),
        ("task.training.lora.alpha", lora and lora.alpha, rules[mllog.LORA_ALPHA]),
        ("task.training.lora.dropout", lora and lora.dropout, rules["lora_dropout"]),
        ("task.training.lora.target_modules", lora and sorted(lora.target_modules), sorted(LORA_TARGETS)),
    ]


def _lora_recipe(config: Config) -> list[Fixed]:
    d = config.training_data
    return [
        ("data", d.name, "gov_report"),
        ("data.source", d.source.name, "prepared"),
        ("data.answer_only", d.answer_only, True),
    ]


def _pretraining_work(config: Config) -> list[Fixed]:
    return [
        ("task.training.trains", config.training.trains.name, Trains.all.name),
        ("data.document_mask", config.training_data.document_mask, False),
    ]


def _pretraining_recipe(config: Config) -> list[Fixed]:
    d, r, training, rules = config.training_data, config.training_recipe, config.training, LLAMA31_8B.fixed
    end_lr = next(one for one in LLAMA31_8B.relations if one.key == "opt_end_learning_rate")
    return [
        ("data", d.name, "c4_mlperf"),
        ("data.source", d.source.name, "megatron"),
        ("data.answer_only", d.answer_only, False),
        ("task.training.starts_from", training.starts_from.name, StartsFrom.random.name),
        ("task.training.max_steps", training.max_steps, rules["max_steps"]),
        ("recipe.adam_beta1", r.adam_beta1, rules["opt_adamw_beta_1"]),
        ("recipe.adam_beta2", r.adam_beta2, rules["opt_adamw_beta_2"]),
        ("recipe.adam_eps", r.adam_eps, rules["opt_adamw_epsilon"]),
        ("recipe.lr_min_factor", r.lr_min_factor, end_lr.formula(1.0)),
    ]


CLOSED_DIVISIONS: Mapping[str, ClosedDivision] = {
    "llama2_70b_lora": ClosedDivision(
        benchmark=LLAMA2_70B_LORA, model_name="llama2_70b", model=LLAMA2_70B, work=_lora_work, recipe=_lora_recipe
    ),
    "llama31_8b": ClosedDivision(
        benchmark=LLAMA31_8B,
        model_name="llama31_8b",
        model=LLAMA31_8B_SIZES,
        work=_pretraining_work,
        recipe=_pretraining_recipe,
    ),
}
"""By benchmark."""


def _division(config: Config) -> ClosedDivision | None:
    return CLOSED_DIVISIONS.get(config.task.benchmark or "")


def deviations(config: Config) -> list[str]:
    """Return every difference from the rules of the closed division; empty only for a benchmark itself.

    Source: MLPerf training rules and the rule files of mlperf-logging 4.1.68: fixed model, rows, optimizer, clipping,
    target and schedule.
    """
    if not config.training.has_target:
        return [f"task {config.task.name} has no target: it measures speed, not a time to train"]
    division = _division(config)
    if division is None or not config.task.submittable:
        return [f"task {config.task.name} is not an MLPerf benchmark"]
    r, rules, schedule = config.training_recipe, division.benchmark.fixed, division.benchmark.schedule
    values: list[Fixed] = [
        *_sizes(config, division),
        *division.recipe(config),
        ("task.training.target_eval_loss", config.training.target_eval_loss, division.benchmark.goals[0].value),
        ("recipe.weight_decay", r.weight_decay, rules[mllog.OPT_ADAMW_WEIGHT_DECAY]),
        ("recipe.clip_grad", r.clip_grad, rules[mllog.OPT_GRADIENT_CLIP_NORM]),
        ("recipe.eval_every_samples", r.eval_every_samples, schedule and schedule.every),
        ("recipe.eval_skip", r.eval_skip, None),
    ]
    return [f"{key} is {got}, but the rules require {required}" for key, got, required in values if got != required]


def has_benchmark_shape(config: Config) -> bool:
    """Return whether a training step and an evaluation are the same amount of work as in the task's benchmark."""
    division = _division(config)
    return division is not None and all(got == required for _, got, required in _sizes(config, division))


def has_benchmark_model(config: Config) -> bool:
    """Return whether the model is the one of the task's benchmark, by its name."""
    division = _division(config)
    return division is not None and config.model.name == division.model_name


def _sizes(config: Config, division: ClosedDivision) -> list[Fixed]:
    """Return the fixed values that decide how much work a step and an evaluation are, as (key, value, rule's value)."""
    m, d, rules = config.model, config.training_data, division.benchmark.fixed
    return [
        *((f"model.{key}", getattr(m, key), required) for key, required in division.model.items()),
        ("data.seq_length", d.seq_length, rules["max_sequence_length"]),
        ("data.eval_rows", d.eval_rows, rules[mllog.EVAL_SAMPLES]),
        *division.work(config),
    ]
