"""RoPE in Triton, forward and backward. A forward program processes a tile of the heads of one or more groups, and
first adds the output of the adapter's B and the linear's bias, and applies the norms of the heads; a backward program
processes one row, without norms (`head_norm_kernels` has the pass with norms). Without angles the heads are only split
and merged. Heads whose size is not a power of two are left to plain torch.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron import torch_math
from jobs.engines.megatron.frozen.lora_kernels import padded
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.quantize import Lora, Quantized
from jobs.engines.megatron.row_kernels import quantize, quantized_like, scale_of
from jobs.engines.megatron.triton_target import FACTOR

_ROWS, _ROWS_OF_LARGE_RANK = 16, 64
"""Rows per forward program. Each program reads B, which must not take longer than reading qkv."""
_PROGRAMS = 512
"""Minimum number of forward programs for a large B, if there are enough groups. The groups of one program share its
sines and cosines, which otherwise are a third of its instructions."""
_REGISTERS = 128
"""Maximum registers per thread for a large B, so that two programs fit on a multiprocessor."""


NO_NORMS = (None, None, 0.0)
"""The arguments of the kernel in place of the norms of the heads."""


def rope(
    qkv: Tensor,
    freqs: Tensor,
    groups: int,
    lora: Lora | None = None,
    bias: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return split_heads(qkv, bias, freqs, groups, freqs.shape[-1], lora, norms)


def split_heads(
    qkv: Tensor,
    bias: Tensor | None,
    freqs: Tensor | None,
    groups: int,
    dim: int,
    lora: Lora | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the rows of qkv, each contiguous.

    With norms, qkv is overwritten by the sum that they read: with the bias and the adapter's output, rounded.
    """
    if not is_supported(dim):
        return torch_math.split_heads(qkv, bias, freqs, groups, dim, lora, norms)
    num_rows, repeats = len(qkv), qkv.shape[1] // dim // groups - 2
    q, k, v = (qkv.new_empty(num_rows, heads, dim) for heads in (groups * repeats, groups, groups))
    low, b, scale = lora or (qkv, qkv, 0.0)
    rank = low.shape[1] if lora else 0
    options = _tile(num_rows, groups, rank) | {"HALF": dim // 2, "RANK": padded(rank)}
    options["OVERWRITE"] = norms is not None and (bias is not None or lora is not None)
    grid = (triton.cdiv(num_rows, options["ROWS"]), groups // options["GROUPS"])
    _rope[grid](qkv, bias, freqs, low, b, scale, *(norms or NO_NORMS), q, k, v, num_rows, rank, repeats, **options)
    return q, k, v


def is_supported(dim: int) -> bool:
    """Return whether the kernels support heads of this size; see also bench.contract.layers.has_head_kernels."""
    return dim & (dim - 1) == 0


def with_quantized(rows: Tensor, *, to_fp8: bool, powers: bool = False) -> tuple[Tensor, Quantized]:
    """Return rows, and the same quantised to FP8 (or, without FP8, the same tensor)."""
    return rows, quantize(rows, powers=powers) if to_fp8 else Quantized(rows, None)


def _tile(num_rows: int, groups: int, rank: int) -> dict[str, Any]:
    """Return rows and groups per forward program, and its compile options."""
    if rank <= 16:
        return {"ROWS": _ROWS, "GROUPS": 1, "STAGES": None, "num_warps": 4}
    most = max(1, groups * triton.cdiv(num_rows, _ROWS_OF_LARGE_RANK) // _PROGRAMS)
    per_program = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)
    shape = {"ROWS": _ROWS_OF_LARGE_RANK, "GROUPS": per_program, "STAGES": 3}
    return shape | {"num_warps": 8, "maxnreg": _REGISTERS}


def rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor, *, to_fp8: bool = True
) -> tuple[Tensor, Quantized]:
    """Return the gradient of the rows, and the same quantised to FP8 (or, without FP8, the same tensor)."""
    if not is_supported(dq.shape[2]):
        return with_quantized(torch_math.merge_heads(dq, dk, dv, freqs).to(dq.dtype), to_fp8=to_fp8)
    out = empty_rows(dq, dk)
    quantized = quantized_like(out) if to_fp8 else Quantized(out, None)
    _launch_backward(dq, dk, dv, freqs, out, quantized, QUANTIZE=to_fp8, POWERS=False)
    return out, quantized


def merge_heads(dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor | None, *, to_fp8: bool) -> Quantized:
    """Return the gradient of the rows, in FP8 with scales that are powers of two, or without a scale."""
    if not is_supported(dq.shape[2]):
        return with_quantized(torch_math.merge_heads(dq, dk, dv, freqs).to(dq.dtype), to_fp8=to_fp8, powers=True)[1]
    out = empty_rows(dq, dk)
    quantized = quantized_like(out) if to_fp8 else Quantized(out, None)
    _launch_backward(dq, dk, dv, freqs, None if to_fp8 else out, quantized, QUANTIZE=to_fp8, POWERS=True)
    return quantized


def empty_rows(dq: Tensor, dk: Tensor) -> Tensor:
    """Return uninitialised rows of qkv."""
    num_rows, groups, dim = dk.shape
    return dq.new_empty(num_rows, (dq.shape[1] + 2 * groups) * dim)


def _launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor | None, out: Tensor | None, quantized: Quantized, **options: Any
) -> None:
    num_rows, groups, dim = dk.shape
    repeats, grads = dq.shape[1] // groups, (x.contiguous() for x in (dq, dk, dv))
    options |= {"QUERIES": triton.next_power_of_2(groups * repeats), "GROUPS": triton.next_power_of_2(groups)}
    args = (*grads, freqs, out, *quantized, groups, repeats)
    _rope_backward[(num_rows,)](*args, **options, HALF=dim // 2, num_warps=4)


@triton.jit
def load_heads(row_ptr, at, inside, HALF: tl.constexpr):
    """Return both halves of heads in FP32."""
    low = tl.load(row_ptr + at, inside, other=0.0).to(tl.float32)
    return low, tl.load(row_ptr + at + HALF, inside, other=0.0).to(tl.float32)


@triton.jit
def store_heads(row_ptr, at, inside, low, high, HALF: tl.constexpr):
    tl.store(row_ptr + at, low.to(row_ptr.dtype.element_ty), inside)
    tl.store(row_ptr + at + HALF, high.to(row_ptr.dtype.element_ty), inside)


@triton.jit
def head_offsets(groups, repeats, QUERIES: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Return the offsets of a row's heads (queries in q and qkv, keys in k and qkv), and their masks."""
    query, group, plane = tl.arange(0, QUERIES)[:, None], tl.arange(0, GROUPS)[:, None], tl.arange(0, HALF)[None, :]
    q_in_qkv = (query // repeats * (repeats + 2) + query % repeats) * (2 * HALF) + plane
    k_in_qkv = (group * (repeats + 2) + repeats) * (2 * HALF) + plane
    is_query, is_group = (query < groups * repeats) & (plane >= 0), (group < groups) & (plane >= 0)
    return query * (2 * HALF) + plane, q_in_qkv, is_query, group * (2 * HALF) + plane, k_in_qkv, is_group


@triton.jit
def _half_head(
    qkv_ptr, bias_ptr, low, b_ptr, lora_scale, begin, row, num_rows, width, rank,
    HALF: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Return half a head of qkv's rows in FP32, with the bias and the adapter's output added."""
    column = begin + tl.arange(0, HALF)
    x = tl.load(qkv_ptr + row[:, None] * width + column[None, :], (row < num_rows)[:, None], other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column).to(tl.float32)[None, :]
    if RANK:
        r = tl.arange(0, RANK)
        b = tl.load(b_ptr + column[None, :] * rank + r[:, None], (r < rank)[:, None], other=0.0)
        x += lora_scale * tl.dot(low, b.to(FACTOR))
    return x


@triton.jit
def _normed(x, y, q_weight_ptr, k_weight_ptr, is_query, eps, HALF: tl.constexpr):
    """Return both halves of heads [rows, D / 2], normalised, with the weights of q's or of k's norm."""
    plane = tl.arange(0, HALF)
    weight_ptr = q_weight_ptr if is_query else k_weight_ptr
    low, high = tl.load(weight_ptr + plane).to(tl.float32), tl.load(weight_ptr + HALF + plane).to(tl.float32)
    rstd = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
    return x * rstd * low[None, :], y * rstd * high[None, :]


@triton.jit
def _rope(
    qkv_ptr, bias_ptr, freqs_ptr, low_ptr, b_ptr, lora_scale, q_weight_ptr, k_weight_ptr, eps, q_ptr, k_ptr, v_ptr,
    num_rows, rank, repeats: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
    HALF: tl.constexpr, RANK: tl.constexpr, OVERWRITE: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * GROUPS
    groups, plane, inside = tl.num_programs(1) * GROUPS, tl.arange(0, HALF)[None, :], (row < num_rows)[:, None]
    width = groups * (repeats + 2) * (2 * HALF)
    if freqs_ptr is not None:
        angle = tl.load(freqs_ptr + row[:, None] * (2 * HALF) + plane, inside, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
    low = 0.0
    if RANK:
        r = tl.arange(0, RANK)[None, :]
        low = tl.load(low_ptr + row[:, None] * rank + r, inside & (r < rank), other=0.0).to(FACTOR)
    for index in tl.range(0, GROUPS * (repeats + 2), num_stages=STAGES):
        group, head = first + index // (repeats + 2), index % (repeats + 2)
        begin = (group * (repeats + 2) + head) * (2 * HALF)
        x = _half_head(qkv_ptr, bias_ptr, low, b_ptr, lora_scale, begin, row, num_rows, width, rank, HALF, RANK)
        y = _half_head(qkv_ptr, bias_ptr, low, b_ptr, lora_scale, begin + HALF, row, num_rows, width, rank, HALF, RANK)
        if OVERWRITE:
            x, y = rounded(x, qkv_ptr), rounded(y, qkv_ptr)
            at = qkv_ptr + row[:, None] * width + begin + plane
            tl.store(at, x.to(qkv_ptr.dtype.element_ty), inside)
            tl.store(at + HALF, y.to(qkv_ptr.dtype.element_ty), inside)
        if q_weight_ptr is not None and head <= repeats:
            x, y = _normed(x, y, q_weight_ptr, k_weight_ptr, head < repeats, eps, HALF)
        if freqs_ptr is not None and head <= repeats:
            x, y = x * cos - y * sin, y * cos + x * sin
        if head < repeats:
            out = q_ptr + row[:, None] * (groups * repeats * 2 * HALF) + (group * repeats + head) * (2 * HALF) + plane
        elif head == repeats:
            out = k_ptr + row[:, None] * (groups * 2 * HALF) + group * (2 * HALF) + plane
        else:
            out = v_ptr + row[:, None] * (groups * 2 * HALF) + group * (2 * HALF) + plane
        tl.store(out, x.to(q_ptr.dtype.element_ty), inside)
        tl.store(out + HALF, y.to(q_ptr.dtype.element_ty), inside)


@triton.jit
def rounded(x, pointer):
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def _largest(low, high):
    return tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)


@triton.jit
def _rotated_back(low, high, cos, sin, pointer):
    """Return both halves rotated by minus the angle and rounded; without an angle, unchanged."""
    if cos is not None:
        low, high = rounded(low * cos + high * sin, pointer), rounded(high * cos - low * sin, pointer)
    return low, high


@triton.jit
def store_row(
    out_ptr, out_q_ptr, out_scale_ptr, row, is_row, begin, q_in_qkv, is_query, k_in_qkv, is_group,
    q_low, q_high, k_low, k_high, v_low, v_high, HALF: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a row's heads, and the same in FP8 with their scale."""
    if out_ptr is not None:
        store_heads(out_ptr + begin, q_in_qkv, is_query, q_low, q_high, HALF)
        store_heads(out_ptr + begin, k_in_qkv, is_group, k_low, k_high, HALF)
        store_heads(out_ptr + begin, k_in_qkv + 2 * HALF, is_group, v_low, v_high, HALF)
    if QUANTIZE:
        most = tl.maximum(_largest(q_low, q_high), tl.maximum(_largest(k_low, k_high), _largest(v_low, v_high)))
        scale = scale_of(most, POWERS)
        store_heads(out_q_ptr + begin, q_in_qkv, is_query, q_low / scale, q_high / scale, HALF)
        store_heads(out_q_ptr + begin, k_in_qkv, is_group, k_low / scale, k_high / scale, HALF)
        store_heads(out_q_ptr + begin, k_in_qkv + 2 * HALF, is_group, v_low / scale, v_high / scale, HALF)
        tl.store(out_scale_ptr + row, scale, is_row)


@triton.jit
def _rope_backward(
    dq_ptr, dk_ptr, dv_ptr, freqs_ptr, out_ptr, out_q_ptr, out_scale_ptr, groups, repeats, QUERIES: tl.constexpr,
    GROUPS: tl.constexpr, HALF: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at_q, q_in_qkv, is_query, at_k, k_in_qkv, is_group = head_offsets(groups, repeats, QUERIES, GROUPS, HALF)
    cos, sin = None, None
    if freqs_ptr is not None:
        angle = tl.load(freqs_ptr + row * (2 * HALF) + tl.arange(0, HALF))[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
    low, high = load_heads(dq_ptr + row * groups * repeats * (2 * HALF), at_q, is_query, HALF)
    q_low, q_high = _rotated_back(low, high, cos, sin, dq_ptr)
    low, high = load_heads(dk_ptr + row * groups * (2 * HALF), at_k, is_group, HALF)
    k_low, k_high = _rotated_back(low, high, cos, sin, dk_ptr)
    v_low, v_high = load_heads(dv_ptr + row * groups * (2 * HALF), at_k, is_group, HALF)
    begin = row * groups * (repeats + 2) * (2 * HALF)
    store_row(
        out_ptr, out_q_ptr, out_scale_ptr, row, row >= 0, begin, q_in_qkv, is_query, k_in_qkv, is_group,
        q_low, q_high, k_low, k_high, v_low, v_high, HALF, QUANTIZE, POWERS,
    )  # fmt: skip
