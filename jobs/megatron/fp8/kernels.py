"""The layer's operations as Triton kernels, each one pass (SwiGLU: two) over its rows; `reference` says what each returns.

A program takes one row. Numbers are computed in FP32; what is stored in BF16 is rounded before its row is quantised, so
that the kept and the multiplied number are one. Shape letters as in `reference`.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.megatron.fp8.quantized import BF16, FP8, LARGEST, SMALLEST_AMAX, Adapted, Dropout, Lora, Quantized

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_CHUNK = 4096
"""Of a row of the MLP, which is too wide for registers."""
_ROWS, _COLUMNS = 32, 128
"""Of the tiles in which an adapter's A is multiplied."""
_PARTS = 8
"""Of such a product's sum, so that there are enough programs; they are added up after all is done, the same way every time."""
_HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Triton's interpreter knows none."""
_FACTOR = tl.constexpr(tl.bfloat16 if _HAS_PTX.value else tl.float32)
"""What is multiplied on tensor cores; the interpreter's products know no BF16."""
_AGAIN = tl.constexpr("evict_last")
_ONCE = tl.constexpr("evict_first")
"""What a row's first pass reads its second reads again; nothing else is read soon. That halves what comes from memory."""


def matmul(x: Quantized, weight: Quantized) -> Tensor:
    """Return x weight^T in BF16, by cuBLAS; both operands have the summed axis last, as Hopper's FP8 wants it."""
    scale_N = weight.scale.expand(weight.values.shape[0]).contiguous()
    return torch._scaled_mm(
        x.values,
        weight.values.T,
        scale_a=x.scale[:, None],
        scale_b=scale_N[None],
        out_dtype=BF16,
        use_fast_accum=True,
    )


def transpose(weight: Quantized, out: Tensor | None = None) -> Quantized:
    num_rows, num_columns = weight.values.shape
    if out is None:
        out = torch.empty(num_columns * num_rows, dtype=torch.uint8, device=weight.values.device)
    grid = (triton.cdiv(num_rows, 128), triton.cdiv(num_columns, 128))
    _transpose[grid](weight.values.view(torch.uint8), out, num_rows, num_columns, num_warps=8)
    return Quantized(out[: num_columns * num_rows].view(num_columns, num_rows).view(FP8), weight.scale)


def norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    normed, rstd = _quantized(x), _one_a_row(x)
    _rows(_norm_quantize, x, x, weight, x, normed, rstd, eps, ADD=False)
    return normed, rstd


def add_norm_quantize(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantized, Tensor]:
    total, normed, rstd = torch.empty_like(x), _quantized(x), _one_a_row(x)
    _rows(_norm_quantize, x, y, weight, total, normed, rstd, eps, ADD=True)
    return total, normed, rstd


def norm_backward(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor, adapted: Adapted | None = None
) -> Tensor:
    out = torch.empty_like(grad)
    more, drop = adapted or (None, None)
    args = (residual, normed, rstd, weight, more, *_mask(drop), out, None, None)
    _rows(_norm_backward, grad, *args, threads_per_row=1024, ADD=adapted is not None, QUANTIZE=False)
    return out


def norm_backward_quantize(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Quantized]:
    out, quantized = torch.empty_like(grad), _quantized(grad)
    args = (residual, normed, rstd, weight, None, *_mask(None), out, quantized)
    _rows(_norm_backward, grad, *args, threads_per_row=1024, ADD=False, QUANTIZE=True)
    return out, quantized


def quantize(x: Tensor) -> Quantized:
    out = _quantized(x)
    _rows(_quantize, x, out)
    return out


def down(x: Tensor | Quantized, a: Tensor, drop: Dropout) -> Tensor:
    values, scale, of_x = _parts(x)
    (num_rows, width), rank = values.shape, len(a)
    parts = torch.empty(_PARTS, num_rows, rank, dtype=torch.float32, device=a.device)
    grid = (triton.cdiv(num_rows, _ROWS), _PARTS)
    args = (values, scale, a, parts, *_mask(drop), num_rows, rank, width, _PARTS)
    _down[grid](*args, **of_x, **_tile(rank, drop))
    return parts.sum(0).to(BF16)


