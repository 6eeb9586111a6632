"""Implement the protocol of `jobs.engines.generation`: this rank's part of the model, ready to answer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from bench.contract.generation import Batching, Order, WeightPrecision
from bench.contract.plan import GenerationPlan
from bench.contract.schema import Precision
from bench.contract.task import Activation, Model, Norm, Position
from bench.errors import ConfigError
from jobs.engines import Fact
from jobs.engines.generation import Answer, Request
from jobs.engines.megatron.generation import captured, loading, slots
from jobs.engines.megatron.generation.batch import Batch
from jobs.engines.megatron.generation.forward import Decoder
from jobs.engines.megatron.generation.ops import GenerationOps, TorchOps
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.generation.rope import angles
from jobs.engines.megatron.generation.weights import Weights, dtype_of, require_divisible
from jobs.engines.megatron.trained import ops as trained_ops
from jobs.engines.megatron.trained.ops import TrainedOps


class MegatronGenerator:
    """This rank's part of the model; see `jobs.engines.generation.Generator`.

    Raises:
        ConfigError: the model is not like Llama, or cannot be split over the TP ranks.
    """

    def __init__(self, plan: GenerationPlan, seed: int, *, ranks: Ranks, device: torch.device) -> None:
        model = plan.config.model
        require_llama(model)
        require_divisible(model, ranks.size, plan.weights)
        self.plan, self.seed, self.ranks, self.device = plan, seed, ranks, device
        self._weights: Weights | None = None
        self._batch: Batch | None = None

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self._weights = self._batch = None
        tp, rank = self.ranks.size, self.ranks.rank
        model, precision = self.plan.config.model, self.plan.weights
        self._weights = loading.load(folder, model, precision, tp=tp, rank=rank, device=self.device)

    @torch.no_grad()
    def warm_up(self, requests: Sequence[Request]) -> None:
        asked = self.plan.config.task.generation
        assert asked is not None, "the plan is of kind generate"
        calls = [[one] for one in requests] if asked.order is Order.one_by_one else [list(requests)]
        num_slots = min(len(calls[0]), asked.max_batch or len(calls[0]))
        room = max(len(one.prompt) + one.length for one in requests)
        self._batch = self._new_batch(num_slots, room)
        for call in calls:
            self._batch.rehearse(call)

    def facts(self) -> list[Fact]:
        return []

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        room = max(len(one.prompt) + one.length for one in requests)
        if self._batch is None or self._batch.slots.room < room:
            self.warm_up(requests)
        assert self._batch is not None
        return self._batch.answers(requests, seed=seed)

    def _new_batch(self, num_slots: int, room: int) -> Batch:
        asked = self.plan.config.task.generation
        assert asked is not None, "the plan is of kind generate"
        self._batch = None  # its memory is free before there is another one
        decoder = self._decoder()
        like = decoder.weights.embedding_VH
        options = {"layers": self.plan.config.model.num_layers, "groups": decoder.groups, "dim": decoder.dim}
        batch_slots = slots.empty(num_slots, room, **options, like=like)
        angles_TD = angles(self.plan.config.model, batch_slots.room, self.device)
        advance = captured.advance(decoder, batch_slots, angles_TD)
        return Batch(decoder, batch_slots, angles_TD, advance, asked.batching is Batching.continuous)

    def _decoder(self) -> Decoder:
        asked, model, precision = self.plan.config.task.generation, self.plan.config.model, self.plan.weights
        assert asked is not None, "the plan is of kind generate"
        if self._weights is None:
            options = {"tp": self.ranks.size, "seed": self.seed, "device": self.device}
            self._weights = loading.random(model, precision, **options)
        trained = trained_ops.for_device(self.device, _activations(precision))
        ops = _ops(self.device, precision, trained)
        return Decoder(model, self._weights, ops, trained, self.ranks, asked.sampling)


def _activations(precision: WeightPrecision) -> Precision:
    """Return the precision of activations: quantised weights save memory and its bandwidth alone."""
    return Precision.fp32 if precision is WeightPrecision.fp32 else Precision.bf16


def _ops(device: torch.device, precision: WeightPrecision, trained: TrainedOps) -> GenerationOps:
    if device.type != "cuda" or dtype_of(precision) is torch.float32:
        return TorchOps(trained)
    from jobs.engines.megatron.generation.gpu_ops import GpuOps

    return GpuOps(TorchOps(trained))


def require_llama(model: Model) -> None:
    """Do nothing if the model consists of Llama's parts.

    Raises:
        ConfigError: it does not, and nothing here computes others.
    """
    parts = (model.norm, model.activation, model.position, model.bias)
    if parts != (Norm.RMSNorm, Activation.swiglu, Position.rope, False):
        raise ConfigError(
            f"engine=megatron generates with models like Llama, and {model.name} has {model.norm.name}, "
            f"{model.activation.name}, {model.position.name} positions and {'' if model.bias else 'no '}biases",
            where="engine, model",
            fix="generate with engine=huggingface, or choose a model with RMSNorm, swiglu and rope",
        )
