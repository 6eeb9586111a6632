"""A sharded 4-bit base: the same numbers as bitsandbytes' linear, and the same losses as whole replicas."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import ranks
from helpers.huggingface_alone import group, random_rows, tiny
from helpers.huggingface_runs import BLOCK, FSDP2, TRAINS, ZERO, composed, held, losses, needed, trained

needed()

from jobs.engines.huggingface import adapters, quantized  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")

QLORA = ("task.training.trains=qlora", "precision=bf16", *TRAINS["lora"])
PURE = f"{BLOCK}.bf16=pure"
SIZES = ("model.hidden_size=64", "model.ffn_hidden_size=128")
"""Multiples of a block of 64 weights, which has one scale."""
CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    with group():
        yield


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (64, 64), (176, 64)])
def test_a_packed_linear_computes_what_bitsandbytes_does(shape: tuple[int, int], has_bias: bool) -> None:
    """Bit for bit, in both passes; the weights are bits in BF16 elements, some of which are no numbers."""
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(3)
    num_out, num_in = shape
    whole, x = torch.randn(shape), torch.randn(2, 5, num_in, dtype=torch.bfloat16)
    whole[0, :8] = 9  # eight of the largest 4-bit number: 32 ones
    theirs = Linear4bit(num_in, num_out, bias=has_bias, compute_dtype=torch.bfloat16, quant_type="nf4")
    if has_bias:
        theirs.bias.data = theirs.bias.data.bfloat16()
    quantized.quantize(theirs, whole, CPU)
    own = quantized.PackedLinear(num_in, num_out, theirs.bias)
    with torch.no_grad():
        own.weight.copy_(own.pack(whole, CPU))
    assert own.weight.nbytes == whole.numel() // 2 and own.weight.isnan().any()
    results = []
    for linear in (theirs, own):
        given = x.clone().requires_grad_()
        y = linear(given)
        y.float().square().sum().backward()
        results.append((y, given.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.long
def test_a_base_in_4_bits_still_trains_after_an_evaluation(alone: None, tmp_path: Path) -> None:
    """bitsandbytes' linear has no gradient then on some CPUs: adapters of the first layer would not learn."""
    model = HuggingFaceEngine(tiny(tmp_path, "lora", *QLORA, *SIZES), 7).placement.model
    packed = [name for name, module in model.named_modules() if isinstance(module, quantized.PackedLinear)]
    assert len(packed) == 7 * 2, "q, k, v, o, gate, up and down of two layers"
    tokens = torch.arange(16)[None]
    gradients = []
    for _ in range(2):
        model.train()
        model(input_ids=tokens).logits.float().square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in adapters.trainable(model).items() if ".lora_B" in name})
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(input_ids=tokens)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert all(gradient.any() for gradient in gradients[0].values())


@pytest.mark.long
def test_a_sharded_base_has_the_gradients_of_a_whole_one(alone: None, tmp_path: Path) -> None:
    """In one process, so that nothing is rounded in between: the updates of adapters are equal to the bit."""
    trained_weights = []
    for sharding in ((), (FSDP2,)):
        plan = tiny(tmp_path, "lora", *QLORA, *SIZES, PURE, "recipe.clip_grad=1e9", *sharding)
        engine, rows = HuggingFaceEngine(plan, 7), random_rows(plan)
        engine.train_step(rows, np.array([3, 0, 1, 2]), 1)
        engine.train_step(rows, np.array([4, 5, 6, 7]), 2)
        trained_weights.append({shard.name: shard.state["master"].clone() for shard in engine.placement.shards()})
    whole, sharded = trained_weights
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


SHARDED = {
    "fsdp2": (FSDP2,),
    "fsdp2_recomputed": (FSDP2, "recipe.recompute=full"),
    "fsdp2_offloaded": (FSDP2, f"{BLOCK}.offload_parameters=true"),
    "zero3": (ZERO, f"{BLOCK}.zero_stage=3"),
    "zero3_recomputed": (ZERO, f"{BLOCK}.zero_stage=3", "recipe.recompute=full"),
}
WHOLE = {"fsdp2": ("ddp", 1e-5), "zero3": ("zero2", 3e-3)}
"""The strategy that differs only in where the weights are, and the tolerance: ZeRO 3 sums BF16 gradients otherwise."""
SPREAD = {"ddp": (), "zero2": (ZERO, f"{BLOCK}.zero_stage=2")} | SHARDED


@pytest.fixture(scope="module")
def folder(runs: Path) -> Path:
    """All strategies on a 4-bit base, trained by two ranks in one start."""
    plans = {
        f"qlora_{name}": composed(runs, *QLORA, *words, *(() if ZERO in words else (PURE,)))
        for name, words in SPREAD.items()
    }
    trained(plans, runs)
    return runs


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_with_half_of_a_4_bit_base_learn_as_with_all_of_it(name: str, folder: Path) -> None:
    whole, tolerance = WHOLE[name.split("_")[0]]
    got, expected = losses(folder / f"qlora_{name}"), losses(folder / f"qlora_{whole}")
    assert expected[-1] < expected[0] - 0.3, "the loss must have fallen"
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    all_of_it, half = held(folder / f"qlora_{whole}", "bytes"), held(folder / f"qlora_{name}", "bytes")
    assert half == [size / 2 for size in all_of_it]
