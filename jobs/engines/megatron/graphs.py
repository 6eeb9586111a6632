"""Forward and backward pass of a micro-batch, each kernel launched by the host or all of them by one CUDA graph.

Small models, and rows of few tokens, are bound by the host: it launches a kernel in some 50 us, Python included. The
plan then has `cuda_graph`. The first micro-batch is computed as always, which compiles the kernels and allocates what
is kept, and then its pass is captured. Since then a micro-batch is copied into the captured one's tensors, and the
graph launches the same kernels again. Gradients are added to `main_grad`, as always; their reduction over replicas,
the optimizer and the evaluation are not captured.

A captured pass repeats its arguments, so what differs between micro-batches must lie in the device's memory: rows, and
the seeds of dropout. It may not call a collective, so tp, pp and cp are 1. Its activations stay allocated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from bench.contract.modules import Part, Phase
from bench.contract.plan_kinds import TrainingPlan
from jobs.engines.megatron.frozen.layer import Fp8Layer
from jobs.engines.megatron.linear_weights import DequantizedWeights, PrefetchedTransposes
from jobs.profiles.ranges import named


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: tensors [B, S / cp] of this rank's part of the sequence.

    The weights sum to 1 over the tokens of a row that count (to 0 over a row that only fills the batch), so that the
    loss is the mean over rows of each row's mean in every layout.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    position_ids: Tensor

    def summed(self, losses_BS: Tensor) -> Tensor:
        """Return the sum of the rows' losses in FP32, from those of their tokens."""
        return (losses_BS.float() * self.weights).sum()


Pass = Callable[[MicroBatch], Tensor]
"""Adds the gradients of a micro-batch to main_grad, and returns the sum of its rows' losses."""
Replay = Callable[[], None]
if TYPE_CHECKING:
    Pool: TypeAlias = torch.cuda._POOL_HANDLE
else:
    Pool = tuple[int, int]
"""Of the memory of graphs, as `torch.cuda.graph_pool_handle` names it."""
Prefetched = DequantizedWeights | PrefetchedTransposes


def training_pass(plan: TrainingPlan, chunk: DistributedDataParallel) -> Pass:
    """Return the pass of a plan without pipeline parallelism."""

    def run(batch: MicroBatch) -> Tensor:
        with named(Phase.forward):
            total = summed_loss(chunk, batch)
            mean = total / plan.batch.micro_batch_size * parallel_state.get_context_parallel_world_size()
        with named(Phase.backward):
            (mean / plan.batch.gradient_accumulation_steps).backward()
        return total.detach()

    def run_alone(batch: MicroBatch) -> Tensor:
        loss = run(batch)
        for weights in prefetched(chunk):
            weights.join()
        return loss

    return Captured(run_alone, Seeds(chunk), partial(prefetched, chunk)) if plan.cuda_graph else run


def summed_loss(chunk: DistributedDataParallel, batch: MicroBatch) -> Tensor:
    """Return the sum of the losses of the rows of a micro-batch."""
    losses_BS = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels)
    with named(Part.loss):
        return batch.summed(losses_BS)


def prefetched(chunk: torch.nn.Module) -> set[Prefetched]:
    """Return what prepares weights ahead, on a stream of its own; a captured pass must end with all streams joined.

    Each pass then prepares one weight that nothing asks for: the one that would come next.
    """
    frozen = (getattr(module, "weights", None) for module in chunk.modules())
    trained = (getattr(getattr(module, "linear_weights", None), "transposes", None) for module in chunk.modules())
    return {weights for weights in (*frozen, *trained) if isinstance(weights, Prefetched)}


class Seeds:
    """The seeds of dropout of all layers, in one tensor of the device's memory."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        layers = [module for module in chunk.modules() if isinstance(module, Fp8Layer)]
        self.seeds_L2 = torch.zeros(len(layers), 2, dtype=torch.int64, device=torch.cuda.current_device())
        for layer, seeds in zip(layers, self.seeds_L2, strict=True):
            layer.device_seeds = seeds

    def draw(self) -> None:
        """Draw those of a micro-batch: the numbers that its layers would draw one after the other."""
        if len(self.seeds_L2):
            self.seeds_L2.copy_(torch.randint(2**31, self.seeds_L2.shape, device="cpu"), non_blocking=True)


@contextmanager
def not_on_the_default_stream() -> Iterator[None]:
    """Let what autograd creates in the block use another stream than the default one, which cannot be captured.

    A weight's gradient is accumulated on the stream on which DistributedDataParallel asks autograd for the weight.
    """
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def captured(run: Callable[[], Tensor], pool: Pool | None = None) -> tuple[Replay, Tensor]:
    """Capture what `run` launches; return what launches it again, and the tensor that then has the new result.

    pool: graphs that share one use the same memory, so that each may overwrite the results of the others.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may go on using CUDA
        result = run()
    return graph.replay, result


class Captured:
    """A pass that is captured after its first micro-batch, and launched by one call since."""

    def __init__(self, run: Pass, seeds: Seeds, prefetched: Callable[[], set[Prefetched]]) -> None:
        self.run, self.seeds, self.prefetched = run, seeds, prefetched
        self.inputs: list[Tensor] = []

    def eager(self, batch: MicroBatch) -> Tensor:
        """Compute a pass without the graph."""
        self.seeds.draw()
        return self.run(batch)

    def __call__(self, batch: MicroBatch) -> Tensor:
        self.seeds.draw()
        new = [getattr(batch, field.name) for field in fields(MicroBatch)]
        if not self.inputs:
            loss = self.run(batch)
            self.inputs = [tensor.clone() for tensor in new]
            self.replay, self.loss = captured(lambda: self.run(MicroBatch(*self.inputs)))
            self.ahead = self.prefetched()
            return loss
        for held, tensor in zip(self.inputs, new, strict=True):
            held.copy_(tensor)
        self.replay()
        for weights in self.ahead:
            weights.forget()  # what an evaluation has prepared is not there any more
        return self.loss.clone()
