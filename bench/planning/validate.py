"""Refuse what cannot run, whatever the layout: what, where, fix."""

import itertools
import math
from collections.abc import Iterable

from bench.contract.plan import Memory
from bench.contract.schema import (
    LORA_TARGETS,
    Activation,
    Config,
    Device,
    Norm,
    Position,
    Precision,
    StartsFrom,
    Trains,
)
from bench.errors import ConfigError

MAX_TRIALS, MAX_STEPS = 1000, 10_000_000
"""More is a slip of the keyboard: a score takes 10 trials."""


def check(config: Config) -> None:
    """Raise ConfigError when what is asked for contradicts itself in any layout."""
    _check_numbers(config)
    _check_profile(config)
    _check_training(config)
    _check_heads(config)
    _check_positions(config)
    _check_cluster(config)
    _check_rates(config)
    _check_lora(config)
    _check_precision(config)
    _check_walltime(config)


def check_evaluation(config: Config, *, every_steps: int, first_step: int, max_steps: int) -> None:
    """Raise ConfigError when the schedule can never evaluate (rules CFG-02 and CFG-03)."""
    r, rows = config.recipe, config.data.train_rows
    if every_steps * r.global_batch_size > rows:
        raise ConfigError(
            f"an evaluation every {every_steps} steps is {every_steps * r.global_batch_size} samples, "
            f"longer than the data's {rows} rows",
            where="recipe.eval_every_samples, recipe.global_batch_size",
            fix=f"evaluate at least every {rows // r.global_batch_size * r.global_batch_size} samples",
        )
    if config.task.training.target_eval_loss is not None and first_step > max_steps:
        raise ConfigError(
            f"the first evaluation is at step {first_step}, after the last, {max_steps}: the target cannot be reached",
            where="task.training.max_steps, recipe.eval_every_samples, recipe.eval_skip",
            fix=f"set task.training.max_steps to at least {first_step}, or evaluate earlier",
        )


def check_memory(config: Config, memory: Memory) -> None:
    """Raise ConfigError when the estimate is above what the GPU has."""
    if memory.fits is not False:
        return
    gpu = config.cluster.gpu
    assert gpu is not None
    raise ConfigError(
        f"{memory.total_gib:.1f} GiB per GPU needed, and a {gpu.name} has {gpu.memory_gib:g}: weights "
        f"{memory.base_weights_gib + memory.adapter_weights_gib:.1f}, gradients {memory.gradients_gib:.1f}, "
        f"optimizer {memory.optimizer_gib:.1f}, activations {memory.activations_gib:.1f}, "
        f"workspace {memory.workspace_gib:.1f}",
        where="parallel.tp, parallel.pp, parallel.cp, recipe.recompute",
        fix="raise parallel.tp (weights), parallel.cp (activations) or the number of GPUs, or set recipe.recompute=full",
    )


def _check_numbers(config: Config) -> None:
    """Refuse numbers that no run can have: what counts is above 0, what may be nothing is not below it."""
    for key, value in _positive(config).items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{value} is not above 0 and finite", where=key, fix=f"set {key} to a positive number")
    r = config.recipe
    for key, beta in {"recipe.adam_beta1": r.adam_beta1, "recipe.adam_beta2": r.adam_beta2}.items():
        if not 0 <= beta < 1:
            raise ConfigError(f"{beta} is not in [0, 1)", where=key, fix=f"set {key} to 0 or more, below 1")
    largest = {
        "trials": (config.trials, MAX_TRIALS),
        "task.training.max_steps": (config.task.training.max_steps, MAX_STEPS),
    }
    for key, (count, most) in largest.items():
        if count is not None and count > most:
            raise ConfigError(f"{count} is above {most}", where=key, fix=f"set {key} to {most} or less")
    for key, amount in _not_negative(config).items():
        if amount is not None and not 0 <= amount < math.inf:
            raise ConfigError(f"{amount} is below 0 or not finite", where=key, fix=f"set {key} to 0 or more")
    port = config.cluster.master_port
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"{port} is not a valid port", where="cluster.master_port", fix="use 1 to 65535, or null")


