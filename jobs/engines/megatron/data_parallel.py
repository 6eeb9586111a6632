"""Data parallelism: the replicas' gradients and weights move in buckets, while layers compute.

megatron-core's DistributedDataParallel keeps the gradients of a rank (FP32) and, with the distributed optimizer, its
weights in flat buffers. They are cut into buckets in the order of the backward pass. A step with `parallel.overlap`,
the default on GPUs:

1. The backward pass of the last micro-batch: a bucket is reduced as soon as all of its gradients are there.
2. The norm of all gradients: every rank waits for the last bucket, and for the other ranks.
3. AdamW updates a rank's part of one bucket after the other, in the order of the forward pass. The weights of a bucket
   are gathered while the next buckets are updated, and during the next forward pass.
4. The next forward pass, of a training step or an evaluation: each layer waits for its own weights only. With FP8
   weights it then quantises them: the scale of a weight needs all parts of it.

The plain schedule (`parallel.overlap=false`) runs the same collectives on the same buckets, but waits for each of them.
So both schedules have the same results, bit by bit. Three cases keep a part of the plain schedule:

- One replica: there is nothing to exchange, and one bucket.
- Later pipeline stages, and later chunks of a stage: megatron-core gives them one bucket. They end their last backward
  pass before the first stage does, and begin the next forward pass after it.
- A CUDA graph has the collectives of TP and CP, but not those of replicas. The gradients are reduced after it, and it
  begins when all weights are there.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from torch.nn import Module, Parameter

from bench.contract.buckets import bucket_size
from bench.contract.modules import Part
from bench.contract.plan_kinds import TrainingPlan
from jobs.engines.megatron import graphs
from jobs.engines.megatron.adam.shards import BucketGroup, bucket_groups, finish_gather
from jobs.engines.megatron.layer import LayerConfig
from jobs.engines.megatron.trained.layer import TrainedLayer
from jobs.engines.megatron.trained.ops import LinearWeights
from jobs.profiles.ranges import profile_range


def wrap(plan: TrainingPlan, config: LayerConfig, chunks: Sequence[Module]) -> list[DistributedDataParallel]:
    """Return the chunks in megatron-core's wrapper, with equal weights on all replicas."""
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    is_sharded, overlaps = plan.config.parallel.distributed_optimizer, plan.config.parallel.overlap
    if overlaps is None:  # on CPUs there is nothing to gain: gloo computes its sums on the cores of the layers
        overlaps = torch.cuda.is_available()
    num_trained = sum(weight.numel() for weight in chunks[0].parameters() if weight.requires_grad)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_sharded,
        overlap_grad_reduce=replicas > 1,  # only with this does it make buckets
        bucket_size=bucket_size(num_trained, replicas),
        average_in_collective=torch.cuda.is_available(),  # gloo cannot; without it, a kernel scales all gradients
    )
    with graphs.side_stream() if plan.cuda_graph else nullcontext():
        wrapped = [DistributedDataParallel(config, ddp, one, disable_bucketing=i > 0) for i, one in enumerate(chunks)]
    # The schedule: the wrappers and their buckets read this object in every step.
    ddp.overlap_grad_reduce = replicas > 1 and overlaps and not plan.cuda_graph
    ddp.overlap_param_gather = replicas > 1 and overlaps and is_sharded
    for chunk in wrapped:
        chunk.broadcast_params()
        if replicas > 1:
            _announce_gradients(chunk)
    config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _announce_gradients(chunk: DistributedDataParallel) -> None:
    """Let trained layers tell when their gradients are there: autograd, on which megatron-core relies, has none."""
    for layer in chunk.modules():
        if isinstance(layer, TrainedLayer):
            layer.after_backward = partial(_register_gradients, chunk, list(layer.parameters()))


def _register_gradients(chunk: DistributedDataParallel, weights: list[Parameter]) -> None:
    if chunk.ddp_config.overlap_grad_reduce:
        for weight in weights:
            chunk.param_to_bucket_group[weight].register_grad_ready(weight)


class UpdatedWeights:
    """The weights after an update: when they arrive from the other replicas, and when FP8 copies of them are made."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        models: list[GPTModel],
        linear_weights: LinearWeights | None,
        *,
        is_captured: bool,
    ) -> None:
        self.groups, self.linear_weights = bucket_groups(chunks), linear_weights
        self.outdated: set[TrainedLayer] = set()
        """Layers whose linears have copies of older weights."""
        self.layers = [layer for model in models for layer in model.decoder.layers if isinstance(layer, TrainedLayer)]
        self.arrive_late = chunks[0].ddp_config.overlap_param_gather and not is_captured
        """Whether a forward pass may begin before all weights are there."""
        if not is_captured:
            for chunk, model in zip(chunks, models, strict=True):
                self._wait_in_forward(chunk, model)

    def after_update(self) -> None:
        """Update copies after an optimizer step: now, or layer by layer in the next forward pass."""
        if self.arrive_late:
            self.outdated = set(self.layers)
        else:
            self.refresh()

    def refresh(self) -> None:
        """Wait for all weights, and update all copies. Call this after every other change of the weights."""
        self.wait()
        self.outdated = set()
        if self.linear_weights is not None:
            self.linear_weights.refresh()

    def wait(self) -> None:
        """Wait for all weights: on a GPU the current stream waits, not the host."""
        for group in self.groups:
            finish_gather(group)

    def _wait_in_forward(self, chunk: DistributedDataParallel, model: GPTModel) -> None:
        for module, weights in _parts(model):
            groups = {id(group): group for weight in weights if (group := chunk.param_to_bucket_group.get(weight))}
            if groups:
                module.register_forward_pre_hook(partial(self._before_forward, list(groups.values())))

    def _before_forward(self, groups: list[BucketGroup], module: Module, args: Any) -> None:
        for group in groups:
            finish_gather(group)
        if module in self.outdated and self.linear_weights is not None:
            assert isinstance(module, TrainedLayer)
            self.outdated.remove(module)
            with profile_range(Part.weights):
                self.linear_weights.refresh(module.backward_linears)


def _parts(model: GPTModel) -> Iterator[tuple[Module, list[Parameter]]]:
    """Yield the modules that wait for weights, and these: each layer as a whole, and modules outside of layers.

    Hand-written layers read the weights of their submodules without calling these.
    """
    layers = list(model.decoder.layers)
    inside = {module for layer in layers for module in layer.modules()}
    yield from ((layer, list(layer.parameters())) for layer in layers)
    yield from ((module, list(module.parameters(recurse=False))) for module in model.modules() if module not in inside)
