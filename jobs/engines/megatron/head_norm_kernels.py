"""The backward pass of RoPE and of the norms of the heads in Triton, from the rows of qkv that the norms read.

A program processes one row, and adds the gradients of the norms' weights over several rows; torch then adds the sums of
all programs in a fixed order. Frozen norms have no such sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron import torch_math
from jobs.engines.megatron.head_norms import HeadNormGradients, HeadNorms
from jobs.engines.megatron.quantize import Quantized
from jobs.engines.megatron.rope_kernels import (
    empty_rows,
    head_offsets,
    is_supported,
    load_heads,
    rounded,
    store_row,
    with_quantized,
)
from jobs.engines.megatron.row_kernels import quantized_like
from jobs.engines.megatron.triton_target import num_multiprocessors

_PROGRAMS = 8
"""Programs per multiprocessor, if they add the gradients of weights: they also need twice the warps for the sums."""


def normed_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor, qkv: Tensor, norms: HeadNorms, *, to_fp8: bool = True
) -> tuple[Tensor, Quantized]:
    """Return the gradient of the rows, and the same quantised to FP8 (or, without FP8, the same tensor)."""
    if not is_supported(dq.shape[2]):
        rows_grad, _ = torch_math.merge_normed_heads(dq, dk, dv, freqs, qkv, norms)
        return with_quantized(rows_grad.to(dq.dtype), to_fp8=to_fp8)
    out = empty_rows(dq, dk)
    quantized = quantized_like(out) if to_fp8 else Quantized(out, None)
    options = {"QUANTIZE": to_fp8, "POWERS": False, "ROWS": 1}
    _launch(dq, dk, dv, freqs, qkv, norms, out, quantized, None, **options)
    return out, quantized


def merge_normed_heads(
    dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor | None, qkv: Tensor, norms: HeadNorms, *, to_fp8: bool
) -> tuple[Quantized, HeadNormGradients]:
    """Return the gradient of the rows, in FP8 with scales that are powers of two, or without a scale; and the weights'.

    The gradients of the weights are in FP32.
    """
    if not is_supported(dq.shape[2]):
        rows_grad, gradients = torch_math.merge_normed_heads(dq, dk, dv, freqs, qkv, norms)
        return with_quantized(rows_grad.to(dq.dtype), to_fp8=to_fp8, powers=True)[1], gradients
    out = empty_rows(dq, dk)
    quantized = quantized_like(out) if to_fp8 else Quantized(out, None)
    num_rows, dim = len(dq), dq.shape[2]
    rows = triton.cdiv(num_rows, num_multiprocessors(dq.device) * _PROGRAMS)
    parts = torch.empty(triton.cdiv(num_rows, rows), 2, dim, dtype=torch.float32, device=dq.device)
    options = {"QUANTIZE": to_fp8, "POWERS": True, "ROWS": rows}
    _launch(dq, dk, dv, freqs, qkv, norms, None if to_fp8 else out, quantized, parts, **options)
    return quantized, HeadNormGradients(*parts.sum(0))


def _launch(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    freqs: Tensor | None,
    qkv: Tensor,
    norms: HeadNorms,
    out: Tensor | None,
    quantized: Quantized,
    parts: Tensor | None,
    **options: Any,
) -> None:
    num_rows, groups, dim = dk.shape
    repeats, grads = dq.shape[1] // groups, (x.contiguous() for x in (dq, dk, dv))
    options |= {"QUERIES": triton.next_power_of_2(groups * repeats), "GROUPS": triton.next_power_of_2(groups)}
    args = (*grads, freqs, qkv, *norms, out, *quantized, parts, num_rows, groups, repeats)
    grid = (triton.cdiv(num_rows, options["ROWS"]),)
    _backward[grid](*args, **options, HALF=dim // 2, num_warps=4 if parts is None else 8)


@triton.jit
def _norm_backward(low, high, x_low, x_high, weight_ptr, eps, HALF: tl.constexpr):
    """Return the gradients of both halves of a norm's input [heads, D / 2], and of both halves of its weight."""
    plane = tl.arange(0, HALF)
    rstd = tl.rsqrt((tl.sum(x_low * x_low, 1) + tl.sum(x_high * x_high, 1)) / (2 * HALF) + eps)[:, None]
    x_low, x_high = x_low * rstd, x_high * rstd
    weight_low, weight_high = tl.sum(low * x_low, 0), tl.sum(high * x_high, 0)
    low *= tl.load(weight_ptr + plane).to(tl.float32)[None, :]
    high *= tl.load(weight_ptr + HALF + plane).to(tl.float32)[None, :]
    along = ((tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1)) / (2 * HALF))[:, None]
    return rstd * (low - x_low * along), rstd * (high - x_high * along), weight_low, weight_high


