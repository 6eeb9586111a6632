"""Exact GELU in Triton, forward and backward, one program a row.

The backward pass needs x with its bias added, stored as the results are: in BF16, or in FP8 with a scale for each row.
For FP8 a first pass over the row finds its scales. It computes no GELU: the scales follow from the largest x and the
largest gradient, by bounds on GELU (its minimum is -0.17) and on its slope (between -0.13 and 1.13).
"""

import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.fp8.row_kernels import scale_of
from jobs.engines.megatron.trained.operands import empty_operand
from jobs.engines.megatron.trained.ops import Operand

_CHUNK = 4096
"""How many columns of a row are processed at once."""
_LOWEST = tl.constexpr(0.17)
_STEEPEST = tl.constexpr(1.13)
_AGAIN = tl.constexpr("evict_last")
_ONCE = tl.constexpr("evict_first")
"""L2 policies: the second pass over a row reads what the first has read."""


def gelu(x: Tensor, bias: Tensor | None, *, to_fp8: bool) -> tuple[Operand, Operand]:
    """Return GELU(x + bias) and x + bias."""
    num_rows, width = x.shape
    out = empty_operand(num_rows, width, x.device, to_fp8)
    is_stored = to_fp8 or bias is not None
    saved = empty_operand(num_rows, width, x.device, to_fp8) if is_stored else Operand(x)
    _gelu[(num_rows,)](x, bias, *out, *(saved if is_stored else (None, None)), WIDTH=width, **_chunks(width))
    return out, saved


def gelu_backward(grad: Tensor, saved: Operand) -> tuple[Operand, Operand]:
    """Return the gradient of x and GELU(x + bias) again, in the form of what `gelu` saved."""
    num_rows, width = grad.shape
    out, again = (empty_operand(num_rows, width, grad.device, saved.scale is not None) for _ in range(2))
    _gelu_backward[(num_rows,)](grad, *saved, *out, *again, WIDTH=width, **_chunks(width))
    return out, again


def _chunks(width: int) -> dict[str, int]:
    chunk = max(min(_CHUNK, width & -width), 1024 if width > 1024 else triton.next_power_of_2(width))
    return {"CHUNK": chunk, "num_warps": max(1, chunk // 256)}


@triton.jit
def _cumulative(x):
    """Return the cumulative function of the normal distribution: GELU(x) is x times that."""
    return 0.5 * tl.erf(x * 0.7071067811865476) + 0.5


@triton.jit
def _load_biased(x_ptr, bias_ptr, column, inside, POLICY: tl.constexpr):
    x = tl.load(x_ptr + column, inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store_once(at, x, inside):
    tl.store(at, x.to(at.dtype.element_ty), inside, eviction_policy=_ONCE)


@triton.jit
def _gelu(
    x_ptr, bias_ptr, out_ptr, out_scale_ptr, saved_ptr, saved_scale_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    row, scale, saved_scale = tl.program_id(0).to(tl.int64), 1.0, 1.0
    x_ptr += row * WIDTH
    if out_scale_ptr is not None:
        highest = tl.zeros([CHUNK], tl.float32)
        lowest = highest
        for start in range(0, WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)
            x = _load_biased(x_ptr, bias_ptr, column, column < WIDTH, _AGAIN)
            x = tl.where(column < WIDTH, x, 0.0)
            highest, lowest = tl.maximum(highest, x), tl.minimum(lowest, x)
        most = tl.max(highest, 0)
        saved_scale = scale_of(tl.maximum(most, -tl.min(lowest, 0)), POWERS=True)
        scale = scale_of(tl.maximum(most * _cumulative(most), _LOWEST), POWERS=True)
        tl.store(out_scale_ptr + row, scale)
        tl.store(saved_scale_ptr + row, saved_scale)
    for back in range(0, WIDTH, CHUNK):  # in reverse: what was read last is most likely still in L2
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        x = _load_biased(x_ptr, bias_ptr, column, column < WIDTH, _ONCE)
        if saved_ptr is not None:
            _store_once(saved_ptr + row * WIDTH + column, x * (1.0 / saved_scale), column < WIDTH)
        _store_once(out_ptr + row * WIDTH + column, x * _cumulative(x) * (1.0 / scale), column < WIDTH)


@triton.jit
def _gelu_backward(
    grad_ptr, saved_ptr, saved_scale_ptr, out_ptr, out_scale_ptr, again_ptr, again_scale_ptr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, scale, again_scale, saved_scale = tl.program_id(0).to(tl.int64), 1.0, 1.0, 1.0
    if out_scale_ptr is not None:
        saved_scale = tl.load(saved_scale_ptr + row)
        most_grad, most = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for start in range(0, WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)
            at, inside = row * WIDTH + column, column < WIDTH
            grad = tl.load(grad_ptr + at, inside, other=0.0, eviction_policy=_AGAIN).to(tl.float32)
            most_grad = tl.maximum(most_grad, tl.abs(grad))
            most = tl.maximum(most, tl.load(saved_ptr + at, inside, other=0.0, eviction_policy=_AGAIN).to(tl.float32))
        scale = scale_of(tl.max(most_grad, 0) * _STEEPEST, POWERS=True)
        largest = tl.max(most, 0) * saved_scale
        again_scale = scale_of(tl.maximum(largest * _cumulative(largest), _LOWEST), POWERS=True)
        tl.store(out_scale_ptr + row, scale)
        tl.store(again_scale_ptr + row, again_scale)
    for back in range(0, WIDTH, CHUNK):  # in reverse, as in the forward pass
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        at, inside = row * WIDTH + column, column < WIDTH
        grad = tl.load(grad_ptr + at, inside, other=0.0, eviction_policy=_ONCE).to(tl.float32)
        x = tl.load(saved_ptr + at, inside, other=0.0, eviction_policy=_ONCE).to(tl.float32) * saved_scale
        cumulative = _cumulative(x)
        slope = cumulative + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
        _store_once(out_ptr + at, grad * slope * (1.0 / scale), inside)
        _store_once(again_ptr + at, x * cumulative * (1.0 / again_scale), inside)
