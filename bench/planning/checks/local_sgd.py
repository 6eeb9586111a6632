"""Refuse parallel.groups or recipe.local_sgd without the other, and invalid settings of local SGD."""

from collections.abc import Iterator
from dataclasses import asdict

from bench.contract.local_sgd import Average, LocalSgd
from bench.contract.schema import BackendName, Config, EngineName, Runtime
from bench.errors import ConfigError

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
    what = f"{keys} is set, but recipe.local_sgd.every_steps is null"
    fix = "set the inner steps between weight averagings, for example recipe.local_sgd.every_steps=100"
    yield bool(changed) and local_sgd is None, what, "recipe.local_sgd.every_steps", fix
    what = f"{groups} groups need local SGD, but recipe.local_sgd.every_steps is null"
    fix = "remove parallel.groups, set recipe.local_sgd.every_steps=100, or choose a task such as "
    fix += "pretrain_tiny_local_sgd"
    yield groups is not None and local_sgd is None, what, "parallel.groups", fix
    what, where = "recipe.local_sgd is set, but parallel.groups is null: local SGD needs groups", "recipe.local_sgd"
    yield local_sgd is not None and groups is None, what, f"{where}, parallel.groups", "set parallel.groups=2"


def _settings(local_sgd: LocalSgd) -> Iterator[Refusal]:
    here, every = "recipe.local_sgd", local_sgd.interval
    yield every < 1, f"every_steps={every} is less than 1", f"{here}.every_steps", "use 1 or more"
    what = f"overlap_steps={local_sgd.overlap_steps} must be less than every_steps={every}, and not negative"
    yield not 0 <= local_sgd.overlap_steps < every, what, f"{here}.overlap_steps", f"use 0 to {max(0, every - 1)}"
    yield (
        not local_sgd.outer_lr > 0,
        f"outer_lr={local_sgd.outer_lr:g} must be greater than 0",
        f"{here}.outer_lr",
        "DiLoCo uses 0.7",
    )
    momentum = local_sgd.outer_momentum
    yield (
        not 0 <= momentum < 1,
        f"outer_momentum={momentum:g} must be in [0, 1)",
        f"{here}.outer_momentum",
        "DiLoCo uses 0.9",
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
        "use 0 or more, or null",
    )
    for name in ("time_limit_s", "step_time_s"):
        value = getattr(local_sgd, name)
        yield (
            value is not None and not value > 0,
            f"{name}={value} must be greater than 0",
            f"{here}.{name}",
            "set a number of seconds greater than 0",
        )


def _ranks(config: Config, groups: int) -> Iterator[Refusal]:
    nodes, per_node, gbs = (
        config.cluster.num_nodes,
        config.cluster.ranks_per_node,
        config.training_recipe.global_batch_size,
    )
    yield groups < 1, f"groups={groups} is less than 1", "parallel.groups", "use 1 or more"
    size = max(1, groups)
    is_even = nodes % size == 0 or (size % nodes == 0 and per_node % (size // nodes) == 0)
    what = f"{nodes} nodes of {per_node} ranks cannot be split into {groups} groups of whole or equally divided nodes"
    yield (
        not is_even,
        what,
        "parallel.groups",
        "use a divisor of the number of nodes, or a multiple of it that divides the ranks of a node",
    )
    what = f"a global batch of {gbs} samples cannot be split equally over {groups} groups"
    yield gbs % size != 0, what, "recipe.global_batch_size, parallel.groups", f"make it a multiple of {groups}"
    what, where = "local SGD groups exchange shards of the distributed optimizer, which is off", "distributed_optimizer"
    fix = f"set parallel.{where}=true"
    yield not config.parallel.distributed_optimizer, what, f"parallel.{where}", fix


def _run(config: Config) -> Iterator[Refusal]:
    name, training, local_sgd = config.engine.name, config.training, config.training_recipe.averaging
    is_here = config.cluster.backend is BackendName.local and config.container.runtime is Runtime.none
    what = "a single group can only be restarted on cluster=local without a container"
    has_restarts = local_sgd is not None and bool(local_sgd.restarts)
    fix = "set it to null; `runstop resume` restarts all groups"
    yield has_restarts and not is_here, what, "recipe.local_sgd.restarts", fix
    what = f"engine={name.name} does not support local SGD"
    yield name is not EngineName.megatron, what, "engine, recipe.local_sgd", "choose engine=megatron"
    what = f"the rules of {config.task.benchmark} do not allow local SGD"
    yield config.task.benchmark is not None, what, "task.benchmark", "set task.benchmark=null"
    what = "local SGD runs a fixed number of steps, but the task has a target loss"
    where = "task.training.target_eval_loss"
    yield training.has_target, what, where, f"set {where}=null"
