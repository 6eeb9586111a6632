"""Enumerate the settings of a training task that do the same work and fit into memory, ranked by their estimated step.

Settings are the split over ranks (tp, cp, pp, sp; the rest is dp), the micro-batch, recomputation, a CUDA graph, and
the chunks of a pipeline stage (vpp).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.contract.plan import Memory, World
from bench.contract.schema import Config
from bench.contract.training import Recompute
from bench.errors import ConfigError
from bench.planning import layouts
from bench.planning.estimates import cuda_graph, memory
from bench.planning.layouts import Layout
from bench.planning.parallelism import check, divisors, num_microbatches
from bench.prediction import uncertainty
from bench.prediction.search import MOST_CHUNKS, MOST_CONTEXT, MOST_PIPELINE
from bench.results.tuning import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One candidate before its name and rank."""

    layout: Layout
    recompute: Recompute
    graph: bool | None
    """None: the layout cannot be captured, or its step cannot be estimated."""
    memory: Memory
    step_s: float | None
    waits_for_host: bool
    num_microbatches: int


def ranked(config: Config, *, fixed: Collection[str] = ()) -> list[Candidate]:
    """Return the settings that fit, fastest first; `fixed` are the keys whose values in the config are kept.

    Without estimated steps, settings without recomputation come first; then those whose pipeline idles least, those
    with the fewest micro-batches, and those with the simplest split.

    Raises:
        ConfigError: no settings are legal, or none fits.
    """
    config = _free(config, fixed)
    every, error, worlds = [], None, list(_worlds(config, fixed))
    possible = [world for world in worlds if _divides(config, world)]
    for world in possible or worlds[:1]:
        try:
            every += list(_of_world(config, world, fixed))
        except ConfigError as wrong:
            error = error or wrong
    if not every:
        assert error is not None
        raise error
    fitting = [one for one in every if one.memory.fits is not False]
    if not fitting:
        least = min(every, key=lambda one: one.memory.total_gib)
        raise ConfigError(
            "no settings fit into the memory of a GPU: the settings that need the least memory "
            f"({_name(least)}) need {least.memory.total_gib:.1f} GiB, but a GPU has "
            f"{least.memory.capacity_gib or 0:.1f} GiB",
            where="cluster, model, recipe.global_batch_size",
            fix="use more or larger GPUs, another precision, or a smaller model",
        )
    return [_candidate(one, place) for place, one in enumerate(sorted(fitting, key=_order), start=1)]


def _free(config: Config, fixed: Collection[str]) -> Config:
    """Return the config without its values of the keys that are varied."""
    p, recipe = config.parallel, config.training_recipe
    splits: dict[str, Any] = {name: None for name in ("tp", "pp", "cp", "sp") if f"parallel.{name}" not in fixed}
    names = ("micro_batch_size", "cuda_graph")
    of_recipe: dict[str, Any] = {name: None for name in names if f"recipe.{name}" not in fixed}
    return replace(config, parallel=replace(p, **splits), recipe=replace(recipe, **of_recipe))


def _worlds(config: Config, fixed: Collection[str]) -> Iterator[World]:
    """Yield the splits, each with every number of chunks that divides its layers."""
    for world in layouts.splits(config):
        if (world.cp > MOST_CONTEXT and "parallel.cp" not in fixed) or (
            world.pp > MOST_PIPELINE and "parallel.pp" not in fixed
        ):
            continue
        if "parallel.vpp" in fixed or world.pp == 1:
            yield world if "parallel.vpp" in fixed else replace(world, vpp=1)
            continue
        layers = config.model.num_layers // world.pp
        for vpp in divisors(layers) if layers else ():
            if vpp <= MOST_CHUNKS:
                yield replace(world, vpp=vpp)


def _divides(config: Config, world: World) -> bool:
    """Return whether a split can be legal; `check` says why not. Most splits of many ranks cannot, and this is fast."""
    w, model = world, config.model
    return (
        w.num_ranks % (w.tp * w.pp * w.cp) == 0
        and w.tp <= w.ranks_per_node
        and model.num_query_groups % w.tp == 0
        and model.num_layers % (w.pp * w.vpp) == 0
        and config.training_recipe.global_batch_size % w.dp == 0
    )


