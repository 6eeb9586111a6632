"""Checks of a training task that apply to every layout."""

from bench.contract.layers import differs_from_llama
from bench.contract.schema import Config, EngineName, Precision, ProfileKind
from bench.contract.task import Kind
from bench.contract.training import LORA_TARGETS, PEFT_MODULES, StartsFrom, Trains
from bench.errors import ConfigError
from bench.planning import nemo
from bench.planning.checks import _check_gpu_precision, _listed, data, huggingface, memory, ranges
from bench.texts import counted


def check(config: Config) -> None:
    """Raise ConfigError if a training task is invalid in every layout."""
    data.check(config.training_data)
    _check_training(config)
    if config.program is not None:  # what the engines support says nothing about it
        return
    _check_profile(config)
    _check_overlap(config)
    _check_lora(config)
    huggingface.check(config)
    _check_precision(config)
    memory.check_offload(config)
    nemo.check(config)


def require_megatron(config: Config, command: str) -> None:
    """Raise ConfigError unless the task trains with engine=megatron, the only one whose steps are estimated.

    command: what needs it, such as `tune`.
    """
    if config.task.kind is not Kind.train:
        raise ConfigError(
            f"{command} needs a training task, but task {config.task.name} is of kind {config.task.kind.name}",
            where="task",
            fix="choose a training task, such as task=lora_8b",
        )
    if config.engine.name is not EngineName.megatron:
        raise ConfigError(
            f"{command} can estimate only steps of engine=megatron, but the engine is {config.engine.name.name}",
            where="engine",
            fix="set engine=megatron, or choose a task that uses engine=megatron, such as task=lora_8b",
        )


def check_evaluation(config: Config, *, every_steps: int, first_step: int, max_steps: int) -> None:
    """Raise ConfigError if the run would never evaluate (rules CFG-02 and CFG-03)."""
    r, rows = config.training_recipe, config.training_data.num_train_rows
    if every_steps * r.global_batch_size > rows:
        raise ConfigError(
            f"the evaluation interval has {counted(every_steps * r.global_batch_size, 'sample')} "
            f"({counted(every_steps, 'step')}), but the training data has only {counted(rows, 'sample')}",
            where="recipe.eval_every_samples, recipe.global_batch_size",
            fix=f"set recipe.eval_every_samples to {rows // r.global_batch_size * r.global_batch_size} or less"
            if r.global_batch_size <= rows
            else f"set recipe.global_batch_size to {rows} or less",
        )
    if config.training.has_target and first_step > max_steps:
        raise ConfigError(
            f"the run cannot reach its target, because the first evaluation (step {first_step}) is after the last step "
            f"({max_steps})",
            where="task.training.max_steps, recipe.eval_every_samples, recipe.eval_skip",
            fix=f"set task.training.max_steps to {first_step} or more, or lower recipe.eval_every_samples"
            + (" or recipe.eval_skip" if r.eval_skip else ""),
        )


def _check_profile(config: Config) -> None:
    in_warm_up = config.launch.profile in (ProfileKind.kernels, ProfileKind.modules)
    if in_warm_up and not config.training_recipe.warmup_iterations:
        raise ConfigError(
            "the profiler records the last warm-up step, but warmup_iterations is 0",
            where="launch.profile, recipe.warmup_iterations",
            fix="set recipe.warmup_iterations to 2 or more, because the first warm-up step compiles kernels",
        )


def _check_overlap(config: Config) -> None:
    if config.parallel.overlap is not None and config.engine.name is not EngineName.megatron:
        raise ConfigError(
            f"only engine=megatron supports parallel.overlap, but the engine is {config.engine.name.name}",
            where="parallel.overlap",
            fix="remove parallel.overlap, or set engine=megatron",
        )


