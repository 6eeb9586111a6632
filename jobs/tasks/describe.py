"""What a log says of itself: what is measured, how, and on what."""

from collections.abc import Mapping

from bench.contract import mllog
from bench.contract.plan import Plan, Trial


def describe(plan: Plan, trial: Trial, versions: Mapping[str, str], log: mllog.Writer) -> None:
    """Log what is measured and on what: the keys that rulesets 5.1.0 and 6.1.0 ask for, and the versions."""
    import torch

    s, r, w, task = plan.submission, plan.config.recipe, plan.world, plan.config.task
    linear, other = {"fp32": ("fp32", "fp32"), "bf16": ("bfloat16", "bfloat16"), "fp8": ("fp8", "bfloat16")}[
        plan.config.precision.name
    ]
    shape = {} if s.shape_of is None else {"shape_of": s.shape_of}
    log.event(mllog.INITIAL_WEIGHTS, task.training.starts_from.name, **shape)
    log.event(mllog.DATA_SOURCE, plan.config.data.source.name)
    facts = {
        "submission_benchmark": s.benchmark,
        "submission_division": s.division,
        "submission_org": s.org,
        "submission_platform": s.platform,
        "submission_status": s.status,
        "target_accuracy": task.training.target_eval_loss,
        "seed": trial.seed,
        "global_batch_size": r.global_batch_size,
        "micro_batch_size": plan.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
        "train_samples": plan.config.data.train_rows,
        "eval_samples": plan.config.data.eval_rows,
        "max_sequence_length": plan.config.data.seq_length,
        "opt_name": "adamw",
        "opt_base_learning_rate": r.lr,
        "opt_learning_rate_training_steps": plan.max_steps,
        "opt_learning_rate_warmup_factor": r.lr_warmup_steps / plan.max_steps,
        "opt_learning_rate_decay_schedule": "cosine",
        "opt_adamw_weight_decay": r.weight_decay,
        "opt_adamw_beta_1": r.adam_beta1,
        "opt_adamw_beta_2": r.adam_beta2,
        "opt_adamw_epsilon": r.adam_eps,
        "opt_gradient_clip_norm": r.clip_grad,
        "lora_rank": task.training.lora and task.training.lora.rank,
        "lora_alpha": task.training.lora and task.training.lora.alpha,
        "lora_dropout": task.training.lora and task.training.lora.dropout,
        "tensor_parallelism": w.tp,
        "pipeline_parallelism": w.pp,
        "context_parallelism": w.cp,
        "expert_parallelism": 1,
        "lowest_numerical_precision_in_linear": linear,
        "lowest_numerical_precision_in_attn": other,
        "lowest_numerical_precision_in_comm": other,
        "config_filename": f"task/{task.name}.yaml",
        "trainable_parameters": plan.memory.trainable_parameters,
        mllog.MODEL_TFLOP_PER_SAMPLE: plan.tflop_per_sample,
        mllog.ACCELERATOR_PEAK_TFLOPS: plan.peak_tflops,
        "num_ranks": w.num_ranks,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "software": dict(versions),
    }
    for key, value in facts.items():
        if value is not None:
            log.event(key, value)
