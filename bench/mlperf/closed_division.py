"""List the differences between a config and the rules of the closed division."""

from bench.contract import mllog
from bench.contract.model import Activation, Norm, Position
from bench.contract.schema import Config
from bench.contract.training import LORA_TARGETS
from bench.mlperf.benchmarks import LLAMA2_70B_LORA

NAME = "llama2_70b_lora"
LLAMA2_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "norm": Norm.RMSNorm,
    "norm_epsilon": 1e-5,
    "activation": Activation.swiglu,
    "position": Position.rope,
    "rope_base": 10000,
    "rope_scaling_factor": 1.0,
    "bias": False,
    "tied_embeddings": False,
}
"""The benchmark's model. Source: Hugging Face meta-llama/Llama-2-70b-hf, config.json."""


def deviations(config: Config) -> list[str]:
    """Return every difference from the rules of the closed division; empty only for the benchmark itself.

    Source: MLPerf training rules, llama2_70b_lora: fixed model, rows, LoRA, AdamW, clipping, target and schedule.
    """
    if not config.training.has_target:
        return [f"task {config.task.name} has no target: it measures speed, not a time to train"]
    if config.task.benchmark != NAME or not config.task.submittable:
        return [f"task {config.task.name} is not an MLPerf benchmark"]
    training, r, rules = config.training, config.training_recipe, LLAMA2_70B_LORA.fixed
    values: list[tuple[str, object, object]] = [
        *_sizes(config),
        ("data", config.training_data.name, "gov_report"),
        ("data.source", config.training_data.source.name, "prepared"),
        ("data.answer_only", config.training_data.answer_only, True),
        ("task.training.target_eval_loss", training.target_eval_loss, LLAMA2_70B_LORA.goals[0].value),
        ("recipe.weight_decay", r.weight_decay, rules[mllog.OPT_ADAMW_WEIGHT_DECAY]),
        ("recipe.clip_grad", r.clip_grad, rules[mllog.OPT_GRADIENT_CLIP_NORM]),
        (
            "recipe.eval_every_samples",
            r.eval_every_samples,
            LLAMA2_70B_LORA.schedule and LLAMA2_70B_LORA.schedule.every,
        ),
        ("recipe.eval_skip", r.eval_skip, None),
    ]
    return [f"{key} is {got}, but the rules require {required}" for key, got, required in values if got != required]


def has_benchmark_shape(config: Config) -> bool:
    """Return whether a training step and an evaluation are the same amount of work as in llama2_70b_lora."""
    return config.task.benchmark == NAME and all(got == required for _, got, required in _sizes(config))


def _sizes(config: Config) -> list[tuple[str, object, object]]:
    """Return the fixed values that decide how much work a step and an evaluation are, as (key, value, rule's value)."""
    lora, m, d, rules = config.training.lora, config.model, config.training_data, LLAMA2_70B_LORA.fixed
    return [
        *((f"model.{key}", getattr(m, key), required) for key, required in LLAMA2_70B.items()),
        ("data.seq_length", d.seq_length, rules["max_sequence_length"]),
        ("data.train_rows", d.num_train_rows, rules[mllog.TRAIN_SAMPLES]),
        ("data.eval_rows", d.eval_rows, rules[mllog.EVAL_SAMPLES]),
        ("task.training.lora.rank", lora and lora.rank, rules[mllog.LORA_RANK]),
        ("task.training.lora.alpha", lora and lora.alpha, rules[mllog.LORA_ALPHA]),
        ("task.training.lora.dropout", lora and lora.dropout, rules["lora_dropout"]),
        ("task.training.lora.target_modules", lora and sorted(lora.target_modules), sorted(LORA_TARGETS)),
    ]