def check_profiled_steps(config: Config, max_steps: int) -> None:
    """Raise ConfigError if launch.profile_steps does not fit launch.profile and the steps of the run."""
    steps, where = config.launch.profile_steps, "launch.profile, launch.profile_steps"
    if config.launch.profile is not ProfileKind.nsys:
        if steps is not None:
            raise ConfigError(
                f"launch.profile_steps needs launch.profile=nsys, but launch.profile is {config.launch.profile.name}",
                where=where,
                fix="set launch.profile=nsys, or launch.profile_steps=null",
            )
        return
    if steps is None:
        raise ConfigError(
            "launch.profile is nsys, but launch.profile_steps, the steps to record, is not set",
            where=where,
            fix="set launch.profile_steps=[10,12] to record the steps 10 to 12",
        )
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= max_steps:
        raise ConfigError(
            f"launch.profile_steps is {steps}, but must be the first and the last step to record, from 1 to "
            f"{max_steps}",
            where=where,
            fix=f"write two steps, such as launch.profile_steps=[1,{min(3, max_steps)}]",
        )
    if config.task.submittable:
        raise ConfigError(
            "task.submittable is true, but a run with launch.profile=nsys cannot be submitted, because nsys slows the "
            "timed steps",
            where=where,
            fix="set task.submittable=false",
        )


def check_steps(config: Config, max_steps: int) -> None:
    """Raise ConfigError if no step follows the warm-up of the learning rate, or there are too many steps."""
    warmup, rows = config.training_recipe.lr_warmup_steps, config.training_data.num_train_rows
    if max_steps < 1:
        raise ConfigError(
            f"an epoch has only {counted(rows, 'sample')}, but one batch has "
            f"{counted(config.training_recipe.global_batch_size, 'sample')}",
            where="task.training.epochs, recipe.global_batch_size, data.train_rows",
            fix=f"set recipe.global_batch_size to {rows} or less",
        )
    if max_steps > ranges.MAX_STEPS:
        raise ConfigError(
            f"{config.training.epochs} epochs are {max_steps} steps, but at most {ranges.MAX_STEPS} steps are allowed",
            where="task.training.epochs",
            fix="lower task.training.epochs",
        )
    if warmup >= max_steps:
        raise ConfigError(
            f"recipe.lr_warmup_steps is {warmup}, but must be below the number of steps, which is {max_steps}",
            where="recipe.lr_warmup_steps",
            fix=f"set recipe.lr_warmup_steps to at most {max_steps - 1}",
        )


def _check_precision(config: Config) -> None:
    """Refuse a precision that the GPU or the engine's layers do not support; full training supports all of them."""
    trains, precision = config.training.trains, config.precision
    _check_gpu_precision(config)
    if trains is Trains.all:
        return
    if trains is Trains.qlora and precision is not Precision.bf16:
        raise ConfigError(
            f"task.training.trains=qlora needs precision=bf16, but precision is {precision.name}",
            where="precision, task.training.trains",
            fix="set precision=bf16, or task.training.trains=lora",
        )
    method = "LoRA on 4-bit weights (qlora)" if trains is Trains.qlora else "LoRA in FP8"
    unmet = differs_from_llama(config.model)
    differences = _listed(f"{key} is {value}" for key, value in unmet.items())
    is_ours = config.model.described is None
    if is_ours and unmet and (trains is Trains.qlora or precision is Precision.fp8):
        raise ConfigError(
            f"{method} needs the layers of Llama, Mistral or Qwen, but {differences}",
            where=f"precision, {_listed(unmet)}",
            fix="set precision=bf16 and task.training.trains=lora, or choose a model with RMSNorm, swiglu, rope and no "
            "bias",
        )


