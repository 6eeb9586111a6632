"""Refuse parallel.groups or recipe.local_sgd without the other, and invalid settings of local SGD."""

from collections.abc import Iterator
from dataclasses import asdict

from bench.contract.local_sgd import Average, LocalSgd
from bench.contract.schema import BackendName, Config, EngineName, Runtime
from bench.errors import ConfigError
from bench.planning.parallelism import divisors
from bench.texts import counted

Refusal = tuple[bool, str, str, str]
"""Whether to refuse, the message, the keys, and the fix."""


def check(config: Config) -> None:
    """Refuse groups without local SGD, local SGD without groups, and invalid settings.

    Raises:
        ConfigError: with the first problem.
    """
    if config.task.generation:  # its groups are replicas
        return
    local_sgd, groups = config.recipe.averaging if config.recipe else None, config.parallel.groups
    refusals = [*_together(config)]
    if local_sgd is not None and groups is not None:
        refusals += [*_settings(local_sgd), *_ranks(config, groups), *_run(config)]
    for is_refused, what, where, fix in refusals:
        if is_refused:
            raise ConfigError(what, where=where, fix=fix)


def _together(config: Config) -> Iterator[Refusal]:
    given = config.recipe.local_sgd if config.recipe else LocalSgd()
    local_sgd, groups = config.recipe.averaging if config.recipe else None, config.parallel.groups
    changed = [name for name, value in asdict(given).items() if value != getattr(LocalSgd(), name)]
    keys = ", ".join(f"recipe.local_sgd.{name}" for name in changed)
    verb = "is" if len(changed) == 1 else "are"
    what = f"{keys} {verb} set, but local SGD is off: recipe.local_sgd.every_steps is null"
    fix = "set the number of steps between weight averagings, for example recipe.local_sgd.every_steps=100"
    yield bool(changed) and local_sgd is None, what, "recipe.local_sgd.every_steps", fix
    what = f"parallel.groups={groups} needs local SGD, but recipe.local_sgd.every_steps is null"
    fix = "remove parallel.groups, set recipe.local_sgd.every_steps=100, or choose a task such as "
    fix += "pretrain_tiny_local_sgd"
    yield groups is not None and local_sgd is None, what, "parallel.groups", fix
    what, where = "local SGD needs groups of ranks, but parallel.groups is null", "recipe.local_sgd"
    yield local_sgd is not None and groups is None, what, f"{where}, parallel.groups", "set parallel.groups=2"


def _settings(local_sgd: LocalSgd) -> Iterator[Refusal]:
    here, every = "recipe.local_sgd", local_sgd.interval
    what = f"every_steps is {every}, but must be 1 or more"
    yield every < 1, what, f"{here}.every_steps", "set every_steps to 1 or more"
    what = f"overlap_steps is {local_sgd.overlap_steps}, but must be 0 or more, and below every_steps ({every})"
    yield (
        not 0 <= local_sgd.overlap_steps < every,
        what,
        f"{here}.overlap_steps",
        f"set a number from 0 to {max(0, every - 1)}",
    )
    yield (
        not local_sgd.outer_lr > 0,
        f"outer_lr is {local_sgd.outer_lr:g}, but must be above 0",
        f"{here}.outer_lr",
        "set outer_lr to a value above 0; DiLoCo uses 0.7",
    )
    momentum = local_sgd.outer_momentum
    yield (
        not 0 <= momentum < 1,
        f"outer_momentum is {momentum:g}, but must be 0 or more, and below 1",
        f"{here}.outer_momentum",
        "set outer_momentum to 0 or more, and below 1; DiLoCo uses 0.9",
    )
    is_mean = local_sgd.average is Average.parameters
    what = (
        f"average=parameters has no outer optimizer, but outer_lr={local_sgd.outer_lr:g}, outer_momentum={momentum:g}"
    )
    where, fix = f"{here}.average", "set average=nesterov, or outer_lr=1 and outer_momentum=0"
    yield is_mean and (local_sgd.outer_lr, momentum) != (1.0, 0.0), what, where, fix
    restarts = local_sgd.restarts
    yield (
        restarts is not None and restarts < 0,
        f"restarts={restarts} is negative",
        f"{here}.restarts",
        "set restarts to 0 or more, or to null",
    )
    for name in ("time_limit_s", "step_time_s"):
        value = getattr(local_sgd, name)
        yield (
            value is not None and not value > 0,
            f"{name} is {value}, but must be above 0",
            f"{here}.{name}",
            f"set {name} to a number of seconds greater than 0",
        )


def _ranks(config: Config, groups: int) -> Iterator[Refusal]:
    nodes, per_node, gbs = (
        config.cluster.num_nodes,
        config.cluster.ranks_per_node,
        config.training_recipe.global_batch_size,
    )
    what = f"groups is {groups}, but must be 1 or more"
    yield groups < 1, what, "parallel.groups", "set parallel.groups to 1 or more"
    size = max(1, groups)
    is_even = nodes % size == 0 or (size % nodes == 0 and per_node % (size // nodes) == 0)
    what = f"{counted(nodes, 'node')} of {counted(per_node, 'rank')} cannot be split into {groups} equal groups"
    possible = sorted({*divisors(nodes), *(nodes * number for number in divisors(per_node))})
    yield (
        not is_even,
        what,
        "parallel.groups",
        f"set parallel.groups to one of {', '.join(map(str, possible))}",
    )
    what = f"a global batch of {counted(gbs, 'sample')} cannot be split equally over {groups} groups"
    where, fix = "recipe.global_batch_size, parallel.groups", f"set recipe.global_batch_size to a multiple of {groups}"
    yield gbs % size != 0, what, where, fix
    where = "distributed_optimizer"
    what = f"local SGD groups exchange shards of the distributed optimizer, but parallel.{where} is false"
    fix = f"set parallel.{where}=true"
    yield not config.parallel.distributed_optimizer, what, f"parallel.{where}", fix


def _run(config: Config) -> Iterator[Refusal]:
    name, training, local_sgd = config.engine.name, config.training, config.training_recipe.averaging
    is_here = config.cluster.backend is BackendName.local and config.container.runtime is Runtime.none
    what = "recipe.local_sgd.restarts needs cluster=local without a container: only there a single group can restart"
    has_restarts = local_sgd is not None and bool(local_sgd.restarts)
    fix = "set recipe.local_sgd.restarts=null; `runstop resume` restarts all groups"
    yield has_restarts and not is_here, what, "recipe.local_sgd.restarts", fix
    what = f"engine={name.name} does not support local SGD"
    yield name is not EngineName.megatron, what, "engine, recipe.local_sgd", "choose engine=megatron"
    what = f"the rules of {config.task.benchmark} do not allow local SGD"
    yield config.task.benchmark is not None, what, "task.benchmark", "set task.benchmark=null"
    what = "local SGD runs a fixed number of steps, but the task has a target loss"
    where = "task.training.target_eval_loss"
    yield training.has_target, what, where, f"set {where}=null"
