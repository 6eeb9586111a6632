"""Generation kernels compared with torch in FP64; without a GPU, Triton's interpreter runs them (see conftest.py)."""

import dataclasses
import math
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from bench.contract.generation import Sampling, WeightPrecision
from bench.contract.schema import Precision
from helpers import ranks, tiny_llama

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.device_ops import trained_ops
    from jobs.engines.megatron.generation import attention_kernels, few_rows_kernels, forward, kv_cache, weights
    from jobs.engines.megatron.generation.generator import build_decoder
    from jobs.engines.megatron.generation.gpu_ops import GpuOps
    from jobs.engines.megatron.generation.ops import TorchOps
    from jobs.engines.megatron.generation.ranks import Ranks
    from jobs.engines.megatron.generation.weights import Linear, store
    from jobs.engines.megatron.head_norms import HeadNorms
    from jobs.engines.megatron.trained.ops import NormWeights

pytestmark = [
    pytest.mark.usefixtures("interpreter_that_rounds"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log"),  # a part without keys has the weight 0
]
DEVICE = ranks.DEVICE
KERNELS = GpuOps(TorchOps(trained_ops(torch.device(DEVICE), Precision.bf16)))
TOLERANCE = 6e-3
"""Tolerance relative to a row's norm: BF16 rounds to 2^-9."""
EPS = 0.01
precisions = pytest.mark.parametrize("precision", [WeightPrecision.bf16, WeightPrecision.fp8, WeightPrecision.nf4])
rows = pytest.mark.parametrize("num_rows", [1, 5, 40], ids=["one row", "few rows", "more rows than a tile of 16"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def weight(precision: WeightPrecision, *shape: int) -> Linear:
    """Return a weight whose rows differ in magnitude."""
    spread = torch.logspace(-2, 0, shape[0], device=DEVICE)[:, None]
    return store((torch.randn(shape, device=DEVICE) * spread).bfloat16(), precision)


def check(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape and got.isfinite().all()
    error = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() <= tolerance


def exact(linear: Linear) -> Tensor:
    """Return the weight that the GEMM uses; 4-bit weights are rounded to BF16 first, as in training."""
    is_nf4 = linear.values.dtype is torch.uint8
    return linear.dense(torch.bfloat16 if is_nf4 else torch.float64).double()


@pytest.mark.long
@precisions
@rows
def test_linear(monkeypatch: pytest.MonkeyPatch, precision: WeightPrecision, num_rows: int) -> None:
    monkeypatch.setattr(few_rows_kernels, "_MOST_PARTS", 4)
    width, outputs = 832, 75  # neither is a multiple of a tile; the last part has half a step, and one without inputs
    x, linear, residual = random(num_rows, width), weight(precision, outputs, width), random(num_rows, outputs)
    norm = NormWeights(1 + random(width) / 10, None, EPS)
    normed = rms_norm(x.double(), (width,), norm.weight_H.double(), eps=EPS)
    check(KERNELS.linear(x, linear), x.double() @ exact(linear).T)
    check(KERNELS.linear(x, linear, norm=norm), normed @ exact(linear).T)
    added = KERNELS.linear(x, linear, residual_MO=residual)
    check(added, x.double() @ exact(linear).T + residual.double())
    logits = KERNELS.logits(x, linear, norm)
    check(logits, normed @ exact(linear).T)
    assert added.dtype is torch.bfloat16 and logits.dtype is torch.float32


@precisions
@rows
def test_gated(precision: WeightPrecision, num_rows: int) -> None:
    width, outputs = 320, 75
    x, linear = random(num_rows, width), weight(precision, 2 * outputs, width)
    norm = NormWeights(1 + random(width) / 10, None, EPS)
    gate, up = (rms_norm(x.double(), (width,), norm.weight_H.double(), eps=EPS) @ exact(linear).T).chunk(2, dim=1)
    check(KERNELS.gated(x, linear, norm), silu(gate) * up, tolerance=2 * TOLERANCE)  # a product of two


@pytest.mark.long
def test_many_rows_of_a_prompt_use_fp8_gemms() -> None:
    width, outputs, num_rows = 320, 96, few_rows_kernels.MOST_ROWS + 1
    x, linear, residual = (
        random(num_rows, width),
        weight(WeightPrecision.fp8, outputs, width),
        random(num_rows, outputs),
    )
    norm = NormWeights(1 + random(width) / 10, None, EPS)
    normed = rms_norm(x.double(), (width,), norm.weight_H.double(), eps=EPS)
    added = KERNELS.linear(x, linear, residual_MO=residual)
    check(added, x.double() @ exact(linear).T + residual.double())
    check(KERNELS.linear(x, linear, norm=norm), normed @ exact(linear).T)
    gate, up = (normed @ exact(linear).T).chunk(2, dim=1)
    check(KERNELS.gated(x, linear, norm), silu(gate) * up, tolerance=2 * TOLERANCE)


@pytest.mark.parametrize("width", [64, 75])
def test_rows_of_tokens_of_other_ranks_are_zero(width: int) -> None:
    table, tokens = random(20, width), torch.tensor([0, 99, 100, 119, 120, 2**17, 107, 107], device=DEVICE)
    expected = torch.zeros(8, width, dtype=table.dtype, device=DEVICE)
    for row, token in ((2, 0), (3, 19), (6, 7), (7, 7)):
        expected[row] = table[token]
    for ops in (KERNELS.many_rows, KERNELS):
        assert torch.equal(ops.own_rows(tokens, table, 100), expected)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.9, top_k=3)])
def test_the_next_tokens_are_those_of_torch(sampling: Sampling) -> None:
    """The vocabulary has two parts; of equal logits the first is chosen; a full row does not exceed its capacity."""
    vocab_size, room, num_slots = 4000, 64, 3
    logits = torch.randn(num_slots, vocab_size, device=DEVICE)
    logits[1, [5, 17, 3000]] = 9.0
    results = []
    for ops in (KERNELS.many_rows, KERNELS):
        batch = kv_cache.empty(num_slots, room, layers=1, groups=1, dim=16, like=logits)
        batch.positions_B.copy_(torch.tensor([0, 40, room - 1]))
        batch.seeds_B.copy_(torch.tensor([1, 2**31 - 1, 7]))
        for times in range(2):  # the counters start at 0 again
            ops.append(logits.roll(times, 0), batch, sampling, Ranks())
        results.append(batch)
    for part in ("tokens_B", "positions_B", "rows_BT"):
        assert torch.equal(getattr(results[1], part), getattr(results[0], part))
    assert results[1].positions_B.tolist() == [2, 42, room - 1]
    if sampling.temperature == 0:
        assert results[1].rows_BT[1, 41] == 5


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return heads [..., D] rotated by angles [D / 2]; a head's halves are real and imaginary parts."""
    low, high = x.double().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("groups", "repeats", "parts", "added"),
    [(2, 4, 1, ""), (2, 4, 4, ""), (3, 1, 1, ""), (3, 1, 4, ""), (2, 7, 4, "bias"), (2, 4, 1, "bias norms")],
)
def test_attention(monkeypatch: pytest.MonkeyPatch, groups: int, repeats: int, parts: int, added: str) -> None:
    monkeypatch.setattr(attention_kernels, "num_parts", lambda *_: parts)
    dim, room, positions = 64, 256, [0, 64, 65, 255]  # no earlier keys; a full tile; parts without keys; all keys
    num_slots = len(positions)
    keys, values = (random(num_slots, groups, room, dim) for _ in range(2))
    qkv, angles = random(num_slots, groups * (repeats + 2) * dim), torch.rand(room, dim // 2, device=DEVICE) * 50
    expected_keys, expected_values, outputs = keys.clone(), values.clone(), []
    bias = random(qkv.shape[1]) if "bias" in added else None
    norms = HeadNorms(1 + random(dim) / 4, 1 + random(dim) / 4, EPS) if "norms" in added else None
    for slot, position in enumerate(positions):
        heads = (qkv[slot].double() + (0 if bias is None else bias.double())).view(groups, repeats + 2, dim)
        if norms:
            q, k = (
                rms_norm(x, (dim,), w.double(), EPS)
                for x, w in zip(heads.split([repeats, 2], 1), norms[:2], strict=True)
            )
            heads = torch.cat([q, k[:, :1], heads[:, -1:]], dim=1)
        turned = rotated(heads[:, :-1], angles[position]).bfloat16()
        expected_keys[slot, :, position], expected_values[slot, :, position] = turned[:, -1], heads[:, -1].bfloat16()
        seen = expected_keys[slot, :, : position + 1].double(), expected_values[slot, :, : position + 1].double()
        scores = turned[:, :-1].double() @ seen[0].transpose(1, 2) / math.sqrt(dim)
        outputs.append((scores.softmax(2) @ seen[1]).flatten())
    for _ in range(parts // 4 + 1):  # the counters of the parts start at 0 again
        at = torch.tensor(positions, device=DEVICE)
        got = attention_kernels.attend(qkv, keys, values, at, angles.repeat(1, 2), bias=bias, norms=norms)
        check(got, torch.stack(outputs))
    torch.testing.assert_close(keys, expected_keys, rtol=2**-8, atol=1e-6)  # sines differ in their last bits
    assert torch.equal(values, expected_values)


def test_keys_are_split_only_for_few_slots() -> None:
    assert attention_kernels.num_parts(8, 4096) == 16 and attention_kernels.num_parts(8, 130) == 2
    assert attention_kernels.num_parts(32, 4096) == 8 and attention_kernels.num_parts(1000, 4096) == 1


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": True}, {"head_dim": 48}], ids=str)
def test_kernels_compute_a_model(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """A short prompt, whose rows also use the kernels, and two decode steps, compared with torch's operations."""
    monkeypatch.setattr(attention_kernels, "num_parts", lambda *_: 2)
    model, device = tiny_llama.model(num_layers=1, vocab_size=64, **changes), torch.device(DEVICE)
    place = weights.Place(WeightPrecision.bf16, Ranks(), device)
    loaded = weights.random_weights(model, place, seed=1)
    for vector in (loaded.layers[0].qkv_bias_O, loaded.layers[0].q_norm_D):
        if vector is not None:
            vector.add_(random(len(vector)) / 4)
    model_decoder = build_decoder(model, loaded, place, Sampling())
    by_torch = dataclasses.replace(model_decoder, ops=TorchOps(model_decoder.trained))
    results = []
    for one in (by_torch, dataclasses.replace(model_decoder, ops=GpuOps(TorchOps(model_decoder.trained)))):
        shape = {"layers": 1, "groups": 2, "dim": model.head_size}
        batch = kv_cache.empty(2, 70, **shape, like=one.weights.embedding_VH)
        angles, at = forward.angles(model, batch.capacity, device), torch.arange(2, device=device)
        rows = torch.arange(10, device=device).view(5, 2)
        prompts = forward.Prompts(rows, torch.tensor([5, 3], device=device), at, at)
        with torch.no_grad():
            of_prompts = forward.prompt_logits(one, batch, angles, prompts)
            batch.start(at, torch.tensor([7, 9], device=device), prompts.lengths_B, at)
            of_step = forward.step_logits(one, batch, angles)
            batch.append(torch.tensor([11, 13], device=device))
            results.append(torch.cat([of_prompts, of_step, forward.step_logits(one, batch, angles)]))
    error = (results[1] - results[0]).norm(dim=1) / results[0].norm(dim=1)
    assert error.max() < 0.02


@pytest.mark.slow
def test_kernels_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compiled_kernels"]
    done = subprocess.run(command, cwd=ranks.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("registers") == 25