def _of_world(config: Config, world: World, fixed: Collection[str]) -> Iterator[_Setting]:
    """Yield the settings of a split.

    Raises:
        ConfigError: no micro-batch is legal with this split.
    """
    config = replace(config, parallel=replace(config.parallel, vpp=world.vpp))
    error, is_any = None, False
    for size in layouts.micro_batch_sizes(config, world, splits_share=True):
        sized = layouts.with_micro_batch(config, size)
        try:
            check(sized, world)
        except ConfigError as wrong:
            error = error or wrong
            continue
        is_any = True
        seen = []
        modes = [Recompute.none, Recompute.fit, Recompute.full]
        for mode in [sized.training_recipe.recompute] if "recipe.recompute" in fixed else modes:
            recomputing = replace(sized, recipe=replace(sized.training_recipe, recompute=mode))
            recomputed = memory.recompute(recomputing, world)
            if recomputed not in seen:  # fit equals none if everything fits, and full if nothing less does
                seen.append(recomputed)
                yield from _launched(recomputing, layouts.layout_of(recomputing, world, recomputed), mode, fixed)
    if not is_any and error is not None:
        raise error


def _launched(config: Config, layout: Layout, mode: Recompute, fixed: Collection[str]) -> Iterator[_Setting]:
    """Yield a layout without a CUDA graph, and with one if it can be captured."""
    waiting = uncertainty.waiting(layout.world.num_ranks, layout.world.tp * layout.world.pp * layout.world.cp)
    can_capture = cuda_graph.can_capture(config, layout)
    choices: list[bool | None] = [True, False] if can_capture else [None]
    if "recipe.cuda_graph" in fixed and config.training_recipe.cuda_graph is not None:
        choices = [one for one in choices if bool(one) is config.training_recipe.cuda_graph]
    for graph in choices:
        cost, needed = layout.cost, layout.memory
        if graph and cost is not None:
            cost, needed = cuda_graph.cost_of(config, layout), cuda_graph.memory_of(config, layout)
        step_s = None if cost is None else waiting * cost.step_s
        yield _Setting(
            layout=layout,
            recompute=mode,
            graph=graph,
            memory=needed,
            step_s=step_s,
            waits_for_host=cost is not None and cost.host_s > 0,
            num_microbatches=num_microbatches(config, layout.world),
        )


def _order(one: _Setting) -> tuple[float, ...]:
    w = one.layout.world
    parts = w.tp * w.cp * w.pp * w.vpp - w.sp / 2  # simplest first: replicas alone; with tp also sp
    if one.step_s is not None:
        return one.step_s, one.graph is True, parts
    idle = (w.pp - 1) / (w.vpp * one.num_microbatches)
    return one.layout.recompute.full, idle, one.num_microbatches, parts


def _name(one: _Setting) -> str:
    w = one.layout.world
    sizes = {"dp": w.dp, "tp": w.tp, "cp": w.cp, "pp": w.pp, "vpp": w.vpp}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["dp 1"]
    parts += ["sp"] if w.sp else []
    parts.append(f"micro-batch {one.layout.micro_batch_size}")
    parts += [f"recompute {one.recompute.name}"] if one.recompute is not Recompute.none else []
    parts += ["graph"] if one.graph else []
    return " ".join(parts)


def _candidate(one: _Setting, place: int) -> Candidate:
    w = one.layout.world
    settings = {f"parallel.{name}": str(getattr(w, name)) for name in ("tp", "pp", "cp", "vpp")}
    settings["parallel.sp"] = str(w.sp).lower()
    settings["recipe.micro_batch_size"] = str(one.layout.micro_batch_size)
    settings["recipe.recompute"] = one.recompute.name
    if one.graph is not None:
        settings["recipe.cuda_graph"] = str(one.graph).lower()
    low_ms = high_ms = None
    if one.step_s is not None:
        errors = uncertainty.of_runstop(waits_for_host=one.waits_for_host)
        low_ms, high_ms = 1000 * errors.low * one.step_s, 1000 * errors.high * one.step_s
    return Candidate(
        rank=place,
        name=_name(one),
        overrides=tuple(f"{key}={value}" for key, value in settings.items()),
        memory_gib=one.memory.total_gib,
        capacity_gib=one.memory.capacity_gib,
        step_ms=None if one.step_s is None else 1000 * one.step_s,
        low_ms=low_ms,
        high_ms=high_ms,
    )
