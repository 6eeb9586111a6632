"""Activation offloading: values and time of prefetched activations, and bitwise the same losses."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bench.contract.plan import Recomputed
from helpers import ranks
from jobs.engines.megatron.offload import HostActivations, is_offloaded
from jobs.engines.megatron.quantize import Quantized

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import composed, one_rank, random_rows  # noqa: F401

    from jobs.engines.megatron import loop, model

DEVICE = torch.device(ranks.DEVICE)
on_this_rank = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process")
quietly = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"
)  # what megatron-core calls


@dataclass(slots=True)
class Saved:
    normed: Quantized
    heads: tuple[Tensor, Tensor]
    nothing: Tensor | None


def saved(seed: int) -> Saved:
    """Return activations of every kind: FP8 with scales, BF16 with other strides, and recomputed ones."""
    torch.manual_seed(seed)
    values = torch.randn(8, 16, device=DEVICE).to(torch.float8_e4m3fn)
    turned = torch.randn(4, 2, 8, device=DEVICE).bfloat16().permute(1, 0, 2)
    return Saved(Quantized(values, torch.rand(8, device=DEVICE)), (turned, torch.randn(3, device=DEVICE)), None)


def tensors(activations: Saved) -> list[Tensor]:
    return [activations.normed.values.view(torch.uint8), activations.normed.scale, *activations.heads]


def test_offloaded_activations_are_restored_though_memory_is_reused() -> None:
    host, originals = HostActivations(DEVICE), [saved(1), saved(2), saved(3)]
    items = [host.offload(one) for one in originals]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for one in originals:
        for tensor in tensors(one):
            tensor.zero_()
    host.prefetch(items[2])
    for seed in (3, 2, 1):
        got, expected = host.pop(items[seed - 1]), saved(seed)
        assert isinstance(got, Saved) and isinstance(got.normed, Quantized) and got.nothing is None
        assert got.heads[0].device.type == DEVICE.type and got.heads[0].stride() == expected.heads[0].stride()
        assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(expected), strict=True))
        assert items[seed - 1].on_host is None and items[seed - 1].on_device is None, "there are no references left"


def test_offloaded_layers_are_evenly_spaced() -> None:
    spread = {n: [i for i in range(8) if is_offloaded(i, n, 8)] for n in (0, 1, 3, 4, 8)}
    assert spread == {0: [], 1: [0], 3: [0, 3, 6], 4: [0, 2, 4, 6], 8: list(range(8))}


KINDS = {
    "frozen BF16": ("precision=bf16",),
    "frozen FP8": ("precision=fp8",),
    "frozen NF4": ("task.training.trains=qlora", "precision=bf16", "model.hidden_size=64", "model.ffn_hidden_size=64"),
    "trained FP8": ("task=pretrain_tiny", "precision=fp8"),
    "trained, GPT-3's parts": (
        *("task=pretrain_tiny", "precision=fp32", "model.bias=true", "model.activation=gelu", "model.norm=LayerNorm"),
    ),
}


def curve(recomputed: Recomputed, *overrides: str) -> list[float]:
    """Return the losses of three steps of two micro-batches each, with dropout in adapters, and of an evaluation."""
    plan = composed("model.num_layers=4", "recipe.lr=0.01", "recipe.lr_warmup_steps=0", *overrides)
    engine, rows = model.build(replace(plan, recompute=recomputed), seed=1), random_rows(10)
    batches = loop.np.array([[3, 0, 7, 5], [9, 1, 2, 4], [6, 8, 0, 1]])
    losses = [loop.mean_loss(loop.train_step(engine, rows, batch, step), 4) for step, batch in enumerate(batches, 1)]
    return [*losses, loop.evaluate(engine, random_rows(6))]


@pytest.mark.long
@on_this_rank
@quietly
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_bitwise_the_same(kind: str) -> None:
    resident = curve(Recomputed(full=False, qkv_layers=1, fc1_layers=1), *KINDS[kind])
    for count in (2, 4):
        offloaded = Recomputed(full=False, qkv_layers=1, fc1_layers=1, offloaded_layers=count)
        assert curve(offloaded, *KINDS[kind]) == resident
    assert len(set(resident)) == 4


@pytest.mark.long
@on_this_rank
@quietly
def test_each_layer_prefetches_for_the_next_offloaded_layer_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers the first and the third are offloaded; the fourth, which is not, prefetches for the third."""
    calls: list[str] = []
    offload, prefetch, pop = HostActivations.offload, HostActivations.prefetch, HostActivations.pop
    numbers: dict[object, int] = {}

    def record_offload(self, activations):
        item = offload(self, activations)
        numbers[item] = 2 * (len(numbers) % 2)
        calls.append(f"offload {numbers[item]}")
        return item

    def record_prefetch(self, item):
        if item is not None and item.on_host is not None and item.on_device is None:
            calls.append(f"prefetch {numbers[item]}")
        prefetch(self, item)

    def record_pop(self, item):
        calls.append(f"pop {numbers[item]}")
        return pop(self, item)

    for name, method in (("offload", record_offload), ("prefetch", record_prefetch), ("pop", record_pop)):
        monkeypatch.setattr(HostActivations, name, method)
    curve(Recomputed(full=False, qkv_layers=0, fc1_layers=0, offloaded_layers=2), *KINDS["trained FP8"])
    micro_batch = ["offload 0", "offload 2", "prefetch 2", "pop 2", "prefetch 0", "pop 0"]
    assert calls == micro_batch * 6, "three steps of two micro-batches, and nothing in the evaluation"
