"""Decide whether a CUDA graph or the host launches the kernels of a micro-batch."""

import dataclasses

from bench.contract.plan import Cost, Memory
from bench.contract.schema import Config
from bench.planning.estimates import memory
from bench.planning.layouts import Layout, with_micro_batch


def is_chosen(config: Config, layout: Layout) -> bool:
    """Return whether the GPU would wait for the host, and the engine can capture the passes of this layout.

    It cannot capture collectives, full recomputation (which restores the generators' states), activation offloading, or
    a document mask: a graph replays fixed arguments, but the documents differ between micro-batches. No wait is
    estimated for megatron-core's layers.
    """
    w, cost = layout.world, layout.cost
    can_capture = w.tp == w.pp == w.cp == 1 and not layout.recompute.full
    can_capture &= not layout.recompute.offloaded_layers and not config.training_data.document_mask
    return can_capture and cost is not None and cost.host_s > 0


def without_waiting(cost: Cost) -> Cost:
    """Return the cost of a step in which the GPU does not wait for the host."""
    return dataclasses.replace(cost, host_s=0.0, step_s=cost.step_s - cost.host_s)


def memory_of(config: Config, layout: Layout) -> Memory:
    """Return the memory of a layout whose passes a CUDA graph launches."""
    sized = with_micro_batch(config, layout.micro_batch_size)
    return memory.estimate(sized, layout.world, layout.recompute, has_graph=True)
