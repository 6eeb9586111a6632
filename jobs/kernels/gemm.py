"""GEMMs x_MK w_NK^T, as in a linear layer."""

import torch

from bench.contract.kernels import GemmPrecision, Point
from jobs.kernels.timing import Prepared

DTYPES = {GemmPrecision.fp32: torch.float32, GemmPrecision.bf16: torch.bfloat16}
FP8, LARGEST = torch.float8_e4m3fn, 448.0
"""E4M3, and its largest value."""


def prepare(point: Point, device: torch.device) -> Prepared:
    """Return a GEMM of random values; zeros would take less power and run faster."""
    m, n, k = point.sizes
    precision = GemmPrecision[point.variant]
    if precision is GemmPrecision.fp8:
        return _prepare_fp8(m, n, k, device)
    x_MK, w_NK = (torch.randn(rows, k, dtype=DTYPES[precision], device=device) for rows in (m, n))
    out_MN = torch.empty(m, n, dtype=DTYPES[precision], device=device)
    tf32 = ", TF32 off" if precision is GemmPrecision.fp32 and device.type == "cuda" else ""
    return Prepared(lambda: torch.mm(x_MK, w_NK.T, out=out_MN), implementation=f"torch.mm{tf32}")


def _prepare_fp8(m: int, n: int, k: int, device: torch.device) -> Prepared:
    x_MK, scale_M = _quantized(m, k, device)
    w_NK, scale_N = _quantized(n, k, device)

    def call() -> torch.Tensor:
        return torch._scaled_mm(
            x_MK, w_NK.T, scale_a=scale_M, scale_b=scale_N.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Prepared(call, implementation="torch._scaled_mm, one scale per row, fast accumulation")


def _quantized(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random values in FP8, and the scale [rows, 1] of each row."""
    values = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    scale = values.abs().amax(dim=1, keepdim=True).float() / LARGEST
    return (values / scale).to(FP8), scale
