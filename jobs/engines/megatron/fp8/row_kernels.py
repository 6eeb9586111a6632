"""Row-wise operations in Triton: norms, SwiGLU and quantisation, in one pass over each row (SwiGLU: two).

Each program computes one row, in FP32. A result that is also stored in BF16 is rounded to BF16 before it is quantised,
so that both copies hold the same numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.fp8.lora_kernels import HAS_PTX, by_value, is_kept, mask
from jobs.engines.megatron.fp8.quantize import FP8, LARGEST, SMALLEST_AMAX, Adapted, Quantized

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_CHUNK = 4096
"""How many columns of an MLP's row are processed at once; a whole row does not fit in registers."""
_AGAIN = tl.constexpr("evict_last")
_ONCE = tl.constexpr("evict_first")
"""L2 policies: the second pass over a row reads what the first has read, which halves the traffic from memory."""


def norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    normed, rstd = quantized_like(x), _one_a_row(x)
    _rows(_norm_quantize, x, x, weight, x, normed, rstd, eps, ADD=False)
    return normed, rstd


def add_norm_quantize(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantized, Tensor]:
    total, normed, rstd = torch.empty_like(x), quantized_like(x), _one_a_row(x)
    _rows(_norm_quantize, x, y, weight, total, normed, rstd, eps, ADD=True)
    return total, normed, rstd


def norm_backward(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor, adapted: Adapted | None = None
) -> Tensor:
    out = torch.empty_like(grad)
    more, drop = adapted or (None, None)
    args = (residual, normed, rstd, weight, more, *mask(drop), out, None, None)
    _rows(_norm_backward, grad, *args, threads_per_row=1024, ADD=adapted is not None, QUANTIZE=False)
    return out


def norm_backward_quantize(
    grad: Tensor, residual: Tensor, normed: Quantized, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Quantized]:
    out, quantized = torch.empty_like(grad), quantized_like(grad)
    args = (residual, normed, rstd, weight, None, *mask(None), out, quantized)
    _rows(_norm_backward, grad, *args, threads_per_row=1024, ADD=False, QUANTIZE=True)
    return out, quantized


def quantize(x: Tensor) -> Quantized:
    out = quantized_like(x)
    _rows(_quantize, x, out)
    return out


def swiglu_quantize(gate_up: Tensor, *, keep: bool = True) -> tuple[Quantized, Quantized | None]:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty(num_rows, width, gate_up.device)
    kept = empty(2 * num_rows, width, gate_up.device) if keep else None
    options = {"WIDTH": width, "CHUNK": _CHUNK, "KEEP": keep, "num_warps": 16}
    _swiglu[(num_rows,)](gate_up, *out, *(kept or (None, None)), num_rows, **options)
    return out, kept


def swiglu_backward_quantize(grad: Tensor, kept: Quantized) -> Quantized:
    num_rows, width = grad.shape
    out = empty(num_rows, 2 * width, grad.device)
    _swiglu_backward[(num_rows,)](grad, *kept, *out, num_rows, WIDTH=width, CHUNK=_CHUNK, num_warps=16)
    return out


def _rows(kernel, x: Tensor, *args, threads_per_row: int = 256, **constants) -> None:
    """Launch a kernel whose programs each hold a whole row in registers."""
    width = x.shape[1]
    flat = [part for arg in args for part in (arg if isinstance(arg, Quantized) else (arg,))]
    block = triton.next_power_of_2(width)
    num_warps = max(1, min(threads_per_row, block // 8) // 32)
    kernel[(len(x),)](x, *flat, width, **constants, BLOCK=block, num_warps=num_warps)


def quantized_like(like: Tensor) -> Quantized:
    return empty(*like.shape, like.device)


def empty(num_rows: int, width: int, device: torch.device) -> Quantized:
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Quantized(values, torch.empty(num_rows, dtype=torch.float32, device=device))


def _one_a_row(like: Tensor) -> Tensor:
    return torch.empty(len(like), dtype=torch.float32, device=like.device)


@triton.jit
def scale_of(amax):
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
    scale = scale_of(tl.max(tl.abs(normed), 0))
    tl.store(q_ptr + at, (normed / scale).to(q_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + row, scale)
    tl.store(rstd_ptr + row, rstd)


@by_value
def _norm_backward(
    grad_ptr, residual_ptr, q_ptr, scale_ptr, rstd_ptr, weight_ptr, more_ptr, seed, threshold, dropout_scale,
    out_ptr, out_q_ptr, out_scale_ptr, width,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
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
    normed = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
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
def _quantize(x_ptr, q_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 0))
    tl.store(q_ptr + at, (x / scale).to(q_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) by the hardware's tanh, accurate to 2^-11: one special function instead of two."""
    if HAS_PTX:
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
    scale = scale_of(tl.max(most, 0))
    tl.store(scale_ptr + row, scale)
    if KEEP:
        scale_gate, scale_up = scale_of(tl.max(most_gate, 0)), scale_of(tl.max(most_up, 0))
        tl.store(kept_scale_ptr + row, scale_gate)
        tl.store(kept_scale_ptr + num_rows + row, scale_up)
        up_ptr = kept_ptr + tl.cast(num_rows, tl.int64) * WIDTH
    for back in range(0, WIDTH, CHUNK):  # in reverse: what was read last is most likely still in L2
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
    scale = scale_of(tl.max(most, 0))
    tl.store(out_scale_ptr + row, scale)
    for back in range(0, WIDTH, CHUNK):  # in reverse, as in the forward pass
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        inside, here = column < WIDTH, row * WIDTH + column
        dgate, dup = _swiglu_gradients(grad_ptr, kept_ptr, up_ptr, here, inside, scale_gate, scale_up, _ONCE)
        at = out_ptr + row * 2 * WIDTH + column
        _store_once(at, dgate * (1.0 / scale), inside)
        _store_once(at + WIDTH, dup * (1.0 / scale), inside)
