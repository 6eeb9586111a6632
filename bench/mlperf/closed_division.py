"""In what a run leaves the closed division's rules."""

from bench.contract.schema import Activation, Config, Norm, Position, Weights
from bench.planning.validate import LORA_TARGETS

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
    """Return in what this run leaves the closed division's rules; empty only for the benchmark by the book.

    Source: MLPerf training rules, llama2_70b_lora: fixed model, rows, LoRA, AdamW, clipping, target and schedule.
    """
    if config.model.weights is Weights.random:
        return ["model.weights is random, on rows made up in memory: it measures speed and trains nothing"]
    if config.task.benchmark != "llama2_70b_lora" or not config.task.submittable:
        return [f"task {config.task.name} is not an MLPerf benchmark"]
    task, r = config.task, config.recipe
    found: list[tuple[str, object, object]] = [
        *_sizes(config),
        ("data", config.data.name, "gov_report"),
        ("data.source", config.data.source.name, "prepared"),
        ("data.answer_only", config.data.answer_only, True),
        ("task.target_eval_loss", task.target_eval_loss, 0.925),
        ("recipe.weight_decay", r.weight_decay, 0.0001),
        ("recipe.clip_grad", r.clip_grad, 0.3),
        ("recipe.eval_every_samples", r.eval_every_samples, 384),
        ("recipe.eval_skip", r.eval_skip, None),
    ]
    return [f"{key} is {got}, the rules say {want}" for key, got, want in found if got != want]


def has_benchmark_shape(config: Config) -> bool:
    """Return whether a training step and an evaluation are as much work as llama2_70b_lora's."""
    return config.task.benchmark == "llama2_70b_lora" and all(got == want for _, got, want in _sizes(config))


def _sizes(config: Config) -> list[tuple[str, object, object]]:
    """Return the fixed values that decide how much work a step and an evaluation are, as (key, value, rule's value)."""
    lora, m, d = config.task.lora, config.model, config.data
    return [
        *((f"model.{key}", getattr(m, key), want) for key, want in LLAMA2_70B.items()),
        ("data.seq_length", d.seq_length, 8192),
        ("data.train_rows", d.train_rows, 3901),
        ("data.eval_rows", d.eval_rows, 173),
        ("task.lora.rank", lora and lora.rank, 16),
        ("task.lora.alpha", lora and lora.alpha, 32),
        ("task.lora.dropout", lora and lora.dropout, 0.1),
        ("task.lora.target_modules", lora and sorted(lora.target_modules), sorted(LORA_TARGETS)),
    ]
