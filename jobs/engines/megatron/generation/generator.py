"""MegatronGenerator: implements `jobs.engines.generation.Generator`."""

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
        ConfigError: the model's layers are unlike Llama's, or TP cannot split it.
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
        calls = [[one] for one in requests] if self._settings.order is Order.one_by_one else [list(requests)]
        num_slots = min(len(calls[0]), self._settings.max_batch or len(calls[0]))
        capacity = max(len(one.prompt) + one.length for one in requests)
        self._batch = self._new_batch(num_slots, capacity)
        for call in calls:
            self._batch.warm_up(call)

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
            **self.place.ranks.facts(),
        }
        return [(mllog.STRATEGY, "tensor_parallel", about)]

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        capacity = max(len(one.prompt) + one.length for one in requests)
        if self._batch is None or self._batch.cache.capacity < capacity:
            self.warm_up(requests)
        assert self._batch is not None
        return self._batch.generate(requests, seed=seed)

    def _new_batch(self, num_slots: int, capacity: int) -> Batch:
        self._batch = None  # frees its memory before the new batch is allocated
        decoder, model = self._decoder(), self.plan.config.model
        shape = {"layers": model.num_layers, "groups": decoder.groups, "dim": decoder.dim}
        cache = kv_cache.empty(num_slots, capacity, **shape, like=decoder.weights.embedding_VH)
        angles_TD = angles(model, cache.capacity, self.place.device)
        parts = (decoder, cache, angles_TD)
        is_continuous = self._settings.batching is Batching.continuous
        return Batch(cache, batch.decode_steps(*parts), batch.prefills(*parts), is_continuous)

    def _decoder(self) -> Decoder:
        model = self.plan.config.model
        self._weights = self._weights or weights.random_weights(model, self.place, seed=self.seed)
        return build_decoder(model, self._weights, self.place, self._settings.sampling)

    @property
    def _settings(self) -> Generation:
        settings = self.plan.config.task.generation
        assert settings is not None, "the plan is of kind generate"
        return settings


def build_decoder(model: Model, weights: Weights, place: weights.Place, sampling: Sampling) -> Decoder:
    """Return the model with the operations for its device and precision."""
    is_fp32 = place.precision is WeightPrecision.fp32  # activations are in BF16 with quantised weights too
    trained = trained_ops(place.device, Precision.fp32 if is_fp32 else Precision.bf16)
    ops: GenerationOps = TorchOps(trained)
    if place.device.type == "cuda" and not is_fp32:
        from jobs.engines.megatron.generation.gpu_ops import GpuOps

        ops = GpuOps(TorchOps(trained))
    return Decoder(model, weights, ops, trained, place.ranks, sampling)


def require_llama(model: Model) -> None:
    """Check that the model has Llama's layers; heads of another size, qkv_bias and qk_norm are also implemented.

    Raises:
        ConfigError: it has others.
    """
    if unmet := differs_from_llama(model):
        differing = ", ".join(f"{key} is {value}" for key, value in unmet.items())
        raise ConfigError(
            "engine=megatron generates text only with the layers of Llama (RMSNorm, swiglu, rope), but in this model "
            f"{differing}",
            where=", ".join(unmet),
            fix="choose a Llama, Mistral or Qwen model, or engine=huggingface",
        )