def _positive(config: Config) -> dict[str, float | None]:
    """Return what must be above 0, by key; None is allowed where the schema allows it."""
    model = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *("vocab_size", "max_seq_length", "rope_scaling_factor"),
    )
    recipe = (
        *("global_batch_size", "micro_batch_size", "eval_every_samples", "log_every_steps"),
        *("lr", "clip_grad", "adam_eps"),
    )
    return {
        **_values("model", config.model, model),
        **_values("parallel", config.parallel, ("tp", "pp", "cp", "vpp")),
        **_values("cluster", config.cluster, ("num_nodes", "ranks_per_node")),
        **_values("recipe", config.recipe, recipe),
        **_values("task.training", config.task.training, ("max_steps", "epochs", "target_eval_loss")),
        **_values("data", config.data, ("seq_length", "train_rows", "eval_rows")),
        "trials": config.trials,
    }


def _not_negative(config: Config) -> dict[str, float | None]:
    """Return what must not be below 0, by key."""
    recipe = ("lr_warmup_steps", "warmup_iterations", "eval_skip", "weight_decay")
    return {**_values("recipe", config.recipe, recipe), "seed_base": config.seed_base}


def _values(group: str, node: object, names: Iterable[str]) -> dict[str, float | None]:
    return {f"{group}.{name}": getattr(node, name) for name in names}


def _check_profile(config: Config) -> None:
    if config.launch.profile and not config.recipe.warmup_iterations:
        raise ConfigError(
            "the profile is of the last warm-up step, and there is none",
            where="launch.profile, recipe.warmup_iterations",
            fix="set recipe.warmup_iterations to 2 or more, so that the one in the profile compiles nothing",
        )


def check_steps(config: Config, max_steps: int) -> None:
    """Raise ConfigError when the steps that a run takes at most leave nothing to train after the warm-up."""
    warmup = config.recipe.lr_warmup_steps
    if max_steps < 1:
        raise ConfigError(
            f"an epoch of {config.data.train_rows} rows holds no batch of {config.recipe.global_batch_size}",
            where="task.training.epochs, recipe.global_batch_size, data.train_rows",
            fix=f"set recipe.global_batch_size to {config.data.train_rows} or less",
        )
    if warmup >= max_steps:
        raise ConfigError(
            f"{warmup} warm-up steps leave nothing of the run's {max_steps} steps",
            where="recipe.lr_warmup_steps",
            fix=f"warm up for fewer than {max_steps} steps",
        )


def _check_heads(config: Config) -> None:
    m = config.model
    if m.num_attention_heads % m.num_query_groups or m.hidden_size % m.num_attention_heads:
        raise ConfigError(
            f"{m.num_attention_heads} heads of hidden size {m.hidden_size} with {m.num_query_groups} query groups",
            where="model",
            fix="make the heads divide hidden_size, and the query groups divide the heads",
        )


def _check_positions(config: Config) -> None:
    s, m = config.data.seq_length, config.model
    if s > m.max_seq_length and m.position is Position.learned:
        raise ConfigError(
            f"rows of {s} tokens, and {m.name} has learned positions for {m.max_seq_length}",
            where="data.seq_length, model.max_seq_length",
            fix=f"set data.seq_length to {m.max_seq_length} or less",
        )


def _check_cluster(config: Config) -> None:
    c = config.cluster
    if not c.backend.has_queue and c.num_nodes != 1:
        raise ConfigError(
            f"{c.num_nodes} nodes, and backend {c.backend.name} starts ranks on this machine only",
            where="cluster.num_nodes",
            fix="set cluster.num_nodes=1, or choose a cluster with a queue",
        )
    if c.device is Device.cuda and c.gpu is None and c.backend.has_queue:
        raise ConfigError("the GPU type is not said", where="cluster.gpu", fix="name it, its memory and peak rates")


def _check_rates(config: Config) -> None:
    rates = config.cluster.gpu.rates if config.cluster.gpu else None
    if rates is None:
        return
    tables = {
        "layer_tflop, bf16_tflops and fp8_tflops": (rates.layer_tflop, rates.bf16_tflops, rates.fp8_tflops),
        "busbw_mib and busbw_gbs": (rates.busbw_mib, rates.busbw_gbs),
    }
    for names, (sizes, *columns) in tables.items():
        is_rising = all(low < high for low, high in zip(sizes, sizes[1:], strict=False))
        if not sizes or not is_rising or any(len(column) != len(sizes) for column in columns):
            raise ConfigError(
                f"{names} are no table: {sizes} with {', '.join(map(str, columns))}",
                where="cluster.gpu.rates",
                fix="list sizes that rise, and one rate for each",
            )
    single = (rates.attention_forward_tflops, rates.attention_backward_tflops, rates.copy_gbs, rates.launch_us)
    numbers = [*single, *itertools.chain(*itertools.chain(*tables.values()))]
    if not all(0 < number < math.inf for number in numbers):
        raise ConfigError(
            "rates are above 0 and finite",
            where="cluster.gpu.rates",
            fix="give what was measured, or set cluster.gpu.rates=null",
        )


