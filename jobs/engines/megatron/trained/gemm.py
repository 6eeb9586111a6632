"""GEMMs that add the gradient of a weight to FP32 in place, on a GPU."""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from jobs.engines.megatron.trained import cublaslt
from jobs.engines.megatron.trained.ops import Operand
from jobs.engines.megatron.trained.transpose_kernels import tokens_last

log = logging.getLogger(__name__)


def add_weight_gradient(main_grad_OI: Tensor, grad: Operand, x: Operand, *, fast_accumulation: bool = False) -> None:
    """Add grad^T x to the FP32 gradient, for grad [M, O] and x [M, I], both in BF16 or both in FP8.

    fast_accumulation: sum in FP8 GEMMs with the tensor cores' 14 bits or so, without adding up in FP32 meanwhile.
    """
    if grad.scale is None:
        # The product is computed in FP32 and added by cuBLAS: self and out are one tensor, which torch 2.10 allows.
        torch.addmm(main_grad_OI, grad.values.T, x.values, out_dtype=torch.float32, out=main_grad_OI)
    else:
        fp8_gemm()(main_grad_OI, tokens_last(grad), tokens_last(x), fast_accumulation)


Fp8Gemm = Callable[[Tensor, Operand, Operand, bool], None]
"""Adds left right^T to the gradient [O, I], for left [O, M] and right [I, M]; the last argument: fast accumulation."""


@cache
def fp8_gemm() -> Fp8Gemm:
    """Return the GEMM of cuBLASLt, or torch's where that library cannot be found."""
    library = cublaslt.load()
    if library is None:
        log.warning("torch has not loaded libcublasLt: FP8 weight gradients are added in a second pass over memory")
        return add_by_torch

    def add(main_grad_OI: Tensor, left: Operand, right: Operand, fast_accumulation: bool) -> None:
        scales = (left.scale, right.scale)
        library.add_matmul(main_grad_OI, left.values, right.values, scales, fast_accumulation=fast_accumulation)

    return add


def add_by_torch(main_grad_OI: Tensor, left: Operand, right: Operand, fast_accumulation: bool) -> None:
    """Do what cuBLASLt does in one GEMM with a GEMM and an addition."""
    options = {"scale_a": left.scale, "scale_b": right.scale, "use_fast_accum": fast_accumulation}
    main_grad_OI += torch._scaled_mm(left.values, right.values.T, out_dtype=torch.float32, **options)
