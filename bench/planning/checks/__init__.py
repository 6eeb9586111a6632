"""Refuse a config that cannot run in any layout; each message says what is wrong, where, and the fix."""

from collections.abc import Iterable

from bench.contract.cluster import require_even
from bench.contract.layers import differs_from_llama
from bench.contract.model import Position
from bench.contract.schema import BackendName, Config, Device, Precision, ProfileKind
from bench.contract.task import Kind, Task
from bench.contract.training import LORA_TARGETS, StartsFrom, Trains
from bench.errors import ConfigError
from bench.planning import generation as generation_plan
from bench.planning import nemo, serving
from bench.planning.checks import data, generation, huggingface, kernels, local_sgd, memory, ranges, texts


def check(config: Config) -> None:
    """Raise ConfigError when the config contradicts itself in every layout."""
    texts.check(config)
    _check_kind(config.task)
    ranges.check(config)
    _check_heads(config)
    _check_positions(config)
    _check_cluster(config)
    _check_walltime(config)
    generation.check_sharing(config)
    local_sgd.check(config)
    match config.task.kind:
        case Kind.kernels:
            kernels.check(config)
        case Kind.generate:
            generation.check(config)
        case Kind.serve:
            serving.check(config)
        case Kind.train:
            _check_train(config)


def _check_train(config: Config) -> None:
    data.check(config.data)
    _check_profile(config)
    _check_training(config)
    _check_lora(config)
    huggingface.check(config)
    _check_precision(config)
    memory.check_offload(config)
    nemo.check(config)


def _check_kind(task: Task) -> None:
    """Refuse a task without the block of its kind, or with another one."""
    for kind in Kind:
        is_given = getattr(task, kind.block) is not None
        if is_given != (kind is task.kind):
            raise ConfigError(
                f"task {task.name} is of kind {task.kind.name}, and task.{kind.block} is "
                f"{'given' if is_given else 'missing'}",
                where=f"task.kind, task.{kind.block}",
                fix=f"set task.{kind.block}=null, or task.kind={kind.name}" if is_given else f"give task.{kind.block}",
            )


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
    if config.training.target_eval_loss is not None and first_step > max_steps:
        raise ConfigError(
            f"the first evaluation is at step {first_step}, after the last, {max_steps}: the target cannot be reached",
            where="task.training.max_steps, recipe.eval_every_samples, recipe.eval_skip",
            fix=f"set task.training.max_steps to at least {first_step}, or evaluate earlier",
        )


def _check_profile(config: Config) -> None:
    if config.launch.profile is not ProfileKind.none and not config.recipe.warmup_iterations:
        raise ConfigError(
            "the profile shows the last warm-up step, and this recipe has no warm-up steps",
            where="launch.profile, recipe.warmup_iterations",
            fix="set recipe.warmup_iterations to 2 or more: kernels are compiled in the first",
        )


