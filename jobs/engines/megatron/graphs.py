"""Forward and backward pass of a micro-batch: eager, or replayed as one CUDA graph.

Small models and short rows are bound by the host, which needs some 50 us to launch a kernel, Python included. The plan
then has `cuda_graph`. The first micro-batch runs eagerly, which compiles the kernels and allocates persistent memory;
then its pass is captured. Each later micro-batch is copied into the tensors of the captured one, and the graph launches
the same kernels again. Gradients are added to `main_grad` as in the eager pass. The reduction over replicas, the
optimizer and the evaluation are not captured.

A graph replays fixed arguments, so everything that differs between micro-batches must be in device memory: the rows,
and the seeds of dropout. Its activations stay allocated.

NCCL's collectives of tp and cp are captured, too. The eager micro-batch before has connected the communicators for the
same collectives, and each rank captures its pass after the same micro-batch. Asynchronous collectives run on a stream
that the capture joins when their results are awaited; all of them are, before the pass ends. torch does not watch
captured collectives for time-outs: a rank that waits for another one is ended by `jobs.ranks.watchdog` alone. NCCL does
not destroy a communicator while a graph with its collectives exists: see `process_group.shut_down`.

Sources: torch 2.11, ProcessGroupNCCL (collectives under capture are not enqueued for its watchdog); NCCL 2.28,
src/init.cc, commDestroySync (localPersistentRefs).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from bench.contract.layers import Layer, layer_of
from bench.contract.modules import Part, Phase
from bench.contract.plan_kinds import TrainingPlan
from jobs.engines.megatron.frozen.layer import Fp8Layer
from jobs.engines.megatron.linear_weights import DequantizedWeights, PrefetchedTransposes
from jobs.profiles.ranges import profile_range


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: tensors [B, S / cp] of this rank's part of the sequence.

    The weights of a row sum to 1 over the tokens that count (to 0 for a row that only fills the batch), so that the
    loss is the mean over rows of each row's mean in every layout.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    position_ids: Tensor
    documents: PackedSeqParams | None = None
    """With a document mask: the lengths of the documents (`attention.packed_seq_params`). A graph cannot have them."""

    def summed(self, losses_BS: Tensor) -> Tensor:
        """Return the sum of the rows' losses in FP32, from the losses of the tokens."""
        return (losses_BS.float() * self.weights).sum()


TrainingPass = Callable[[MicroBatch], Tensor]
"""Adds the gradients of a micro-batch to main_grad, and returns the sum of its rows' losses."""
Replay = Callable[[], None]
if TYPE_CHECKING:
    Pool: TypeAlias = torch.cuda._POOL_HANDLE
else:
    Pool = tuple[int, int]
"""A memory pool of graphs, as returned by `torch.cuda.graph_pool_handle`."""
Prefetcher = DequantizedWeights | PrefetchedTransposes


def training_pass(plan: TrainingPlan, chunk: DistributedDataParallel) -> TrainingPass:
    """Return the pass of a plan without pipeline parallelism."""

    cp, accumulation = parallel_state.get_context_parallel_world_size(), plan.batch.gradient_accumulation_steps
    experts = plan.config.model.experts
    generators = nullcontext if layer_of(plan.config) is Layer.megatron else _one_generator

    def run(batch: MicroBatch) -> Tensor:
        if experts is not None and experts.aux_loss_coef:
            scale = torch.full((), cp / accumulation, device=torch.cuda.current_device())
            MoEAuxLossAutoScaler.set_loss_scale(scale)
        with profile_range(Phase.forward):
            with generators():
                total = summed_loss(chunk, batch)
            mean = total / plan.batch.micro_batch_size * cp
        with profile_range(Phase.backward):
            (mean / accumulation).backward()
        return total.detach()

    def run_and_join(batch: MicroBatch) -> Tensor:
        loss = run(batch)
        for weights in prefetchers(chunk):
            weights.join()
        return loss

    return CapturedPass(run_and_join, DropoutSeeds(chunk), partial(prefetchers, chunk)) if plan.cuda_graph else run


