"""The layer's operations as Triton kernels, each one pass (SwiGLU: two) over its rows; `reference` says what each returns.

A program takes one row. Numbers are computed in FP32; what is stored in BF16 is rounded before its row is quantised, so
that the kept and the multiplied number are one. Shape letters as in `reference`.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.megatron.fp8.quantized import BF16, FP8, LARGEST, SMALLEST_AMAX, Adapted, Dropout, Quantized

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_CHUNK = 4096
"""Of a row of the MLP, which is too wide for registers."""
_HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Triton's interpreter knows none."""
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


def norm_quantize(
    x: Tensor, weight: Tensor, eps: float, drop: Dropout | None
) -> tuple[Quantized, Tensor, Tensor | None]:
    normed, rstd, out = _quantized(x), _one_a_row(x), torch.empty_like(x) if drop else None
    _rows(_norm_quantize, x, x, weight, x, normed, rstd, out, eps, *_mask(drop), ADD=False, DROP=bool(drop))
    return normed, rstd, out


def add_norm_quantize(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantized, Tensor]:
    total, normed, rstd = torch.empty_like(x), _quantized(x), _one_a_row(x)
    _rows(_norm_quantize, x, y, weight, total, normed, rstd, None, eps, *_mask(None), ADD=True, DROP=False)
    return total, normed, rstd


def norm_backward(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor, adapted: Adapted | None = None
) -> Tensor:
    out = torch.empty_like(grad)
    more, drop = adapted or (None, None)
    args = (residual, normed, rstd, weight, more, *_mask(drop), out, None, None)
    _rows(_norm_backward, grad, *args, ADD=adapted is not None, QUANTIZE=False)
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
    _rows(_quantize_drop, x, out, None, *_mask(None), QUANTIZE=True, DROP=False)
    return out


def quantize_drop(x: Tensor, drop: Dropout | None) -> tuple[Quantized, Tensor | None]:
    quantized, out = _quantized(x), torch.empty_like(x) if drop else None
    _rows(_quantize_drop, x, quantized, out, *_mask(drop), QUANTIZE=True, DROP=bool(drop))
    return quantized, out


def dropped(x: Tensor, drop: Dropout) -> Tensor:
    out = torch.empty_like(x)
    _rows(_quantize_drop, x, None, None, out, *_mask(drop), QUANTIZE=False, DROP=True)
    return out


def dequantize_drop(x: Quantized, drop: Dropout) -> Tensor:
    out = torch.empty(x.values.shape, dtype=BF16, device=x.values.device)
    _rows(_dequantize_drop, out, x, *_mask(drop))
    return out


def add_dropped(x: Tensor, y: Tensor, drop: Dropout) -> Tensor:
    _rows(_add_dropped, x, y, *_mask(drop))
    return x


def rope(qkv: Tensor, freqs: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, dim = len(qkv), freqs.shape[-1]
    repeats = qkv.shape[1] // dim // groups - 2
    q, k, v = (qkv.new_empty(num_rows, heads, dim) for heads in (groups * repeats, groups, groups))
    _rope[(num_rows,)](qkv, freqs, q, k, v, groups, repeats, **_tiles(groups, repeats, dim))
    return q, k, v


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, freqs: Tensor) -> tuple[Tensor, Quantized]:
    num_rows, groups, dim = dk.shape
    repeats = dq.shape[1] // groups
    out = dq.new_empty(num_rows, groups * (repeats + 2) * dim)
    quantized, grads = _quantized(out), (x.contiguous() for x in (dq, dk, dv))
    _rope_backward[(num_rows,)](*grads, freqs, out, *quantized, groups, repeats, **_tiles(groups, repeats, dim))
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


def _tiles(groups: int, repeats: int, dim: int) -> dict[str, int]:
    queries, groups = triton.next_power_of_2(groups * repeats), triton.next_power_of_2(groups)
    return {"QUERIES": queries, "GROUPS": groups, "HALF": dim // 2, "num_warps": 4}


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
def _drop(x, index, seed, threshold, scale):
    """Zero what dropout drops: numbers whose hash, by their index in the tensor, is below the threshold."""
    bits = _hash(index.to(tl.uint32) ^ seed.to(tl.uint32))
    return tl.where(bits >= threshold.to(tl.uint32), x * scale, 0.0)


@triton.jit
def _scale_of(amax):
    return tl.maximum(amax, _SMALLEST_AMAX) / _LARGEST


@_by_value
def _norm_quantize(
    x_ptr, y_ptr, weight_ptr, sum_ptr, q_ptr, scale_ptr, rstd_ptr, dropped_ptr, eps, seed, threshold, keep, width,
    ADD: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
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
    if DROP:
        dropped = _drop(normed, at, seed, threshold, keep)
        tl.store(dropped_ptr + at, dropped.to(dropped_ptr.dtype.element_ty), inside)


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
        grad += _drop(tl.load(more_ptr + at, inside, other=0.0).to(tl.float32), at, seed, threshold, keep)
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


@_by_value
def _quantize_drop(
    x_ptr, q_ptr, scale_ptr, dropped_ptr, seed, threshold, keep, width,
    QUANTIZE: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        scale = _scale_of(tl.max(tl.abs(x), 0))
        tl.store(q_ptr + at, (x / scale).to(q_ptr.dtype.element_ty), inside)
        tl.store(scale_ptr + row, scale)
    if DROP:
        dropped = _drop(x, at, seed, threshold, keep)
        tl.store(dropped_ptr + at, dropped.to(dropped_ptr.dtype.element_ty), inside)


@_by_value
def _dequantize_drop(out_ptr, q_ptr, scale_ptr, seed, threshold, keep, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + at, _drop(x, at, seed, threshold, keep).to(out_ptr.dtype.element_ty), inside)


@_by_value
def _add_dropped(x_ptr, y_ptr, seed, threshold, keep, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    y = _drop(tl.load(y_ptr + at, inside, other=0.0).to(tl.float32), at, seed, threshold, keep)
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, (x + y).to(x_ptr.dtype.element_ty), inside)


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
def _rope(
    qkv_ptr, freqs_ptr, q_ptr, k_ptr, v_ptr, groups, repeats,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at_q, q_in_qkv, is_query, at_k, k_in_qkv, is_group = _places(groups, repeats, QUERIES, GROUPS, HALF)
    angle = tl.load(freqs_ptr + row * (2 * HALF) + tl.arange(0, HALF))[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    qkv_ptr += row * groups * (repeats + 2) * (2 * HALF)
    q_ptr += row * groups * repeats * (2 * HALF)
    k_ptr += row * groups * (2 * HALF)
    v_ptr += row * groups * (2 * HALF)
    low, high = _load_heads(qkv_ptr, q_in_qkv, is_query, HALF)
    _store_heads(q_ptr, at_q, is_query, low * cos - high * sin, high * cos + low * sin, HALF)
    low, high = _load_heads(qkv_ptr, k_in_qkv, is_group, HALF)
    _store_heads(k_ptr, at_k, is_group, low * cos - high * sin, high * cos + low * sin, HALF)
    low, high = _load_heads(qkv_ptr, k_in_qkv + 2 * HALF, is_group, HALF)
    _store_heads(v_ptr, at_k, is_group, low, high, HALF)


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
