"""Decide whether a CUDA graph or the host launches the kernels of a micro-batch."""

from bench.contract.plan import Cost, Memory
from bench.contract.schema import Config
from bench.errors import ConfigError
from bench.planning.estimates import memory, step_time
from bench.planning.estimates.step_time import layer_launches
from bench.planning.layouts import Layout, with_micro_batch


def is_chosen(config: Config, layout: Layout) -> bool:
    """Return whether a graph is used: as recipe.cuda_graph says, else if the GPU would wait for the host and it fits.

    Collectives between nodes were never captured here, so that only recipe.cuda_graph=true captures them.

    Raises:
        ConfigError: recipe.cuda_graph is true, and this layout cannot be captured.
    """
    wanted, cost = config.training_recipe.cuda_graph, layout.cost
    if wanted and not can_capture(config, layout):
        raise ConfigError(
            "recipe.cuda_graph is true, but a CUDA graph is not possible with this plan",
            where="recipe.cuda_graph",
            fix="remove recipe.cuda_graph=true. A CUDA graph needs engine=megatron, cluster.gpu.rates and "
            "parallel.pp=1. Full recomputation, offloaded activations and a document mask prevent a CUDA graph",
        )
    if wanted is not None:
        return wanted
    world = layout.world
    waits = cost is not None and cost.host_s > 0 and world.tp * world.cp <= world.ranks_per_node
    return waits and can_capture(config, layout) and memory_of(config, layout).fits is not False


def can_capture(config: Config, layout: Layout) -> bool:
    """Return whether the engine can capture the passes of this layout; those of tp and cp with their collectives.

    It cannot capture a pipeline schedule, full recomputation (which restores the generators' states), activation
    offloading, or a document mask: a graph replays fixed arguments, but the documents differ between micro-batches. No
    wait is estimated for megatron-core's layers, which are not captured.
    """
    w = layout.world
    return (
        w.pp == 1
        and config.nemo is None
        and layout.cost is not None
        and layer_launches(config, w) > 0
        and not layout.recompute.full
        and not layout.recompute.offloaded_layers
        and not config.training_data.document_mask
    )


def cost_of(config: Config, layout: Layout) -> Cost | None:
    """Return the cost of a layout whose passes a CUDA graph launches: the GPU does not wait for the host."""
    sized = with_micro_batch(config, layout.micro_batch_size)
    return step_time.estimate(sized, layout.world, layout.recompute, is_captured=True)


def memory_of(config: Config, layout: Layout) -> Memory:
    """Return the memory of a layout whose passes a CUDA graph launches."""
    sized = with_micro_batch(config, layout.micro_batch_size)
    return memory.estimate(sized, layout.world, layout.recompute, has_graph=True)
