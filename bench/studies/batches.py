"""The largest micro-batch that fits: found by the plan, proven by a run, and lowered where a run is out of memory."""

from bisect import bisect_left
from dataclasses import replace

from bench.contract.plan import World
from bench.contract.schema import Config
from bench.planning import layouts


def candidates(config: Config, *, limit: int) -> tuple[int, ...]:
    """Return the micro-batches to try, largest first: what the plan says fits, then each an eighth smaller.

    The first one is 1 if the plan says that nothing fits, which planning then refuses with its reason.
    """
    world = _world(config)
    sizes = range(1, limit + 1)
    first = max(1, bisect_left(sizes, True, key=lambda size: not _fits(config, world, size)))
    found = [first]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // 8))
    return tuple(found)


def overrides(config: Config, size: int) -> list[str]:
    """Return the overrides of runs with this micro-batch: every replica computes one for each pipeline stage."""
    w = _world(config)
    split = [f"parallel.{axis}={getattr(w, axis)}" for axis in ("tp", "pp", "cp")] + [
        f"parallel.sp={str(w.sp).lower()}"
    ]
    return [*split, f"recipe.micro_batch_size={size}", f"recipe.global_batch_size={_global(w, size)}"]


def _global(world: World, size: int) -> int:
    return size * world.dp * world.pp


def _world(config: Config) -> World:
    """Return how the ranks are split; where the config leaves that open, as is best for micro-batches of one."""
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    recipe = replace(config.recipe, micro_batch_size=1, global_batch_size=num_ranks)
    return layouts.choose(replace(config, recipe=recipe)).world


def _fits(config: Config, world: World, size: int) -> bool:
    recipe = replace(config.recipe, micro_batch_size=size, global_batch_size=_global(world, size))
    split = replace(config.parallel, tp=world.tp, pp=world.pp, cp=world.cp, sp=world.sp)
    return layouts.choose(replace(config, recipe=recipe, parallel=split)).memory.fits is not False
