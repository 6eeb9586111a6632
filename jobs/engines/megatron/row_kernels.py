"""Row-wise operations in Triton: norms, SwiGLU and quantisation, in one pass over each row (SwiGLU in FP8: two).

Each program computes one row in FP32. A result that is also stored in BF16 is rounded to BF16 before it is quantised,
so that both copies hold the same values. With to_fp8=False nothing is quantised: a result has the data type of the
input, and its scale is None.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.dropout_kernels import is_kept, jit_for_any_seed, mask_args
from jobs.engines.megatron.quantize import FP8, LARGEST, SMALLEST_AMAX, Adapted, Quantized
from jobs.engines.megatron.triton_target import HAS_PTX

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_CHUNK = 4096  # columns of an MLP's row that are processed at once: a whole row does not fit in registers
_AGAIN = tl.constexpr("evict_last")
_ONCE = tl.constexpr("evict_first")
"""L2 policies: the second pass over a row reads the same data from L2, which halves the traffic from memory."""


def norm_quantize(x: Tensor, weight: Tensor, eps: float, *, to_fp8: bool = True) -> tuple[Quantized, Tensor]:
    normed, rstd = _empty_like(x, to_fp8), _scale_per_row(x)
    _launch_rows(_norm_quantize, x, x, weight, x, normed, rstd, eps, ADD=False, QUANTIZE=to_fp8)
    return normed, rstd


def add_norm_quantize(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, to_fp8: bool = True
) -> tuple[Tensor, Quantized, Tensor]:
    total, normed, rstd = torch.empty_like(x), _empty_like(x, to_fp8), _scale_per_row(x)
    _launch_rows(_norm_quantize, x, y, weight, total, normed, rstd, eps, ADD=True, QUANTIZE=to_fp8)
    return total, normed, rstd


def norm_backward(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor, adapted: Adapted | None = None
) -> Tensor:
    out = torch.empty_like(grad)
    more, drop = adapted or (None, None)
    args = (residual, normed, rstd, weight, more, *mask_args(drop), out, None, None)
    options = {"ADD": adapted is not None, "SCALED": normed.scale is not None, "QUANTIZE": False}
    _launch_rows(_norm_backward, grad, *args, threads_per_row=1024, **options)
    return out


def norm_backward_quantize(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor, *, to_fp8: bool = True
) -> tuple[Tensor, Quantized]:
    if not to_fp8:
        out = norm_backward(grad, residual, normed, rstd, weight)
        return out, Quantized(out, None)
    out, quantized = torch.empty_like(grad), quantized_like(grad)
    args = (residual, normed, rstd, weight, None, *mask_args(None), out, quantized)
    options = {"ADD": False, "SCALED": normed.scale is not None, "QUANTIZE": True}
    _launch_rows(_norm_backward, grad, *args, threads_per_row=1024, **options)
    return out, quantized


def quantize(x: Tensor, *, powers: bool = False) -> Quantized:
    """Return the rows in FP8; powers: scales are powers of two."""
    out = quantized_like(x)
    _launch_rows(_quantize, x, out, POWERS=powers)
    return out


def swiglu_quantize(
    gate_up: Tensor, *, keep: bool = True, to_fp8: bool = True, powers: bool = False
) -> tuple[Quantized, Quantized | None]:
    """Return silu(gate) * up, and the tensor that the backward pass needs: without FP8 this is gate_up itself."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    options = {"WIDTH": width, "CHUNK": _CHUNK, "KEEP": keep and to_fp8, "QUANTIZE": to_fp8, "POWERS": powers}
    out = _empty_like(gate_up[:, :width], to_fp8)
    kept = empty(2 * num_rows, width, gate_up.device) if options["KEEP"] else Quantized(gate_up, None)
    _swiglu[(num_rows,)](gate_up, *out, *kept, num_rows, **options, num_warps=16)
    return out, kept if keep else None


def swiglu_backward_quantize(grad: Tensor, kept: Quantized) -> Quantized:
    """Return the gradient of gate_up, in FP8 if gate and up were saved in FP8."""
    return _gate_up_gradient(grad, kept, (None, None))


