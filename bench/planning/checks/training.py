"""Refuse a training task that cannot run in any layout; each message says what is wrong, where, and the fix."""

from bench.contract.layers import differs_from_llama
from bench.contract.schema import Config, Precision, ProfileKind
from bench.contract.training import LORA_TARGETS, StartsFrom, Trains
from bench.errors import ConfigError
from bench.planning import nemo
from bench.planning.checks import _check_gpu_precision, _listed, data, huggingface, memory, ranges


def check(config: Config) -> None:
    """Raise ConfigError when a training task contradicts itself in every layout."""
    data.check(config.training_data)
    _check_profile(config)
    _check_training(config)
    _check_lora(config)
    huggingface.check(config)
    _check_precision(config)
    memory.check_offload(config)
    nemo.check(config)


def check_evaluation(config: Config, *, every_steps: int, first_step: int, max_steps: int) -> None:
    """Raise ConfigError when the schedule can never evaluate (rules CFG-02 and CFG-03)."""
    r, rows = config.training_recipe, config.training_data.train_rows
    if every_steps * r.global_batch_size > rows:
        raise ConfigError(
            f"an evaluation every {every_steps} steps is {every_steps * r.global_batch_size} samples, "
            f"longer than the data's {rows} rows",
            where="recipe.eval_every_samples, recipe.global_batch_size",
            fix=f"evaluate at least every {rows // r.global_batch_size * r.global_batch_size} samples",
        )
    if config.training.has_target and first_step > max_steps:
        raise ConfigError(
            f"the first evaluation is at step {first_step}, after the last, {max_steps}: the target cannot be reached",
            where="task.training.max_steps, recipe.eval_every_samples, recipe.eval_skip",
            fix=f"set task.training.max_steps to at least {first_step}, or evaluate earlier",
        )


def _check_profile(config: Config) -> None:
    if config.launch.profile is not ProfileKind.none and not config.training_recipe.warmup_iterations:
        raise ConfigError(
            "the profile shows the last warm-up step, and this recipe has no warm-up steps",
            where="launch.profile, recipe.warmup_iterations",
            fix="set recipe.warmup_iterations to 2 or more: kernels are compiled in the first",
        )


def check_steps(config: Config, max_steps: int) -> None:
    """Raise ConfigError when no step is left after the learning rate's warm-up."""
    warmup, rows = config.training_recipe.lr_warmup_steps, config.training_data.train_rows
    if max_steps < 1:
        raise ConfigError(
            f"an epoch of {rows} rows holds no batch of {config.training_recipe.global_batch_size}",
            where="task.training.epochs, recipe.global_batch_size, data.train_rows",
            fix=f"set recipe.global_batch_size to {rows} or less",
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