def _check_training(config: Config) -> None:
    """Refuse a task whose trained weights, start or end are missing or contradictory."""
    training = config.training
    if (training.max_steps is None) == (training.epochs is None):
        raise ConfigError(
            f"exactly one of max_steps and epochs must be set, but max_steps is {training.max_steps or 'null'} and "
            f"epochs is {training.epochs or 'null'}",
            where="task.training.max_steps, task.training.epochs",
            fix="set one of the two keys to a number, and the other key to null",
        )
    if training.starts_from is StartsFrom.task and training.base is None:
        raise ConfigError(
            "task.training.starts_from has the value task, but task.training.base is null",
            where="task.training.starts_from, task.training.base",
            fix="set task.training.base to the name of the task that trains the base checkpoint",
        )
    if training.starts_from is not StartsFrom.task and training.base is not None:
        raise ConfigError(
            f"task.training.base is {training.base}, but task.training.starts_from is {training.starts_from.name}; "
            "only starts_from=task uses a base",
            where="task.training.starts_from, task.training.base",
            fix="set task.training.base=null, or task.training.starts_from=task",
        )
    if training.checkpoint_every_steps is not None and config.task.benchmark is not None:
        raise ConfigError(
            f"the rules of {config.task.benchmark} do not allow resuming from a checkpoint, but "
            f"checkpoint_every_steps is {training.checkpoint_every_steps}",
            where="task.training.checkpoint_every_steps, task.benchmark",
            fix="set task.training.checkpoint_every_steps=null; or, if you do not submit the run, set "
            "task.benchmark=null",
        )
    if training.trains is not Trains.all and training.lora is None:
        raise ConfigError(
            f"task.training.trains is {training.trains.name}, but the block task.training.lora is null",
            where="task.training.trains, task.training.lora",
            fix="add the block task.training.lora, or set task.training.trains=all",
        )
    if training.trains is Trains.all and training.lora is not None:
        raise ConfigError(
            "task.training.trains is all, but the block task.training.lora is set",
            where="task.training.trains, task.training.lora",
            fix="set task.training.lora=null, or set task.training.trains to lora or qlora",
        )


def _check_lora(config: Config) -> None:
    lora = config.training.lora
    if lora is None:
        return
    name, peft = config.engine.name, tuple(module for modules in PEFT_MODULES.values() for module in modules)
    if not lora.shared_a and name is not EngineName.huggingface:
        raise ConfigError(
            f"task.training.lora.shared_a=false (a separate matrix A for each of q, k and v) needs engine=huggingface, "
            f"but the engine is {name.name}",
            where="task.training.lora.shared_a, engine",
            fix="set engine=huggingface, or task.training.lora.shared_a=true",
        )
    possible = LORA_TARGETS if lora.shared_a else (*PEFT_MODULES, *peft)
    is_described = config.model.described is not None  # its names are checked with the engine
    if not is_described and (unknown := sorted(set(lora.target_modules) - set(possible))):
        if lora.shared_a and set(unknown) <= {*PEFT_MODULES, *peft}:
            raise ConfigError(
                f"target_modules contains {_listed(unknown)}, which can have adapters only with shared_a=false",
                where="task.training.lora.target_modules",
                fix=f"list one or more of {_listed(possible)} in target_modules, or set "
                "task.training.lora.shared_a=false with engine=huggingface",
            )
        raise ConfigError(
            f"target_modules contains {_listed(unknown)}, which cannot have adapters",
            where="task.training.lora.target_modules",
            fix=f"list one or more of {_listed(possible)} in target_modules",
        )
    if not lora.target_modules:
        raise ConfigError(
            "task.training.lora.target_modules is empty",
            where="task.training.lora",
            fix="list at least one module in task.training.lora.target_modules",
        )
    if lora.rank < 1:
        raise ConfigError(
            f"task.training.lora.rank is {lora.rank}, but must be 1 or more",
            where="task.training.lora",
            fix="set task.training.lora.rank to 1 or more",
        )
    if not 0 <= lora.dropout < 1:
        raise ConfigError(
            f"task.training.lora.dropout is {lora.dropout}, but must be 0 or more, and below 1",
            where="task.training.lora",
            fix="set task.training.lora.dropout to a share such as 0.1, or to 0",
        )