def check_steps(config: Config, max_steps: int) -> None:
    """Raise ConfigError when no step is left after the learning rate's warm-up."""
    warmup = config.recipe.lr_warmup_steps
    if max_steps < 1:
        raise ConfigError(
            f"an epoch of {config.data.train_rows} rows holds no batch of {config.recipe.global_batch_size}",
            where="task.training.epochs, recipe.global_batch_size, data.train_rows",
            fix=f"set recipe.global_batch_size to {config.data.train_rows} or less",
        )
    if max_steps > ranges.MAX_STEPS:
        raise ConfigError(
            f"{config.training.epochs} epochs are {max_steps} steps, above {ranges.MAX_STEPS}",
            where="task.training.epochs",
            fix="set task.training.epochs to fewer",
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
    if c.backend is BackendName.ssh:
        require_even(c.hosts or [], num_nodes=c.num_nodes, ranks_per_node=generation_plan.ranks_per_node(config))
    elif c.hosts:
        what, fix = "hosts are for backend ssh", "choose cluster=hosts, or leave them out"
        raise ConfigError(f"{what}, and this one is {c.backend.name}", where="cluster.hosts", fix=fix)
    if not c.backend.is_elsewhere and c.num_nodes != 1:
        raise ConfigError(
            f"{c.num_nodes} nodes, and backend {c.backend.name} starts ranks on this machine only",
            where="cluster.num_nodes",
            fix="set cluster.num_nodes=1, or choose a cluster with a queue",
        )
    if c.device is Device.cuda and c.gpu is None and c.backend.is_elsewhere:
        raise ConfigError("the GPU type is not given", where="cluster.gpu", fix="name it, its memory and peak rates")


def _check_precision(config: Config) -> None:
    """Refuse what the GPU or no layer of the engine computes; a whole model is trained in every precision."""
    trains, precision = config.training.trains, config.precision
    _check_gpu_precision(config)
    if trains is Trains.all:
        return
    if trains is Trains.qlora and precision is not Precision.bf16:
        raise ConfigError(
            f"trains is qlora and precision is {precision.name}: a 4-bit base is computed with in BF16",
            where="precision, task.training.trains",
            fix="set precision=bf16, or task.training.trains=lora",
        )
    what = "a 4-bit base" if trains is Trains.qlora else "LoRA in FP8"
    unmet = differs_from_llama(config.model)
    if unmet and (trains is Trains.qlora or precision is Precision.fp8):
        raise ConfigError(
            f"{what} needs the frozen linears of a Llama model, and "
            + _listed(f"{k} is {v}" for k, v in unmet.items()),
            where=f"precision, {_listed(unmet)}",
            fix="set precision=bf16 and task.training.trains=lora, or use RMSNorm, swiglu, rope and no bias",
        )


def _check_gpu_precision(config: Config) -> None:
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    if config.precision is Precision.fp8 and gpu is not None and gpu.peak_fp8_tflops is None:
        raise ConfigError(
            f"precision is fp8, and {gpu.name} has no FP8",
            where="precision, cluster.gpu.peak_fp8_tflops",
            fix="set precision=bf16; for a GPU that has FP8, give its dense peak in cluster.gpu.peak_fp8_tflops",
        )


def _check_training(config: Config) -> None:
    """Refuse a training task whose trained weights, start or end are missing or contradict each other."""
    training = config.training
    if (training.max_steps is None) == (training.epochs is None):
        raise ConfigError(
            f"max_steps is {training.max_steps or 'null'} and epochs is {training.epochs or 'null'}: exactly one of "
            "them must say when the run ends",
            where="task.training.max_steps, task.training.epochs",
            fix="set one of them, and the other one to null",
        )
    if (training.starts_from is StartsFrom.task) != (training.base is not None):
        raise ConfigError(
            f"training starts from {training.starts_from.name}, and the task for its checkpoint is "
            f"{training.base or 'null'}",
            where="task.training.starts_from, task.training.base",
            fix="name a task in task.training.base with starts_from=task, or set base to null",
        )
    if training.checkpoint_every_steps is not None and config.task.benchmark is not None:
        raise ConfigError(
            f"checkpoints every {training.checkpoint_every_steps} steps, and {config.task.benchmark} knows no resuming",
            where="task.training.checkpoint_every_steps, task.benchmark",
            fix="set task.training.checkpoint_every_steps=null, or task.benchmark=null where nothing is submitted",
        )
    if (training.trains is Trains.all) != (training.lora is None):
        raise ConfigError(
            f"trains is {training.trains.name}, and "
            f"task.training.lora is {'null' if training.lora is None else 'given'}",
            where="task.training.trains, task.training.lora",
            fix="give adapters for trains=lora or qlora, or set task.training.lora=null with trains=all",
        )


def _check_lora(config: Config) -> None:
    lora = config.training.lora
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
            fix=f"lower walltime or trials until 5 + trials x (walltime + 5) is at most {limit}, "
            "or set launch.array=true",
        )


def walltime_min(config: Config) -> int | None:
    """Return the time limit of a job in minutes: 5, plus walltime + 5 for each of its trials; None without a limit.

    Source: WALLTIME in the config_*.sh of NVIDIA's MLPerf training submissions.
    """
    if config.walltime is None:
        return None
    return job_min(1 if config.launch.array else config.trials, config.walltime)


def job_min(trials: int, trial_min: int) -> int:
    """Return the time limit in minutes of a job with so many trials."""
    return 5 + trials * (trial_min + 5)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
