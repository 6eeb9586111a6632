"""Log the description of a trial: submission, settings, system and software."""

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.contract import plan as plans
from bench.contract.local_sgd import Compress
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import TrainingPlan
from jobs.node_checks import facts, hardware

ROOT = Path(__file__).parents[2]
"""The folder of this package; in a git checkout it holds `.git`."""
GIT_TIMEOUT_S = 10
_DTYPES = {"fp32": ("fp32", "fp32"), "bf16": ("bfloat16", "bfloat16"), "fp8": ("fp8", "bfloat16")}
"""By precision: the lowest precision of the linears, and of everything else."""
_SENT = {Compress.bf16: "bfloat16", Compress.int8: "int8"}
"""The precision of weights that local SGD compresses."""

Facts = dict[str, Any]


def describe(plan: TrainingPlan, trial: Trial, versions: Mapping[str, str], log: mllog.Writer) -> None:
    """Log the keys that rulesets 5.1.0 and 6.1.0 require, the hardware and the versions; None is omitted."""
    shape_of = plan.submission.shape_of
    shape = {} if shape_of is None else {"shape_of": shape_of}
    log.event(mllog.INITIAL_WEIGHTS, plan.config.training.starts_from.name, **shape)
    log.event(mllog.DATA_SOURCE, plan.config.training_data.source.name)
    described = (
        submission(plan, trial)
        | batch(plan)
        | optimizer(plan)
        | lora(plan)
        | parallelism(plan)
        | precision(plan)
        | size(plan)
        | system(plan)
        | {"software": dict(versions)}
    )
    for key, value in described.items():
        if value is not None:
            log.event(key, value)


def log_caches(record: Path, log: mllog.Writer) -> None:
    """Log whether each node dropped its page cache; the batch script's record has `NODE cleared` or `NODE kept`."""
    if not record.exists():
        log.event(mllog.CACHE_CLEAR, False, reason="page caches can only be dropped by the cluster")
        return
    for line in record.read_text().splitlines():
        node, _, outcome = line.partition(" ")
        log.event(mllog.CACHE_CLEAR, outcome == "cleared", node=node)


def submission(plan: TrainingPlan, trial: Trial) -> Facts:
    """Return MLPerf's keys of a submission."""
    s = plan.submission
    return {
        mllog.SUBMISSION_BENCHMARK: s.benchmark,
        mllog.SUBMISSION_DIVISION: s.division,
        mllog.SUBMISSION_ORG: s.org,
        mllog.SUBMISSION_PLATFORM: s.platform,
        mllog.SUBMISSION_STATUS: s.status,
        mllog.TARGET_ACCURACY: plan.config.training.target_eval_loss,
        mllog.SEED: trial.seed,
    }


def batch(plan: TrainingPlan) -> Facts:
    return {
        mllog.GLOBAL_BATCH_SIZE: plan.config.training_recipe.global_batch_size,
        mllog.MICRO_BATCH_SIZE: plan.batch.micro_batch_size,
        mllog.GRADIENT_ACCUMULATION_STEPS: plan.batch.gradient_accumulation_steps,
        mllog.TRAIN_SAMPLES: plan.config.training_data.num_train_rows,
        mllog.EVAL_SAMPLES: plan.config.training_data.eval_rows,
        "max_sequence_length": plan.config.training_data.seq_length,
        "document_mask": plan.config.training_data.document_mask or None,
    }


