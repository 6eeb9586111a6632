"""What a log of our own says once, unless a test changes it."""

from typing import Any

INPUTS = {"train rows": "1" * 64, "eval rows": "2" * 64, "checkpoint": "3" * 64}
"""The inputs of lora70b and their checksums."""
ONCE: dict[str, Any] = {
    "cache_clear": True,
    "submission_benchmark": "llama2_70b_lora",
    "submission_division": "closed",
    "submission_org": "example",
    "submission_platform": "1xexample",
    "submission_status": "onprem",
    "target_accuracy": 0.925,
    "seed": 7,
    "initial_weights": "checkpoint",
    "data_source": "prepared",
    "global_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "train_samples": 3901,
    "eval_samples": 173,
    "opt_base_learning_rate": 4e-4,
    "opt_learning_rate_training_steps": 800,
    "opt_adamw_weight_decay": 1e-4,
    "opt_gradient_clip_norm": 0.3,
    "lora_rank": 16,
    "lora_alpha": 32,
    **{f"lowest_numerical_precision_in_{part}": "bfloat16" for part in ("linear", "attn", "comm")},
    **{f"{axis}_parallelism": 1 for axis in ("tensor", "pipeline", "context", "expert")},
    "micro_batch_size": 1,
    "config_filename": "config.yaml",
}
