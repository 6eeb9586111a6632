"""Implement the protocol of `jobs.engines.generation`: this rank's part of the model, ready to answer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from bench.contract import mllog
from bench.contract.generation import Batching, Generation, Order, Sampling, WeightPrecision
from bench.contract.layers import differs_from_llama
from bench.contract.model import Model
from bench.contract.plan_kinds import GenerationPlan
from bench.contract.schema import Precision
from bench.errors import ConfigError
from jobs.engines import Fact
from jobs.engines.generation import Answer, Request
from jobs.engines.megatron.device_ops import trained_ops
from jobs.engines.megatron.generation import batch, kv_cache, weights
from jobs.engines.megatron.generation.batch import Batch
from jobs.engines.megatron.generation.forward import Decoder, angles
from jobs.engines.megatron.generation.ops import GenerationOps, TorchOps
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.generation.weights import Weights, require_divisible


class MegatronGenerator:
    """This rank's part of the model; see `jobs.engines.generation.Generator`.

    Raises:
        ConfigError: the model is not like Llama, or cannot be split over the TP ranks.
    """

    def __init__(self, plan: GenerationPlan, seed: int, *, ranks: Ranks, device: torch.device) -> None:
        model = plan.config.model
        require_llama(model)
        require_divisible(model, ranks.size, plan.weights)
        self.plan, self.seed, self.place = plan, seed, weights.Place(plan.weights, ranks, device)
        self._weights: Weights | None = None
        self._batch: Batch | None = None

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self._weights = self._batch = None
        self._weights = weights.load(folder, self.plan.config.model, self.place)

    @torch.no_grad()
    def warm_up(self, requests: Sequence[Request]) -> None:
        calls = [[one] for one in requests] if self._asked.order is Order.one_by_one else [list(requests)]
        num_slots = min(len(calls[0]), self._asked.max_batch or len(calls[0]))
        room = max(len(one.prompt) + one.length for one in requests)
        self._batch = self._new_batch(num_slots, room)
        for call in calls:
            self._batch.rehearse(call)

    def facts(self) -> list[Fact]:
        is_captured, dtype = self.place.device.type == "cuda", self.place.dtype
        about = {
            "engine": "megatron",
            "cache": "static",
            "cuda_graph": is_captured,
            "kernels": "triton" if is_captured and dtype is not torch.float32 else "torch",
            "dtype": str(dtype).removeprefix("torch."),
            "weights": self.plan.weights.name,
            "bytes_per_step": None if self._weights is None else self._weights.bytes_per_step,
        }
        return [(mllog.STRATEGY, "tensor_parallel", about)]

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        room = max(len(one.prompt) + one.length for one in requests)
        if self._batch is None or self._batch.slots.room < room:
            self.warm_up(requests)
        assert self._batch is not None
        return self._batch.answers(requests, seed=seed)

    def _new_batch(self, num_slots: int, room: int) -> Batch:
        self._batch = None  # its memory is free before there is another one
        made, model = self._decoder(), self.plan.config.model
        shape = {"layers": model.num_layers, "groups": made.groups, "dim": made.dim}
        batch_slots = kv_cache.empty(num_slots, room, **shape, like=made.weights.embedding_VH)
        angles_TD = angles(model, batch_slots.room, self.place.device)
        parts = (made, batch_slots, angles_TD)
        is_continuous = self._asked.batching is Batching.continuous
        return Batch(batch_slots, batch.steps(*parts), batch.prefills(*parts), is_continuous)

    def _decoder(self) -> Decoder:
        model = self.plan.config.model
        self._weights = self._weights or weights.random(model, self.place, seed=self.seed)
        return decoder(model, self._weights, self.place, self._asked.sampling)

    @property
    def _asked(self) -> Generation:
        asked = self.plan.config.task.generation
        assert asked is not None, "the plan is of kind generate"
        return asked


def decoder(model: Model, weights: Weights, place: weights.Place, sampling: Sampling) -> Decoder:
    """Return the model with the operations of its device and precision."""
    is_fp32 = place.precision is WeightPrecision.fp32  # quantised weights change nothing about activations
    trained = trained_ops(place.device, Precision.fp32 if is_fp32 else Precision.bf16)
    ops: GenerationOps = TorchOps(trained)
    if place.device.type == "cuda" and not is_fp32:
        from jobs.engines.megatron.generation.gpu_ops import GpuOps

        ops = GpuOps(TorchOps(trained))
    return Decoder(model, weights, ops, trained, place.ranks, sampling)


def require_llama(model: Model) -> None:
    """Do nothing if the model consists of Llama's parts.

    Raises:
        ConfigError: it does not, and nothing here computes others.
    """
    if unmet := differs_from_llama(model):
        raise ConfigError(
            f"engine=megatron generates with a Llama, and {', '.join(f'{k} is {v}' for k, v in unmet.items())}",
            where=", ".join(unmet),
            fix="choose a Llama model",
        )