def swiglu_backward_recompute(grad: Tensor, kept: Quantized) -> tuple[Quantized, Quantized]:
    """Return the gradient of gate_up, and silu(gate) * up recomputed; in FP8 the scales are powers of two."""
    recomputed = _empty_like(grad, kept.scale is not None)
    return _gate_up_gradient(grad, kept, recomputed, powers=True), recomputed


def _gate_up_gradient(
    grad: Tensor, kept: Quantized, recomputed: Quantized | tuple[None, None], *, powers: bool = False
) -> Quantized:
    num_rows, width = grad.shape
    to_fp8 = kept.scale is not None
    out = empty(num_rows, 2 * width, grad.device) if to_fp8 else Quantized(torch.empty_like(kept.values), None)
    options = {"WIDTH": width, "CHUNK": _CHUNK, "QUANTIZE": to_fp8, "POWERS": powers, "num_warps": 16}
    _swiglu_backward[(num_rows,)](grad, *kept, *out, *recomputed, num_rows, **options)
    return out


def _launch_rows(kernel: Any, x: Tensor, *args: Any, threads_per_row: int = 256, **constants: Any) -> None:
    """Launch a kernel whose programs each hold a whole row in registers."""
    width = x.shape[1]
    flat = [part for arg in args for part in (arg if isinstance(arg, Quantized) else (arg,))]
    block = triton.next_power_of_2(width)
    num_warps = max(1, min(threads_per_row, block // 8) // 32)
    kernel[(len(x),)](x, *flat, width, **constants, BLOCK=block, num_warps=num_warps)


def _empty_like(like: Tensor, to_fp8: bool) -> Quantized:
    return quantized_like(like) if to_fp8 else Quantized(like.new_empty(like.shape), None)


def quantized_like(like: Tensor) -> Quantized:
    num_rows, width = like.shape
    return empty(num_rows, width, like.device)


def empty(num_rows: int, width: int, device: torch.device) -> Quantized:
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Quantized(values, torch.empty(num_rows, dtype=torch.float32, device=device))


def _scale_per_row(like: Tensor) -> Tensor:
    return torch.empty(len(like), dtype=torch.float32, device=like.device)


@triton.jit
def scale_of(amax, POWERS: tl.constexpr = False):
    """Return the scale of a row; with POWERS, rounded up to a power of two."""
    scale = tl.maximum(amax, _SMALLEST_AMAX) / _LARGEST
    if POWERS:  # round up: add 1 to the exponent unless the mantissa is 0
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _norm_quantize(
    x_ptr, y_ptr, weight_ptr, sum_ptr, q_ptr, scale_ptr, rstd_ptr, eps, width,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
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
    if QUANTIZE:
        scale = scale_of(tl.max(tl.abs(normed), 0))
        normed = normed / scale
        tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + at, normed.to(q_ptr.dtype.element_ty), inside)
    tl.store(rstd_ptr + row, rstd)


@jit_for_any_seed
def _norm_backward(
    grad_ptr, residual_ptr, q_ptr, scale_ptr, rstd_ptr, weight_ptr, more_ptr, seed, threshold, dropout_scale,
    out_ptr, out_q_ptr, out_scale_ptr, width,
    ADD: tl.constexpr, SCALED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(more_ptr + at, inside, other=0.0).to(tl.float32) * dropout_scale
        grad += tl.where(is_kept(row, column, width, seed, threshold), more, 0.0)
    grad *= weight
    normed = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32)
    if SCALED:
        normed *= tl.load(scale_ptr + row)
    unit = tl.where(weight == 0, 0.0, normed / tl.where(weight == 0, 1.0, weight))
    along = tl.sum(grad * unit, 0) / width
    out = tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
    out = (out + tl.load(rstd_ptr + row) * (grad - unit * along)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, inside)
    if QUANTIZE:
        out = out.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(out), 0))
        tl.store(out_q_ptr + at, (out / scale).to(out_q_ptr.dtype.element_ty), inside)
        tl.store(out_scale_ptr + row, scale)


