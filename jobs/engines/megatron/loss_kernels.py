"""Cross-entropy in Triton, one program per row. `loss._TorchOps` documents what each function returns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.quantize import FP8, LARGEST, SMALLEST_AMAX, Quantized

_LARGEST, _SMALLEST_AMAX = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_AMAX)
_CHUNK = 4096


def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = logits.shape
    lse, picked = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _forward[(num_rows,)](logits, labels, lse, picked, WIDTH=width, CHUNK=_CHUNK, num_warps=8)
    return lse, picked


def backward_(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor) -> None:
    num_rows, width = logits.shape
    _backward[(num_rows, triton.cdiv(width, _CHUNK))](logits, labels, lse, grad, WIDTH=width, CHUNK=_CHUNK, num_warps=8)


def quantized_gradient(logits: Tensor, stats: tuple[Tensor, ...], grad: Tensor, dtype: torch.dtype = FP8) -> Quantized:
    num_rows, width = logits.shape
    values = torch.empty(num_rows, width, dtype=dtype, device=logits.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    grid = (num_rows, triton.cdiv(width, _CHUNK))
    _quantized_gradient[grid](logits, *stats, grad, values, scale, WIDTH=width, CHUNK=_CHUNK, num_warps=8)
    return Quantized(values, scale)


@triton.jit
def _forward(logits_ptr, labels_ptr, lse_ptr, picked_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * WIDTH
    most, total = tl.full([CHUNK], float("-inf"), tl.float32), tl.zeros([CHUNK], tl.float32)
    for start in range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + column, column < WIDTH, other=float("-inf")).to(tl.float32)
        more = tl.maximum(most, logits)
        kept = tl.where(most == float("-inf"), 0.0, total * tl.exp(most - more))
        total = kept + tl.where(logits == float("-inf"), 0.0, tl.exp(logits - more))
        most = more
    highest = tl.max(most, 0)
    lse = highest + tl.log(tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - highest)), 0))
    tl.store(lse_ptr + row, lse)
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < WIDTH)
    tl.store(picked_ptr + row, tl.load(logits_ptr + label, inside, other=0.0).to(tl.float32))


@triton.jit
def _backward(logits_ptr, labels_ptr, lse_ptr, grad_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at = logits_ptr + row * WIDTH + column
    probability = tl.exp(tl.load(at, column < WIDTH, other=0.0).to(tl.float32) - tl.load(lse_ptr + row))
    hit = tl.where(column == tl.load(labels_ptr + row), 1.0, 0.0)
    grad = (probability - hit) * tl.load(grad_ptr + row)
    tl.store(at, grad.to(logits_ptr.dtype.element_ty), column < WIDTH)


@triton.jit
def _quantized_gradient(
    logits_ptr, labels_ptr, lse_ptr, picked_ptr, grad_ptr, q_ptr, scale_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at, lse, grad = row * WIDTH + column, tl.load(lse_ptr + row), tl.load(grad_ptr + row)
    largest = (1.0 - tl.exp(tl.load(picked_ptr + row) - lse)) * tl.abs(grad)
    scale = tl.maximum(largest, _SMALLEST_AMAX) / _LARGEST
    probability = tl.exp(tl.load(logits_ptr + at, column < WIDTH, other=0.0).to(tl.float32) - lse)
    hit = tl.where(column == tl.load(labels_ptr + row), 1.0, 0.0)
    scaled = tl.minimum(tl.maximum((probability - hit) * (grad / scale), -_LARGEST), _LARGEST)
    tl.store(q_ptr + at, scaled.to(q_ptr.dtype.element_ty), column < WIDTH)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + row, scale)