def down_backward(low_grad: Tensor, x: Tensor | Quantized, drop: Dropout) -> Tensor:
    values, scale, of_x = _parts(x)
    (num_rows, width), rank = values.shape, low_grad.shape[1]
    parts = torch.empty(_PARTS, rank, width, dtype=torch.float32, device=low_grad.device)
    grid = (triton.cdiv(width, _COLUMNS), _PARTS)
    args = (low_grad.contiguous(), values, scale, parts, *_mask(drop), width, rank, num_rows, _PARTS)
    _down_backward[grid](*args, **of_x, **_tile(rank, drop))
    return parts.sum(0).to(BF16)


def add_down_gradient(grad: Tensor, low_grad: Tensor, a: Tensor, drop: Dropout) -> Tensor:
    (num_rows, width), rank = grad.shape, len(a)
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _COLUMNS))
    args = (grad, low_grad.contiguous(), a, *_mask(drop), num_rows, width, rank)
    _add_down_gradient[grid](*args, **_tile(rank, drop))
    return grad


def rope(qkv: Tensor, freqs: Tensor, groups: int, lora: Lora | None = None) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, dim = len(qkv), freqs.shape[-1]
    repeats = qkv.shape[1] // dim // groups - 2
    q, k, v = (qkv.new_empty(num_rows, heads, dim) for heads in (groups * repeats, groups, groups))
    low, b, scale = lora or (qkv, qkv, 0.0)
    rank = low.shape[1] if lora else 0
    options = {"ROWS": 16, "HALF": dim // 2, "RANK": _padded(rank), "num_warps": 4}
    _rope[(triton.cdiv(num_rows, 16), groups)](qkv, freqs, low, b, scale, q, k, v, num_rows, rank, repeats, **options)
    return q, k, v


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor) -> tuple[Tensor, Quantized]:
    num_rows, groups, dim = dk.shape
    repeats = dq.shape[1] // groups
    out = dq.new_empty(num_rows, groups * (repeats + 2) * dim)
    quantized, grads = _quantized(out), (x.contiguous() for x in (dq, dk, dv))
    padded = {"QUERIES": triton.next_power_of_2(groups * repeats), "GROUPS": triton.next_power_of_2(groups)}
    options = padded | {"HALF": dim // 2, "num_warps": 4}
    _rope_backward[(num_rows,)](*grads, freqs, out, *quantized, groups, repeats, **options)
    return out, quantized


def swiglu_quantize(gate_up: Tensor, *, keep: bool = True) -> tuple[Quantized, Quantized | None]:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty(num_rows, width, gate_up.device)
    kept = _empty(2 * num_rows, width, gate_up.device) if keep else None
    options = {"WIDTH": width, "CHUNK": _CHUNK, "KEEP": keep, "num_warps": 16}
    _swiglu[(num_rows,)](gate_up, *out, *(kept or (None, None)), num_rows, **options)
    return out, kept


def swiglu_backward_quantize(grad: Tensor, kept: Quantized) -> Quantized:
    num_rows, width = grad.shape
    out = _empty(num_rows, 2 * width, grad.device)
    _swiglu_backward[(num_rows,)](grad, *kept, *out, num_rows, WIDTH=width, CHUNK=_CHUNK, num_warps=16)
    return out


def _rows(kernel, x: Tensor, *args, threads_per_row: int = 256, **constants) -> None:
    """Start a kernel that holds a whole row in registers."""
    width = x.shape[1]
    flat = [part for arg in args for part in (arg if isinstance(arg, Quantized) else (arg,))]
    block = triton.next_power_of_2(width)
    num_warps = max(1, min(threads_per_row, block // 8) // 32)
    kernel[(len(x),)](x, *flat, width, **constants, BLOCK=block, num_warps=num_warps)


def _parts(x: Tensor | Quantized) -> tuple[Tensor, Tensor, dict[str, bool]]:
    values, scale = x if isinstance(x, Quantized) else (x, x)
    return values, scale, {"SCALED": isinstance(x, Quantized)}


def _tile(rank: int, drop: Dropout) -> dict[str, int]:
    shape = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "RANK": _padded(rank)}
    return shape | {"DROP": drop.threshold > 0, "num_warps": 4, "num_stages": 4}


def _padded(rank: int) -> int:
    """Return the rank as products on tensor cores want it."""
    return max(16, triton.next_power_of_2(rank)) if rank else 0


def _mask(drop: Dropout | None) -> tuple[int, int, float]:
    return (drop.seed, drop.threshold, drop.scale) if drop else (0, 0, 1.0)


def _quantized(like: Tensor) -> Quantized:
    return _empty(*like.shape, like.device)


def _empty(num_rows: int, width: int, device: torch.device) -> Quantized:
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Quantized(values, torch.empty(num_rows, dtype=torch.float32, device=device))


def _one_a_row(like: Tensor) -> Tensor:
    return torch.empty(len(like), dtype=torch.float32, device=like.device)


_by_value = triton.jit(do_not_specialize=["seed", "threshold"])
"""One compilation for all seeds."""


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stays(row, column, width, seed, threshold):
    """Return which numbers dropout leaves: those whose half of a hash, which two neighbours share, is not below the threshold."""
    bits = _hash((row * (width // 2) + column // 2).to(tl.uint32) ^ seed.to(tl.uint32))
    return tl.where(column % 2 == 0, bits & 0xFFFF, bits >> 16) >= threshold.to(tl.uint32)


@triton.jit
def _scale_of(amax):
    return tl.maximum(amax, _SMALLEST_AMAX) / _LARGEST


@triton.jit
def _norm_quantize(
    x_ptr, y_ptr, weight_ptr, sum_ptr, q_ptr, scale_ptr, rstd_ptr, eps, width, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(y_ptr + at, inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, total, inside)
        x = total.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    normed = x * rstd * tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(normed), 0))
    tl.store(q_ptr + at, (normed / scale).to(q_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + row, scale)
    tl.store(rstd_ptr + row, rstd)


@_by_value
def _norm_backward(
    grad_ptr, residual_ptr, q_ptr, scale_ptr, rstd_ptr, weight_ptr, more_ptr, seed, threshold, keep,
    out_ptr, out_q_ptr, out_scale_ptr, width,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(more_ptr + at, inside, other=0.0).to(tl.float32) * keep
        grad += tl.where(_stays(row, column, width, seed, threshold), more, 0.0)
    grad *= weight
    normed = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
    unit = tl.where(weight == 0, 0.0, normed / tl.where(weight == 0, 1.0, weight))
    along = tl.sum(grad * unit, 0) / width
    out = tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
    out = (out + tl.load(rstd_ptr + row) * (grad - unit * along)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, inside)
    if QUANTIZE:
        out = out.to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(out), 0))
        tl.store(out_q_ptr + at, (out / scale).to(out_q_ptr.dtype.element_ty), inside)
        tl.store(out_scale_ptr + row, scale)


@triton.jit
def _quantize(x_ptr, q_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(x), 0))
    tl.store(q_ptr + at, (x / scale).to(q_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _load_dropped(x_ptr, row, column, num_rows, width, seed, threshold, DROP: tl.constexpr):
    """Return a tile of numbers in BF16, some dropped, the others as they are."""
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], inside, other=0.0).to(_FACTOR)
    if DROP:
        x = tl.where(_stays(row[:, None], column[None, :], width, seed, threshold), x, 0.0)
    return x


@_by_value
def _down(
    x_ptr, scale_ptr, a_ptr, parts_ptr, seed, threshold, keep, num_rows, rank, width: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part, low = tl.program_id(1).to(tl.int64), tl.arange(0, RANK)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, width, PARTS * COLUMNS):
        column = start + part * COLUMNS + tl.arange(0, COLUMNS)
        x = _load_dropped(x_ptr, row, column, num_rows, width, seed, threshold, DROP)
        inside = (column < width)[:, None] & (low < rank)[None, :]
        a = tl.load(a_ptr + low[None, :] * width + column[:, None], inside, other=0.0)
        total = tl.dot(x, a.to(_FACTOR), total)
    total *= keep
    if SCALED:
        total *= tl.load(scale_ptr + row, row < num_rows, other=0.0)[:, None]
    at = (part * num_rows + row)[:, None] * rank + low[None, :]
    tl.store(parts_ptr + at, total, (row < num_rows)[:, None] & (low < rank)[None, :])


@_by_value
def _down_backward(
    low_grad_ptr, x_ptr, scale_ptr, parts_ptr, seed, threshold, keep, width, rank, num_rows: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part, low = tl.program_id(1).to(tl.int64), tl.arange(0, RANK)
    total = tl.zeros([RANK, COLUMNS], tl.float32)
    for start in range(0, num_rows, PARTS * ROWS):
        row = start + part * ROWS + tl.arange(0, ROWS)
        x = _load_dropped(x_ptr, row, column, num_rows, width, seed, threshold, DROP)
        inside = (low < rank)[:, None] & (row < num_rows)[None, :]
        low_grad = tl.load(low_grad_ptr + row[None, :] * rank + low[:, None], inside, other=0.0)
        if SCALED:
            low_grad = low_grad.to(tl.float32) * tl.load(scale_ptr + row, row < num_rows, other=0.0)[None, :]
        total = tl.dot(low_grad.to(_FACTOR), x, total)
    at = (part * rank + low)[:, None] * width + column[None, :]
    tl.store(parts_ptr + at, total * keep, (low < rank)[:, None] & (column < width)[None, :])


@_by_value
def _add_down_gradient(
    grad_ptr, low_grad_ptr, a_ptr, seed, threshold, keep, num_rows, width, rank,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, low = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    is_row, is_column, is_low = row < num_rows, column < width, low < rank
    low_grad = tl.load(low_grad_ptr + row[:, None] * rank + low[None, :], is_row[:, None] & is_low[None, :], other=0.0)
    a = tl.load(a_ptr + low[:, None] * width + column[None, :], is_low[:, None] & is_column[None, :], other=0.0)
    more = tl.dot(low_grad.to(_FACTOR), a.to(_FACTOR)) * keep
    if DROP:
        more = tl.where(_stays(row[:, None], column[None, :], width, seed, threshold), more, 0.0)
    at, inside = grad_ptr + row[:, None] * width + column[None, :], is_row[:, None] & is_column[None, :]
    tl.store(at, (tl.load(at, inside, other=0.0).to(tl.float32) + more).to(grad_ptr.dtype.element_ty), inside)


@triton.jit
def _load_heads(row_ptr, at, inside, HALF: tl.constexpr):
    """Return both halves of heads, as FP32."""
    low = tl.load(row_ptr + at, inside, other=0.0).to(tl.float32)
    return low, tl.load(row_ptr + at + HALF, inside, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(row_ptr, at, inside, low, high, HALF: tl.constexpr):
    tl.store(row_ptr + at, low.to(row_ptr.dtype.element_ty), inside)
    tl.store(row_ptr + at + HALF, high.to(row_ptr.dtype.element_ty), inside)


@triton.jit
def _places(groups, repeats, QUERIES: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Return where a row's heads begin: queries in q and in qkv, keys in k and in qkv; and which of them exist."""
    query, group, plane = tl.arange(0, QUERIES)[:, None], tl.arange(0, GROUPS)[:, None], tl.arange(0, HALF)[None, :]
    q_in_qkv = (query // repeats * (repeats + 2) + query % repeats) * (2 * HALF) + plane
    k_in_qkv = (group * (repeats + 2) + repeats) * (2 * HALF) + plane
    is_query, is_group = (query < groups * repeats) & (plane >= 0), (group < groups) & (plane >= 0)
    return query * (2 * HALF) + plane, q_in_qkv, is_query, group * (2 * HALF) + plane, k_in_qkv, is_group


@triton.jit
def _half_head(
    qkv_ptr, low, b_ptr, lora_scale, begin, row, num_rows, width, rank, HALF: tl.constexpr, RANK: tl.constexpr
):
    """Return half a head of qkv's rows in FP32, with what an adapter adds to it."""
    column = begin + tl.arange(0, HALF)
    x = tl.load(qkv_ptr + row[:, None] * width + column[None, :], (row < num_rows)[:, None], other=0.0).to(tl.float32)
    if RANK:
        r = tl.arange(0, RANK)
        b = tl.load(b_ptr + column[None, :] * rank + r[:, None], (r < rank)[:, None], other=0.0)
        x += lora_scale * tl.dot(low, b.to(_FACTOR))
    return x


@triton.jit
def _rope(
    qkv_ptr, freqs_ptr, low_ptr, b_ptr, lora_scale, q_ptr, k_ptr, v_ptr, num_rows, rank, repeats: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    groups, plane, inside = tl.num_programs(1), tl.arange(0, HALF)[None, :], (row < num_rows)[:, None]
    width = groups * (repeats + 2) * (2 * HALF)
    angle = tl.load(freqs_ptr + row[:, None] * (2 * HALF) + plane, inside, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    low = 0.0
    if RANK:
        r = tl.arange(0, RANK)[None, :]
        low = tl.load(low_ptr + row[:, None] * rank + r, inside & (r < rank), other=0.0).to(_FACTOR)
    for head in range(repeats + 2):
        begin = (group * (repeats + 2) + head) * (2 * HALF)
        x = _half_head(qkv_ptr, low, b_ptr, lora_scale, begin, row, num_rows, width, rank, HALF, RANK)
        y = _half_head(qkv_ptr, low, b_ptr, lora_scale, begin + HALF, row, num_rows, width, rank, HALF, RANK)
        if head <= repeats:
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
def _rounded(x, pointer):
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def _most(low, high):
    return tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)


@triton.jit
def _rope_backward(
    dq_ptr, dk_ptr, dv_ptr, freqs_ptr, out_ptr, out_q_ptr, out_scale_ptr, groups, repeats,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at_q, q_in_qkv, is_query, at_k, k_in_qkv, is_group = _places(groups, repeats, QUERIES, GROUPS, HALF)
    angle = tl.load(freqs_ptr + row * (2 * HALF) + tl.arange(0, HALF))[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    low, high = _load_heads(dq_ptr + row * groups * repeats * (2 * HALF), at_q, is_query, HALF)
    q_low, q_high = _rounded(low * cos + high * sin, out_ptr), _rounded(high * cos - low * sin, out_ptr)
    low, high = _load_heads(dk_ptr + row * groups * (2 * HALF), at_k, is_group, HALF)
    k_low, k_high = _rounded(low * cos + high * sin, out_ptr), _rounded(high * cos - low * sin, out_ptr)
    v_low, v_high = _load_heads(dv_ptr + row * groups * (2 * HALF), at_k, is_group, HALF)
    out_ptr += row * groups * (repeats + 2) * (2 * HALF)
    _store_heads(out_ptr, q_in_qkv, is_query, q_low, q_high, HALF)
    _store_heads(out_ptr, k_in_qkv, is_group, k_low, k_high, HALF)
    _store_heads(out_ptr, k_in_qkv + 2 * HALF, is_group, v_low, v_high, HALF)
    scale = _scale_of(tl.maximum(_most(q_low, q_high), tl.maximum(_most(k_low, k_high), _most(v_low, v_high))))
    out_q_ptr += row * groups * (repeats + 2) * (2 * HALF)
    _store_heads(out_q_ptr, q_in_qkv, is_query, q_low / scale, q_high / scale, HALF)
    _store_heads(out_q_ptr, k_in_qkv, is_group, k_low / scale, k_high / scale, HALF)
    _store_heads(out_q_ptr, k_in_qkv + 2 * HALF, is_group, v_low / scale, v_high / scale, HALF)
    tl.store(out_scale_ptr + row, scale)


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) through the tanh of the hardware: one special function instead of two, to 2^-11."""
    if _HAS_PTX:
        tanh: tl.constexpr = "tanh.approx.f32 $0, $1;"
        half = tl.inline_asm_elementwise(tanh, "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        half = 2.0 / (1.0 + tl.exp(-x)) - 1.0
    return 0.5 * half + 0.5


@triton.jit
def _swiglu(
    gate_up_ptr, q_ptr, scale_ptr, kept_ptr, kept_scale_ptr, num_rows,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([CHUNK], tl.float32)
    most_gate, most_up = most, most
    for start in range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside, at = column < WIDTH, gate_up_ptr + row * 2 * WIDTH + column
        gate = tl.load(at, inside, other=0.0, eviction_policy=_AGAIN).to(tl.float32)
        up = tl.load(at + WIDTH, inside, other=0.0, eviction_policy=_AGAIN).to(tl.float32)
        most = tl.maximum(most, tl.abs(gate * _sigmoid(gate) * up))
        if KEEP:
            most_gate, most_up = tl.maximum(most_gate, tl.abs(gate)), tl.maximum(most_up, tl.abs(up))
    scale = _scale_of(tl.max(most, 0))
    tl.store(scale_ptr + row, scale)
    if KEEP:
        scale_gate, scale_up = _scale_of(tl.max(most_gate, 0)), _scale_of(tl.max(most_up, 0))
        tl.store(kept_scale_ptr + row, scale_gate)
        tl.store(kept_scale_ptr + num_rows + row, scale_up)
        up_ptr = kept_ptr + tl.cast(num_rows, tl.int64) * WIDTH
    for back in range(0, WIDTH, CHUNK):  # what was read last is the likeliest to be still there
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        inside, at = column < WIDTH, gate_up_ptr + row * 2 * WIDTH + column
        gate = tl.load(at, inside, other=0.0, eviction_policy=_ONCE).to(tl.float32)
        up = tl.load(at + WIDTH, inside, other=0.0, eviction_policy=_ONCE).to(tl.float32)
        here = row * WIDTH + column
        _store_once(q_ptr + here, gate * _sigmoid(gate) * up * (1.0 / scale), inside)
        if KEEP:
            _store_once(kept_ptr + here, gate * (1.0 / scale_gate), inside)
            _store_once(up_ptr + here, up * (1.0 / scale_up), inside)


@triton.jit
def _store_once(at, x, inside):
    tl.store(at, x.to(at.dtype.element_ty), inside, eviction_policy=_ONCE)


@triton.jit
def _swiglu_gradients(grad_ptr, gate_ptr, up_ptr, here, inside, scale_gate, scale_up, POLICY: tl.constexpr):
    grad = tl.load(grad_ptr + here, inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    gate = tl.load(gate_ptr + here, inside, other=0.0, eviction_policy=POLICY).to(tl.float32) * scale_gate
    up = tl.load(up_ptr + here, inside, other=0.0, eviction_policy=POLICY).to(tl.float32) * scale_up
    sigmoid = _sigmoid(gate)
    return grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), grad * gate * sigmoid


@triton.jit
def _swiglu_backward(
    grad_ptr, kept_ptr, kept_scale_ptr, out_ptr, out_scale_ptr, num_rows, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale_gate, scale_up = tl.load(kept_scale_ptr + row), tl.load(kept_scale_ptr + num_rows + row)
    up_ptr = kept_ptr + tl.cast(num_rows, tl.int64) * WIDTH
    most = tl.zeros([CHUNK], tl.float32)
    for start in range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside, here = column < WIDTH, row * WIDTH + column
        dgate, dup = _swiglu_gradients(grad_ptr, kept_ptr, up_ptr, here, inside, scale_gate, scale_up, _AGAIN)
        most = tl.maximum(most, tl.maximum(tl.abs(dgate), tl.abs(dup)))
    scale = _scale_of(tl.max(most, 0))
    tl.store(out_scale_ptr + row, scale)
    for back in range(0, WIDTH, CHUNK):  # as in the forward pass
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        inside, here = column < WIDTH, row * WIDTH + column
        dgate, dup = _swiglu_gradients(grad_ptr, kept_ptr, up_ptr, here, inside, scale_gate, scale_up, _ONCE)
        at = out_ptr + row * 2 * WIDTH + column
        _store_once(at, dgate * (1.0 / scale), inside)
        _store_once(at + WIDTH, dup * (1.0 / scale), inside)


@triton.jit
def _transpose(in_ptr, out_ptr, num_rows, num_columns):
    row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(in_ptr + row[:, None] * num_columns + column[None, :], inside)
    tl.store(out_ptr + column[:, None] * num_rows + row[None, :], tl.trans(tile), tl.trans(inside))