@triton.jit
def _quantize(x_ptr, q_ptr, scale_ptr, width, POWERS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 0), POWERS)
    tl.store(q_ptr + at, (x / scale).to(q_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) by the hardware's tanh, accurate to 2^-11: one special-function call instead of two."""
    if HAS_PTX:
        tanh: tl.constexpr = "tanh.approx.f32 $0, $1;"
        half = tl.inline_asm_elementwise(tanh, "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        half = 2.0 / (1.0 + tl.exp(-x)) - 1.0
    return 0.5 * half + 0.5


@triton.jit
def _swiglu(
    gate_up_ptr, q_ptr, scale_ptr, kept_ptr, kept_scale_ptr, num_rows,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if QUANTIZE:
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
        scale = scale_of(tl.max(most, 0), POWERS)
        tl.store(scale_ptr + row, scale)
    if KEEP:
        scale_gate, scale_up = scale_of(tl.max(most_gate, 0), POWERS), scale_of(tl.max(most_up, 0), POWERS)
        tl.store(kept_scale_ptr + row, scale_gate)
        tl.store(kept_scale_ptr + num_rows + row, scale_up)
        up_ptr = kept_ptr + tl.cast(num_rows, tl.int64) * WIDTH
    for back in range(0, WIDTH, CHUNK):  # in reverse: the chunks read last are most likely still in L2
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
def _swiglu_gradients(grad_at, gate_at, up_at, inside, scale_gate, scale_up, POLICY: tl.constexpr):
    grad = tl.load(grad_at, inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    gate = tl.load(gate_at, inside, other=0.0, eviction_policy=POLICY).to(tl.float32) * scale_gate
    up = tl.load(up_at, inside, other=0.0, eviction_policy=POLICY).to(tl.float32) * scale_up
    sigmoid = _sigmoid(gate)
    return grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), grad * gate * sigmoid, gate * sigmoid * up


@triton.jit
def _swiglu_backward(
    grad_ptr, kept_ptr, kept_scale_ptr, out_ptr, out_scale_ptr, recomputed_ptr, recomputed_scale_ptr, num_rows,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * WIDTH
    scale, recomputed_scale, scale_gate, scale_up = 1.0, 1.0, 1.0, 1.0
    if QUANTIZE:  # gates [M, F] come before ups [M, F]
        scale_gate, scale_up = tl.load(kept_scale_ptr + row), tl.load(kept_scale_ptr + num_rows + row)
        gate_ptr, up_ptr = kept_ptr + row * WIDTH, kept_ptr + (num_rows + row) * WIDTH
        most = tl.zeros([CHUNK], tl.float32)
        most_recomputed = most
        for start in range(0, WIDTH, CHUNK):
            at = start + tl.arange(0, CHUNK)
            dgate, dup, recomputed = _swiglu_gradients(
                grad_ptr + at, gate_ptr + at, up_ptr + at, at < WIDTH, scale_gate, scale_up, _AGAIN
            )
            most = tl.maximum(most, tl.maximum(tl.abs(dgate), tl.abs(dup)))
            if recomputed_ptr is not None:
                most_recomputed = tl.maximum(most_recomputed, tl.abs(recomputed))
        scale = scale_of(tl.max(most, 0), POWERS)
        tl.store(out_scale_ptr + row, scale)
        if recomputed_ptr is not None:
            recomputed_scale = scale_of(tl.max(most_recomputed, 0), POWERS)
            tl.store(recomputed_scale_ptr + row, recomputed_scale)
    else:  # each row has its gates, then its ups
        gate_ptr, up_ptr = kept_ptr + row * 2 * WIDTH, kept_ptr + (row * 2 + 1) * WIDTH
    out_ptr += row * 2 * WIDTH
    for back in range(0, WIDTH, CHUNK):  # in reverse, as in the forward pass
        at = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        inside = at < WIDTH
        dgate, dup, recomputed = _swiglu_gradients(
            grad_ptr + at, gate_ptr + at, up_ptr + at, inside, scale_gate, scale_up, _ONCE
        )
        _store_once(out_ptr + at, dgate * (1.0 / scale), inside)
        _store_once(out_ptr + WIDTH + at, dup * (1.0 / scale), inside)
        if recomputed_ptr is not None:
            _store_once(recomputed_ptr + row * WIDTH + at, recomputed * (1.0 / recomputed_scale), inside)
