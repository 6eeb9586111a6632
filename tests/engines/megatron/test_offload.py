"""Activations that wait in the host's memory for the backward pass: what comes back, when, and that no bit changes."""

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
    from test_engine_units import composed, drawn_rows, one_rank  # noqa: F401

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
    """Return activations of every kind that layers save: FP8 with scales, BF16 of other strides, what is recomputed."""
    torch.manual_seed(seed)
    values = torch.randn(8, 16, device=DEVICE).to(torch.float8_e4m3fn)
    turned = torch.randn(4, 2, 8, device=DEVICE).bfloat16().permute(1, 0, 2)
    return Saved(Quantized(values, torch.rand(8, device=DEVICE)), (turned, torch.randn(3, device=DEVICE)), None)


def tensors(of: Saved) -> list[Tensor]:
    return [of.normed.values.view(torch.uint8), of.normed.scale, *of.heads]


def test_what_comes_back_is_what_was_put_though_its_memory_is_used_again() -> None:
    host, originals = HostActivations(DEVICE), [saved(1), saved(2), saved(3)]
    items = [host.put(one) for one in originals]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for one in originals:
        for tensor in tensors(one):
            tensor.zero_()
    host.fetch(items[2])
    for seed in (3, 2, 1):
        got, expected = host.take(items[seed - 1]), saved(seed)
        assert isinstance(got, Saved) and isinstance(got.normed, Quantized) and got.nothing is None
        assert got.heads[0].device.type == DEVICE.type and got.heads[0].stride() == expected.heads[0].stride()
        assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(expected), strict=True))
        assert items[seed - 1].on_host is None and items[seed - 1].on_device is None, "nothing holds them any longer"


def test_offloaded_layers_are_spread_evenly() -> None:
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
    engine, rows = model.build(replace(plan, recompute=recomputed), seed=1), drawn_rows(10)
    batches = loop.np.array([[3, 0, 7, 5], [9, 1, 2, 4], [6, 8, 0, 1]])
    losses = [loop.mean_loss(loop.train_step(engine, rows, batch, step), 4) for step, batch in enumerate(batches, 1)]
    return [*losses, loop.evaluate(engine, drawn_rows(6))]


@pytest.mark.long
@on_this_rank
@quietly
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_the_curve_changes(kind: str) -> None:
    resident = curve(Recomputed(full=False, qkv_layers=1, fc1_layers=1), *KINDS[kind])
    for count in (2, 4):
        offloaded = Recomputed(full=False, qkv_layers=1, fc1_layers=1, offloaded_layers=count)
        assert curve(offloaded, *KINDS[kind]) == resident
    assert len(set(resident)) == 4


@on_this_rank
@quietly
def test_each_layer_fetches_what_the_next_one_below_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers the first and the third are offloaded; the fourth, which is not, fetches for the third."""
    calls: list[str] = []
    put, fetch, take = HostActivations.put, HostActivations.fetch, HostActivations.take
    numbers: dict[object, int] = {}

    def putting(self, activations):
        item = put(self, activations)
        numbers[item] = 2 * (len(numbers) % 2)
        calls.append(f"put {numbers[item]}")
        return item

    def fetching(self, item):
        if item is not None and item.on_host is not None and item.on_device is None:
            calls.append(f"fetch {numbers[item]}")
        fetch(self, item)

    def taking(self, item):
        calls.append(f"take {numbers[item]}")
        return take(self, item)

    for name, method in (("put", putting), ("fetch", fetching), ("take", taking)):
        monkeypatch.setattr(HostActivations, name, method)
    curve(Recomputed(full=False, qkv_layers=0, fc1_layers=0, offloaded_layers=2), *KINDS["trained FP8"])
    micro_batch = ["put 0", "put 2", "fetch 2", "take 2", "fetch 0", "take 0"]
    assert calls == micro_batch * 6, "three steps of two micro-batches, and nothing in the evaluation"
