"""Choose how to split the ranks of a cluster: the fastest layout that fits by the plan's own estimates.

Values of parallel.tp, pp, cp and sp in the config are kept; those that are null are chosen here.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.contract.plan import Cost, Memory, Recomputed, World
from bench.contract.schema import Config
from bench.errors import ConfigError
from bench.planning.estimates import huggingface_memory, memory, step_time
from bench.planning.parallelism import check, divisors, split

CHOSEN = ("tp", "pp", "cp", "sp")
MOST_TOKENS = 65_536
"""Upper limit for one micro-batch on one rank when the plan chooses its size: more tokens make no GEMM faster. Assumed;
GPT-3 126M was measured with this many, docs/results/2026-11-22-training.md."""
LEAST_GAIN = 0.01
"""The share of the step time that a micro-batch with recomputation must save over one without. Assumed; estimates
differ from measured steps by up to 4.5 %, so smaller differences mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A legal split of the ranks, with its estimated memory and step time."""

    world: World
    micro_batch_size: int
    recompute: Recomputed
    memory: Memory
    cost: Cost | None


def choose(config: Config) -> Layout:
    """Return the fastest layout that fits; if no step time can be estimated, the simplest layout that fits.

    If no layout fits, this returns the one that needs the least memory.

    Raises:
        ConfigError: no layout is legal; the message says why the simplest one is not.
    """
    return ranked(config)[0]


def ranked(config: Config) -> list[Layout]:
    """Return every legal layout, best first: layouts that fit by step time, then the others by memory.

    Raises:
        ConfigError: no layout is legal, or a program of engine=command splits its ranks itself.
    """
    if config.program is not None:
        raise ConfigError(
            "runstop cannot choose a layout for engine=command: the program itself splits the model over its ranks",
            where="engine, parallel",
            fix="set parallel.tp, parallel.pp and parallel.cp, or choose engine=megatron",
        )
    layouts, first_error, sized = [], None, dict[int, Config]()
    splits_share = memory.gpu(config) is not None  # else the memory is unknown
    for world in splits(config):
        of_world = []
        for size in micro_batch_sizes(config, world, splits_share=splits_share):
            if size not in sized:
                sized[size] = with_micro_batch(config, size)
            try:
                check(sized[size], world)
            except ConfigError as error:
                first_error = first_error or error
            else:
                of_world.append(layout_of(sized[size], world))
        layouts += [_best_size(of_world)] if of_world else []
    if not layouts:
        assert first_error is not None
        raise first_error
    return sorted(layouts, key=_rank)


def with_micro_batch(config: Config, size: int) -> Config:
    return replace(config, recipe=replace(config.training_recipe, micro_batch_size=size))


def micro_batch_sizes(config: Config, world: World, *, splits_share: bool) -> list[int]:
    """Return the micro-batch sizes to try, largest first: the config's, else the divisors of a replica's share.

    The divisors have up to MOST_TOKENS tokens. Without splits_share, this is the whole share.
    """
    whole = config.training_recipe.micro_batch(max(1, world.dp))  # 0 replicas are refused by `check`
    if config.training_recipe.micro_batch_size is not None or not splits_share:
        return [whole]
    most = max(1, MOST_TOKENS * world.cp // config.training_data.seq_length)
    return [size for size in reversed(divisors(whole)) if size <= most]


def _best_size(layouts: list[Layout]) -> Layout:
    """Return the best of several layouts that differ only in the micro-batch size.

    This is the fastest that fits; one with recomputation must be faster by LEAST_GAIN than those without. If no step
    time can be estimated, it is the largest that fits, preferably without recomputation.
    """
    best = min(layouts, key=_rank)
    if best.memory.fits is False:
        return best
    if best.cost is None:
        return min(layouts, key=lambda one: (one.memory.fits is False, one.recompute.full))
    limit_s = (1 + LEAST_GAIN) * best.cost.step_s
    plain = [one for one in layouts if one.memory.fits and one.recompute == memory.NOTHING]
    return min((one for one in plain if one.cost and one.cost.step_s <= limit_s), key=_rank, default=best)


def layout_of(config: Config, world: World, recomputed: Recomputed | None = None) -> Layout:
    """Return a layout with the estimates for the config's engine; step times of Hugging Face are not estimated.

    recomputed: what `memory.recompute` returns for this config, if the caller has it.
    """
    is_huggingface = config.huggingface is not None
    estimator = huggingface_memory if is_huggingface else memory
    recomputed = recomputed or estimator.recompute(config, world)
    return Layout(
        world=world,
        micro_batch_size=config.training_recipe.micro_batch(world.dp),
        recompute=recomputed,
        memory=estimator.estimate(config, world, recomputed),
        cost=None if is_huggingface else step_time.estimate(config, world, recomputed),
    )


def splits(config: Config) -> Iterator[World]:
    """Yield the splits that the config allows, simplest first: tp increases before cp, and cp before pp."""
    p, num_ranks = config.parallel, config.cluster.num_nodes * config.cluster.ranks_per_node
    sizes = divisors(num_ranks)
    if config.huggingface is not None:
        sizes = [1]
    pps, cps, tps = ([size] if size is not None else sizes for size in (p.pp, p.cp, p.tp))
    for pp, cp, tp in itertools.product(pps, cps, tps):
        for sp in [p.sp] if p.sp is not None else [True, False] if tp > 1 else [False]:
            yield split(config, tp=tp, pp=pp, cp=cp, sp=sp)


def _rank(layout: Layout) -> tuple[bool, float]:
    if layout.memory.fits is False:
        return True, layout.memory.total_gib
    return False, layout.cost.step_s if layout.cost else 0.0
