"""Plan local SGD: the config of one group, and the estimated cost and gain of averaging weights.

Averaging the weights every H steps of t seconds takes X seconds; `overlap_steps` steps run meanwhile:

    efficiency      = H t / (H t + max(0, X - overlap t)), with X itself where the averaged model is used at once
    X               = 2 (n - 1) / n * numbers of a rank * bytes of a number / (cluster.network_gbs * share of TCP)

One of n groups alone needs n t for the same batch, so n groups are faster than one where H t + X < n H t, which is
above H = X / ((n - 1) t). Synchronous training of all ranks takes s seconds a step, its gradients over the same
network included: it is slower where H t + X < H s, which is above H = X / (s - t).
"""

from dataclasses import replace

from bench.contract.local_sgd import BYTES, LocalSgd, Prediction
from bench.contract.plan import Evaluation, World
from bench.contract.schema import Config
from bench.errors import ConfigError
from bench.planning import layouts
from bench.planning.estimates import transports
from bench.planning.estimates.activations import BYTES as WEIGHT_BYTES
from bench.planning.estimates.memory import MAIN_GRADIENT_BYTES
from bench.planning.layouts import Layout


def of_one_group(config: Config) -> Config:
    """Return the config of one group alone, with its share of nodes, ranks and batch."""
    groups = config.parallel.groups
    if groups is None or config.training_recipe.averaging is None:
        return config
    nodes = config.cluster.num_nodes
    of_group = max(1, nodes // groups)
    cluster = replace(
        config.cluster, num_nodes=of_group, ranks_per_node=nodes * config.cluster.ranks_per_node // groups // of_group
    )
    recipe = replace(
        config.training_recipe,
        global_batch_size=config.training_recipe.global_batch_size // groups,
        local_sgd=LocalSgd(),
    )
    return replace(config, cluster=cluster, recipe=recipe, parallel=replace(config.parallel, groups=None))


def whole(world: World, config: Config) -> World:
    """Return the ranks of all groups; `world` is the split of each group."""
    if config.training_recipe.averaging is None:
        return world
    nodes, per_node = config.cluster.num_nodes, config.cluster.ranks_per_node
    groups = config.parallel.groups
    return replace(world, num_nodes=nodes, ranks_per_node=per_node, num_ranks=nodes * per_node, groups=groups)


def check_evaluations(config: Config, at_steps: list[int], max_steps: int) -> None:
    """Refuse an evaluation between two weight averagings: only the averaged model is evaluated.

    Raises:
        ConfigError: for the first such step.
    """
    if config.training_recipe.averaging is None:
        return
    every = config.training_recipe.averaging.interval
    between = next((step for step in at_steps if step % every and step != max_steps), None)
    if between is not None:
        interval = every * config.training_recipe.global_batch_size
        raise ConfigError(
            f"the evaluation after step {between} needs averaged weights, but local SGD averages the weights only "
            f"every {every} steps",
            where="recipe.eval_every_samples, recipe.local_sgd.every_steps",
            fix=f"set recipe.eval_every_samples to a multiple of {interval}; or, to evaluate only at the end, set "
            f"recipe.eval_every_samples to {max_steps * interval // every}",
        )


def predict(config: Config, layout: Layout, evaluation: Evaluation, max_steps: int) -> Prediction | None:
    """Return the estimate for local SGD; None without groups. `layout` is that of one group."""
    local_sgd, groups = config.training_recipe.averaging, config.parallel.groups
    if local_sgd is None or groups is None:
        return None
    numbers = layout.memory.rank_trainable_parameters / (layout.world.dp * layout.world.cp)
    sent = 2 * (groups - 1) / groups * numbers * BYTES[local_sgd.compress]
    network_gbs, cost = exchange_gbs(config), layout.cost
    exchange_s = None if network_gbs is None else sent / network_gbs / 1e9
    step_s = local_sgd.step_time_s or (cost.step_s if cost else None)
    synchronous_s = _synchronous_s(config, layout, step_s) if groups > 1 else step_s
    averagings, waiting = _averagings(config, evaluation, max_steps)
    efficiency = None
    if step_s is not None and exchange_s is not None:
        exposed_s = max(0.0, exchange_s - local_sgd.overlap_steps * step_s)
        stopped_s = waiting * exchange_s + (averagings - waiting) * exposed_s
        efficiency = max_steps * step_s / (max_steps * step_s + stopped_s)
    return Prediction(
        num_averagings=averagings,
        rank_bytes=sent,
        exchange_s=exchange_s,
        step_s=step_s,
        efficiency=efficiency,
        synchronous_step_s=synchronous_s,
        break_even_one_group=_break_even(exchange_s, step_s and (groups - 1) * step_s),
        break_even_synchronous=_break_even(exchange_s, synchronous_s and step_s and synchronous_s - step_s),
    )


def exchange_gbs(config: Config) -> float | None:
    """Return the rate at which a rank averages its weights, which go over TCP; None without cluster.network_gbs."""
    network_gbs = config.cluster.network_gbs
    return None if network_gbs is None else network_gbs * transports.load(transports.SOCKETS).share


def _averagings(config: Config, evaluation: Evaluation, max_steps: int) -> tuple[int, int]:
    """Return the number of weight averagings, and of those that cannot overlap since the result is used at once."""
    local_sgd, saved = config.training_recipe.averaging, config.training.checkpoint_every_steps
    assert local_sgd is not None
    steps = {*range(local_sgd.interval, max_steps + 1, local_sgd.interval), max_steps}
    used = {max_steps, *evaluation.at_steps, *(range(saved, max_steps, saved) if saved else ())}
    return len(steps), len(steps & used)


def _break_even(exchange_s: float | None, saved_s: float | None) -> float | None:
    """Return the steps after which the time saved per step pays for one weight averaging; None if none is saved."""
    return exchange_s / saved_s if exchange_s is not None and saved_s and saved_s > 0 else None


def _synchronous_s(config: Config, layout: Layout, step_s: float | None) -> float | None:
    """Return the time of a synchronous step of all ranks.

    With a measured step time: that time, plus the time to send gradients and new weights over the network. Otherwise
    the estimate of the fastest synchronous layout.
    """
    local_sgd, network = config.training_recipe.averaging, transports.between_nodes(config)
    assert local_sgd is not None
    if local_sgd.step_time_s is None:
        alone = replace(config.training_recipe, local_sgd=LocalSgd())
        cost = layouts.choose(replace(config, recipe=alone, parallel=replace(config.parallel, groups=None))).cost
        return cost.step_s if cost else None
    if step_s is None or network is None:
        return None
    world = layout.world
    replicas = world.dp * world.cp * (config.parallel.groups or 1)
    sent = (replicas - 1) / replicas * layout.memory.rank_trainable_parameters
    cards = max(1, min(config.cluster.ranks_per_node // world.tp, world.dp * world.cp))
    return step_s + sent * (MAIN_GRADIENT_BYTES + WEIGHT_BYTES[config.precision]) / cards / network.gbs / 1e9
