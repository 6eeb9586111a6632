"""Refuse parallel.groups and recipe.local_sgd where nothing uses them, and settings by which nothing can be trained."""

from collections.abc import Iterator
from dataclasses import asdict

from bench.contract.local_sgd import Average, LocalSgd
from bench.contract.schema import BackendName, Config, EngineName, Runtime
from bench.errors import ConfigError

Refusal = tuple[bool, str, str, str]
"""Whether it holds, what is refused, the keys, and what helps."""


def check(config: Config) -> None:
    """Refuse groups without what they are for, and local SGD without groups or with settings that contradict it.

    Raises:
        ConfigError: with the first of them.
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
    what = (
        f"{', '.join(f'recipe.local_sgd.{name}' for name in changed)} is set, and not after how many steps groups are "
    )
    what += "merged"
    fix = "say how often: recipe.local_sgd.every_steps=100"
    yield bool(changed) and local_sgd is None, what, "recipe.local_sgd.every_steps", fix
    what = f"{groups} groups, and recipe.local_sgd.every_steps, by which they would train apart, is null"
    fix = "leave parallel.groups out, or set recipe.local_sgd.every_steps=100, or choose a task such as "
    fix += "pretrain_tiny_apart"
    yield groups is not None and local_sgd is None, what, "parallel.groups", fix
    what, where = "recipe.local_sgd is given, and there are no groups that would train apart", "recipe.local_sgd"
    yield local_sgd is not None and groups is None, what, f"{where}, parallel.groups", "set parallel.groups=2"


def _settings(local_sgd: LocalSgd) -> Iterator[Refusal]:
    here, every = "recipe.local_sgd", local_sgd.interval
    yield every < 1, f"a merge every {every} steps", f"{here}.every_steps", "use 1 or more"
    what = f"a merge that overlaps with {local_sgd.overlap_steps} steps, and the next one after {every}"
    yield not 0 <= local_sgd.overlap_steps < every, what, f"{here}.overlap_steps", f"use 0 to {max(0, every - 1)}"
    yield not local_sgd.outer_lr > 0, f"{local_sgd.outer_lr:g} is not above 0", f"{here}.outer_lr", "DiLoCo uses 0.7"
    momentum = local_sgd.outer_momentum
    yield not 0 <= momentum < 1, f"{momentum:g} is not in [0, 1)", f"{here}.outer_momentum", "DiLoCo uses 0.9"
    is_mean = local_sgd.average is Average.parameters
    what = f"the mean of the weights has no outer step, and outer_lr is {local_sgd.outer_lr:g}, momentum {momentum:g}"
    where, fix = f"{here}.average", "set average=nesterov, or outer_lr=1 and outer_momentum=0"
    yield is_mean and (local_sgd.outer_lr, momentum) != (1.0, 0.0), what, where, fix
    restarts = local_sgd.restarts
    yield restarts is not None and restarts < 0, f"{restarts} restarts", f"{here}.restarts", "use 0 or more, or null"
    for name in ("time_limit_s", "step_time_s"):
        value = getattr(local_sgd, name)
        yield value is not None and not value > 0, f"{value} is not above 0", f"{here}.{name}", "use seconds above 0"


def _ranks(config: Config, groups: int) -> Iterator[Refusal]:
    nodes, per_node, gbs = (
        config.cluster.num_nodes,
        config.cluster.ranks_per_node,
        config.training_recipe.global_batch_size,
    )
    yield groups < 1, f"{groups} groups", "parallel.groups", "use 1 or more"
    size = max(1, groups)
    is_even = nodes % size == 0 or (size % nodes == 0 and per_node % (size // nodes) == 0)
    what = f"{nodes} nodes of {per_node} ranks are not {groups} groups of whole nodes, or of equal shares of a node"
    yield not is_even, what, "parallel.groups", "make the groups divide the nodes, or a node's ranks"
    what = f"a batch of {gbs} samples has no equal shares for {groups} groups"
    yield gbs % size != 0, what, "recipe.global_batch_size, parallel.groups", f"make it a multiple of {groups}"
    what, where = "groups that train apart exchange the shards of the distributed optimizer", "distributed_optimizer"
    fix = f"set parallel.{where}=true"
    yield not config.parallel.distributed_optimizer, what, f"parallel.{where}", fix


def _run(config: Config) -> Iterator[Refusal]:
    name, training, local_sgd = config.engine.name, config.training, config.training_recipe.averaging
    is_here = config.cluster.backend is BackendName.local and config.container.runtime is Runtime.none
    what = "only on this machine, without a container, are single groups started again"
    is_asked = local_sgd is not None and bool(local_sgd.restarts)
    fix = "set it to null; `runstop resume` starts all groups"
    yield is_asked and not is_here, what, "recipe.local_sgd.restarts", fix
    what = f"engine={name.name} knows no groups that train apart"
    yield name is not EngineName.megatron, what, "engine, recipe.local_sgd", "choose engine=megatron"
    what = f"{config.task.benchmark} has no rules for groups that train apart"
    yield config.task.benchmark is not None, what, "task.benchmark", "set task.benchmark=null"
    what = "groups that train apart stop after their last step, and the task has a target"
    where = "task.training.target_eval_loss"
    yield training.has_target, what, where, f"set {where}=null"