def optimizer(plan: TrainingPlan) -> Facts:
    r = plan.config.training_recipe
    return {
        "opt_name": "adamw",
        mllog.OPT_BASE_LEARNING_RATE: r.lr,
        mllog.OPT_LEARNING_RATE_TRAINING_STEPS: plan.max_steps,
        "opt_end_learning_rate": r.lr * r.lr_min_factor,
        "max_steps": plan.max_steps,
        mllog.OPT_LEARNING_RATE_WARMUP_FACTOR: r.lr_warmup_steps / plan.max_steps,
        "opt_learning_rate_warmup_steps": r.lr_warmup_steps,
        "opt_learning_rate_decay_steps": plan.max_steps - r.lr_warmup_steps,  # read after the warm-up (official check)
        "opt_learning_rate_decay_schedule": "cosine with linear warmup",
        mllog.OPT_ADAMW_WEIGHT_DECAY: r.weight_decay,
        "opt_adamw_beta_1": r.adam_beta1,
        "opt_adamw_beta_2": r.adam_beta2,
        "opt_adamw_epsilon": r.adam_eps,
        mllog.OPT_GRADIENT_CLIP_NORM: r.clip_grad,
    }


def lora(plan: TrainingPlan) -> Facts:
    """Return the LoRA settings; empty without LoRA."""
    adapters = plan.config.training.lora
    if adapters is None:
        return {}
    facts = {mllog.LORA_RANK: adapters.rank, mllog.LORA_ALPHA: adapters.alpha, "lora_dropout": adapters.dropout}
    return facts if adapters.shared_a else facts | {"lora_shared_a": False}


def parallelism(plan: TrainingPlan) -> Facts:
    return {
        mllog.TENSOR_PARALLELISM: plan.world.tp,
        mllog.PIPELINE_PARALLELISM: plan.world.pp,
        mllog.CONTEXT_PARALLELISM: plan.world.cp,
        mllog.EXPERT_PARALLELISM: plan.world.ep,
    }


def precision(plan: TrainingPlan) -> Facts:
    """Return the lowest numerical precision of linears, attention and communication."""
    linear, other = _DTYPES[plan.config.precision.name]
    local_sgd = plan.config.training_recipe.averaging
    sent = other if local_sgd is None else _SENT.get(local_sgd.compress, other)
    return {mllog.PRECISION_IN_LINEAR: linear, mllog.PRECISION_IN_ATTN: other, mllog.PRECISION_IN_COMM: sent}


def size(plan: TrainingPlan) -> Facts:
    """Return the config file of the task, and the amount of work; FLOPs only if they are more than an upper bound."""
    is_bound = plan.data.document_mask and plan.attention_share is None
    return {
        mllog.CONFIG_FILENAME: f"task/{plan.config.task.name}.yaml",
        "trainable_parameters": plan.memory and plan.memory.trainable_parameters,
        mllog.MODEL_TFLOP_PER_SAMPLE: None if is_bound else plan.tflop_per_sample,
        mllog.ACCELERATOR_PEAK_TFLOPS: plan.peak_tflops,
    }


def system(plan: Plan) -> Facts:
    """Return the hardware, the operating system and this code's commit, on rank 0's node."""
    import torch

    num_gpus = plan.world.num_nodes * plans.gpus_per_node(plan)
    return {
        "num_ranks": plan.world.num_ranks,
        mllog.NUM_GPUS: num_gpus if num_gpus != plan.world.num_ranks else None,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "host_processor_model_name": hardware.cpu_model(),
        "operating_system": hardware.operating_system(),
        "commit": commit(ROOT, facts.IMAGE),
        **price(plan),
    }


def price(plan: Plan) -> Facts:
    """Return the price of a GPU hour; empty if the cluster has none."""
    cluster = plan.config.cluster
    if cluster.price_per_gpu_hour is None:
        return {}
    return {mllog.PRICE_PER_GPU_HOUR: cluster.price_per_gpu_hour, mllog.CURRENCY: cluster.currency}


def commit(root: Path, image: Path) -> str | None:
    """Return the git commit of this code: of its checkout, else the one that the image was built from.

    With uncommitted changes `-dirty` follows.
    """
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
            return done.stdout.strip() if done.returncode == 0 else None
        return None
    with suppress(ValueError):
        marker = json.loads(hardware.text(image) or "null")
        return marker.get("commit") if isinstance(marker, dict) else None
    return None