def _check_precision(config: Config) -> None:
    m = config.model
    if config.precision is not Precision.fp8:
        return
    needed = {
        "task.training.lora": ("null", config.task.training.lora is not None),
        "model.norm": (m.norm.name, m.norm is Norm.RMSNorm),
        "model.activation": (m.activation.name, m.activation is Activation.swiglu),
        "model.position": (m.position.name, m.position is Position.rope),
        "model.bias": (m.bias, not m.bias),
    }
    if unmet := {key: value for key, (value, is_met) in needed.items() if not is_met}:
        raise ConfigError(
            f"FP8 is for the frozen linears of a Llama under LoRA, and {_listed(f'{k} is {v}' for k, v in unmet.items())}",
            where=f"precision, {_listed(unmet)}",
            fix="set precision=bf16, or use task.training.lora, RMSNorm, swiglu, rope and no bias",
        )


def _check_training(config: Config) -> None:
    """Refuse a training task that does not say what it trains, from where and until when, or says it twice."""
    training = config.task.training
    if (training.max_steps is None) == (training.epochs is None):
        raise ConfigError(
            f"max_steps is {training.max_steps} and epochs is {training.epochs}: one of them says when the run ends",
            where="task.training.max_steps, task.training.epochs",
            fix="set the one and leave the other null",
        )
    if (training.starts_from is StartsFrom.task) != (training.base is not None):
        raise ConfigError(
            f"training starts from {training.starts_from.name}, and the task for its checkpoint is {training.base}",
            where="task.training.starts_from, task.training.base",
            fix="name a task in task.training.base with starts_from=task, or set base to null",
        )
    if training.trains is Trains.qlora:
        raise ConfigError(
            "the megatron engine cannot train adapters on a 4-bit base yet",
            where="task.training.trains",
            fix="set task.training.trains=lora, with precision=bf16 or fp8",
        )
    if (training.trains is Trains.all) != (training.lora is None):
        raise ConfigError(
            f"{training.trains.name} is to be trained, and task.training.lora is {'null' if training.lora is None else 'given'}",
            where="task.training.trains, task.training.lora",
            fix="give adapters for trains=lora, or set task.training.lora=null with trains=all",
        )


def _check_lora(config: Config) -> None:
    lora = config.task.training.lora
    if lora is None:
        return
    if unknown := sorted(set(lora.target_modules) - set(LORA_TARGETS)):
        raise ConfigError(
            f"no adapter can be put on {_listed(unknown)}",
            where="task.training.lora.target_modules",
            fix=f"choose from {_listed(LORA_TARGETS)}",
        )
    if not lora.target_modules or lora.rank < 1 or not 0 <= lora.dropout < 1:
        raise ConfigError(
            f"LoRA of rank {lora.rank}, dropout {lora.dropout}, on {lora.target_modules} trains nothing",
            where="task.training.lora",
            fix="use rank 1 or more, dropout in [0, 1) and at least one target module",
        )


def _check_walltime(config: Config) -> None:
    if config.walltime is not None and config.walltime < 1:
        raise ConfigError(f"{config.walltime} minutes", where="walltime", fix="set walltime to 1 or more, or null")
    if config.cluster.backend.has_queue and config.walltime is None:
        raise ConfigError(
            "a job in a queue needs a time limit, and walltime (minutes per trial) is null",
            where="walltime",
            fix="set walltime to the minutes one trial may take",
        )
    limit = config.cluster.slurm.max_walltime_min if config.cluster.slurm else None
    job = walltime_min(config)
    if limit is not None and job is not None and job > limit:
        raise ConfigError(
            f"the job would take {job} min, and this cluster allows {limit}",
            where="walltime, trials",
            fix=f"lower walltime or trials until 5 + trials x (walltime + 5) is at most {limit}, or set launch.array=true",
        )


def walltime_min(config: Config) -> int | None:
    """Return the minutes of a job: 5, and for each of its trials its own and 5 more; None without a limit.

    Source: WALLTIME in the config_*.sh of NVIDIA's MLPerf training submissions.
    """
    if config.walltime is None:
        return None
    return job_min(1 if config.launch.array else config.trials, config.walltime)


def job_min(trials: int, trial_min: int) -> int:
    """Return the minutes of a job of so many trials."""
    return 5 + trials * (trial_min + 5)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