@triton.jit
def _heads_backward(
    grad_ptr, at, x_ptr, x_at, inside, freqs_ptr, weight_ptr, eps, HALF: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a row's heads of q or k, rounded, and of the norm's weight."""
    low, high = load_heads(grad_ptr, at, inside, HALF)
    if freqs_ptr is not None:
        angle = tl.load(freqs_ptr + tl.arange(0, HALF))[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        low, high = low * cos + high * sin, high * cos - low * sin
    x_low, x_high = load_heads(x_ptr, x_at, inside, HALF)
    low, high, weight_low, weight_high = _norm_backward(low, high, x_low, x_high, weight_ptr, eps, HALF)
    return rounded(low, x_ptr), rounded(high, x_ptr), weight_low, weight_high


@triton.jit
def _backward(
    dq_ptr, dk_ptr, dv_ptr, freqs_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, eps, out_ptr, out_q_ptr, out_scale_ptr,
    parts_ptr, num_rows, groups, repeats, ROWS: tl.constexpr, QUERIES: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    program, programs, plane = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, HALF)
    at_q, q_in_qkv, is_query, at_k, k_in_qkv, is_group = head_offsets(groups, repeats, QUERIES, GROUPS, HALF)
    q_sum_low, q_sum_high = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    k_sum_low, k_sum_high = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for i in tl.range(0, ROWS):
        row = program + i * programs  # of the last rows, some programs have none
        is_row = row < num_rows
        row = tl.minimum(row, num_rows - 1)
        begin, width = row * groups * (repeats + 2) * (2 * HALF), groups * (2 * HALF)
        angles_ptr = freqs_ptr
        if freqs_ptr is not None:
            angles_ptr += row * (2 * HALF)
        q_low, q_high, sum_low, sum_high = _heads_backward(
            dq_ptr + row * width * repeats, at_q, qkv_ptr + begin, q_in_qkv, is_query & is_row, angles_ptr,
            q_weight_ptr, eps, HALF,
        )  # fmt: skip
        q_sum_low, q_sum_high = q_sum_low + sum_low, q_sum_high + sum_high
        k_low, k_high, sum_low, sum_high = _heads_backward(
            dk_ptr + row * width, at_k, qkv_ptr + begin, k_in_qkv, is_group & is_row, angles_ptr,
            k_weight_ptr, eps, HALF,
        )  # fmt: skip
        k_sum_low, k_sum_high = k_sum_low + sum_low, k_sum_high + sum_high
        v_low, v_high = load_heads(dv_ptr + row * width, at_k, is_group & is_row, HALF)
        store_row(
            out_ptr, out_q_ptr, out_scale_ptr, row, is_row, begin, q_in_qkv, is_query & is_row, k_in_qkv,
            is_group & is_row, q_low, q_high, k_low, k_high, v_low, v_high, HALF, QUANTIZE, POWERS,
        )  # fmt: skip
    if parts_ptr is not None:
        at = parts_ptr + program * (4 * HALF) + plane
        tl.store(at, q_sum_low)
        tl.store(at + HALF, q_sum_high)
        tl.store(at + 2 * HALF, k_sum_low)
        tl.store(at + 3 * HALF, k_sum_high)
