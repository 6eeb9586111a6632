"""The layer that trains all weights: its gradients in each precision compared with autograd's in FP64.

RUNSTOP_TEST_DEVICE=cuda compares those of a GPU.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from bench.contract.plan import Plan
from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, one_rank  # noqa: F401
    from test_full_fine_tuning import SHAPES as LLAMA_AND_GPT3

    from jobs.engines.megatron import model

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning", r"ignore:barrier\(\)"
)  # what megatron-core calls

BOUNDS = {"fp32": 1e-6, "bf16": 0.01, "fp8": 0.1}
"""Bounds of |error| / |gradient|, for each weight and for the input.

BF16 rounds each number by up to 2^-9 of it, E4M3 by up to 2^-4.
"""
SEQ, BATCH = 16, 2
SHAPES = LLAMA_AND_GPT3 | {
    "qwen2": ("model.qkv_bias=true", "model.rope_base=500000"),
    "qwen3": ("model.qk_norm=true", "model.head_dim=16", "model.rope_base=500000"),
}
"""Of Qwen3, the width of all heads is twice the hidden size."""


def in_fp64(plan: Plan, w: dict[str, Tensor], x_SBH: Tensor, freqs_SD: Tensor | None) -> Tensor:
    """Return the layer's output, computed with torch's functions."""
    m = plan.config.model
    qkv = linear(norm(plan, w, "input_layernorm", x_SBH), *parameters_of(w, "linear_qkv"))
    attended = attention(plan, w, qkv, freqs_SD)
    x_SBH = x_SBH + linear(attended, *parameters_of(w, "linear_proj"))
    hidden = linear(norm(plan, w, "pre_mlp_layernorm", x_SBH), *parameters_of(w, "linear_fc1"))
    if m.activation.name == "swiglu":
        gate, up = hidden.chunk(2, dim=-1)
        hidden = silu(gate) * up
    else:
        hidden = gelu(hidden)
    return x_SBH + linear(hidden, *parameters_of(w, "linear_fc2"))


def parameters_of(w: dict[str, Tensor], name: str) -> list[Tensor | None]:
    """Return the weight of a linear or norm, and its bias if it has one."""
    return [next((x for key, x in w.items() if key.endswith(f"{name}.{kind}")), None) for kind in ("weight", "bias")]


def norm(plan: Plan, w: dict[str, Tensor], name: str, x_SBH: Tensor) -> Tensor:
    m = plan.config.model
    weight, bias = parameters_of(w, name)
    if bias is None:
        return rms_norm(x_SBH, (m.hidden_size,), weight, m.norm_epsilon)
    return layer_norm(x_SBH, (m.hidden_size,), weight, bias, m.norm_epsilon)


def attention(plan: Plan, w: dict[str, Tensor], qkv: Tensor, freqs_SD: Tensor | None) -> Tensor:
    """Return attention's output [S, B, O]; RoPE rotates pairs of coordinates as complex numbers."""
    m = plan.config.model
    groups, dim = m.num_query_groups, m.head_size
    qkv = qkv.unflatten(2, (groups, -1, dim)).permute(1, 2, 3, 0, 4)  # [B, G, R + 2, S, D]
    q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    if m.qk_norm:
        weights = (parameters_of(w, f"{name}_layernorm")[0] for name in "qk")
        q, k = (rms_norm(x, (dim,), weight, m.norm_epsilon) for x, weight in zip((q, k), weights, strict=True))
    if freqs_SD is not None:
        turn = torch.polar(torch.ones_like(freqs_SD[:, : dim // 2]).double(), freqs_SD[:, : dim // 2].double())
        turned = (torch.complex(*x.chunk(2, dim=-1)) * turn for x in (q, k))
        q, k = (torch.cat([x.real, x.imag], dim=-1) for x in turned)
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_autograd_in_fp64(shape: str, precision: str) -> None:
    """Gradients of two micro-batches are accumulated. A repeated pass gives the same, on a CPU bitwise."""
    engine = built(shape, f"precision={precision}")
    layer = engine.unwrapped_chunks()[0].decoder.layers[0]
    weights = dict(layer.named_parameters())
    freqs = engine.unwrapped_chunks()[0].rotary_pos_emb(SEQ) if shape != "gpt3" else None
    expected = {name: p.detach().double().requires_grad_() for name, p in weights.items()}
    inputs = [random(SEQ, BATCH, 32, seed=seed).to(layer.ops.dtype).requires_grad_() for seed in (1, 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradients = backward(engine, layer, inputs, freqs)
    for x, seed in zip(exact, (3, 4), strict=True):
        freqs_SD = None if freqs is None else freqs[:, 0, 0]
        in_fp64(engine.plan, expected, x, freqs_SD).backward(random(SEQ, BATCH, 32, seed=seed).double())
    wanted = {name: p.grad for name, p in expected.items()} | {f"x{i}": x.grad for i, x in enumerate(exact)}
    errors = {name: ((gradients[name] - want).norm() / want.norm()).item() for name, want in wanted.items()}
    assert max(errors.values()) < BOUNDS[precision], errors
    assert max(errors.values()) > BOUNDS[precision] / 20, "the bound must mean something"
    layer.recompute_qkv = layer.recompute_fc1 = True
    repeated = backward(engine, layer, inputs, freqs)
    if ranks.DEVICE == "cpu":
        assert all(torch.equal(repeated[name], gradients[name]) for name in repeated)
    else:  # programs add to sums in any order
        assert all((repeated[name] - gradients[name]).norm() < 1e-3 * gradients[name].norm() for name in repeated)


def built(shape: str, *overrides: str) -> model.ModelAndOptimizer:
    """Return an engine whose biases and norms are also random."""
    full = ("task.training.trains=all", "task.training.lora=null")
    engine = model.build(ranks.compose(Path("unused"), *TINY, *SHAPES[shape], *full, *overrides), seed=1)
    for parameter in engine.unwrapped_chunks()[0].parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) / 4)
    return engine


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(ranks.DEVICE)


def backward(
    engine: model.ModelAndOptimizer, layer: Any, inputs: list[Tensor], freqs: Tensor | None
) -> dict[str, Tensor]:
    """Return the gradients of the layer's weights and of its inputs after both micro-batches."""
    engine.chunks[0].zero_grad_buffer()
    for x_SBH, seed in zip(inputs, (3, 4), strict=True):
        x_SBH.grad = None
        y_SBH, _ = layer(x_SBH, rotary_pos_emb=freqs)
        y_SBH.backward(random(SEQ, BATCH, 32, seed=seed).to(y_SBH.dtype))
    gradients = {name: p.main_grad.double() for name, p in layer.named_parameters()}
    return gradients | {f"x{i}": x.grad.double() for i, x in enumerate(inputs)}


@pytest.mark.long
def test_missing_main_grad_is_an_error() -> None:
    engine = built("llama", "precision=fp32")
    layer = engine.unwrapped_chunks()[0].decoder.layers[0]
    del layer.mlp.linear_fc2.weight.main_grad
    y_SBH, _ = layer(random(SEQ, BATCH, 32, seed=1).requires_grad_(), rotary_pos_emb=None)
    with pytest.raises(RuntimeError, match="wrap the model in megatron-core's DistributedDataParallel"):
        y_SBH.sum().backward()