@contextmanager
def _one_generator() -> Iterator[None]:
    """Keep megatron-core from changing CUDA's generator around layers with SP: hand-written ones do not draw from it.

    The state of a generator cannot be read during a capture.
    """
    tracker = get_cuda_rng_tracker()
    tracker.fork = nullcontext
    try:
        yield
    finally:
        del tracker.fork


def summed_loss(chunk: DistributedDataParallel, batch: MicroBatch) -> Tensor:
    """Return the sum of the losses of the rows of a micro-batch."""
    losses_BS = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.documents)
    with profile_range(Part.loss):
        return batch.summed(losses_BS)


def prefetchers(chunk: torch.nn.Module) -> set[Prefetcher]:
    """Return the prefetchers of weights, which use their own streams; a captured pass must end with all streams joined.

    Each captured pass prefetches one weight that is not used: the one that would come next.
    """
    frozen = (getattr(module, "weights", None) for module in chunk.modules())
    trained = (getattr(getattr(module, "linear_weights", None), "transposes", None) for module in chunk.modules())
    return {weights for weights in (*frozen, *trained) if isinstance(weights, Prefetcher)}


class DropoutSeeds:
    """The dropout seeds of all layers, in one tensor in device memory."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        layers = [module for module in chunk.modules() if isinstance(module, Fp8Layer)]
        self.seeds_L2 = torch.zeros(len(layers), 2, dtype=torch.int64, device=torch.cuda.current_device())
        for layer, seeds in zip(layers, self.seeds_L2, strict=True):
            layer.device_seeds = seeds

    def draw(self) -> None:
        """Draw the seeds of a micro-batch: the same numbers that its layers would draw one after another."""
        if len(self.seeds_L2):
            self.seeds_L2.copy_(torch.randint(2**31, self.seeds_L2.shape, device="cpu"), non_blocking=True)


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the block on a new stream, because the default stream cannot be captured.

    Autograd accumulates a weight's gradient on the stream on which DistributedDataParallel created its accumulator.
    """
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture(run: Callable[[], Tensor], pool: Pool | None = None) -> tuple[Replay, Tensor]:
    """Capture `run` in a CUDA graph; return the function that replays it, and the tensor that then has the new result.

    pool: graphs with the same pool share memory, so a replay may overwrite the results of the other graphs.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use CUDA meanwhile
        result = run()
    return graph.replay, result


class CapturedPass:
    """A pass that is captured in a CUDA graph after the first micro-batch, and replayed for all later ones."""

    def __init__(self, run: TrainingPass, seeds: DropoutSeeds, prefetchers: Callable[[], set[Prefetcher]]) -> None:
        self.run, self.seeds, self._find_prefetchers = run, seeds, prefetchers
        self.inputs: list[Tensor] = []

    def eager(self, batch: MicroBatch) -> Tensor:
        """Run a pass without the graph."""
        self.seeds.draw()
        return self.run(batch)

    def __call__(self, batch: MicroBatch) -> Tensor:
        self.seeds.draw()
        assert batch.documents is None, "the plan has no CUDA graph with a document mask"
        new = [batch.tokens, batch.labels, batch.weights, batch.position_ids]
        if not self.inputs:
            loss = self.run(batch)
            self.inputs = [tensor.clone() for tensor in new]
            self.replay, self.loss = capture(lambda: self.run(MicroBatch(*self.inputs)))
            self.prefetchers = self._find_prefetchers()
            return loss
        for captured, tensor in zip(self.inputs, new, strict=True):
            captured.copy_(tensor)
        self.replay()
        for weights in self.prefetchers:
            weights.invalidate()  # the graph has overwritten the weights that an evaluation has prefetched
        return self.loss.clone()
