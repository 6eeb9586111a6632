"""`Fp8Ops` on a GPU, in FP8 or BF16: Triton kernels and cuBLAS's GEMMs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from jobs.engines.megatron import fp8_gemm
from jobs.engines.megatron.frozen.lora_kernels import add_down_gradient, down, down_backward
from jobs.engines.megatron.frozen.nf4_kernels import dequantize
from jobs.engines.megatron.head_norm_kernels import normed_rope_backward
from jobs.engines.megatron.linear_weights import DequantizedWeights, PrefetchedTransposes, Unquantized
from jobs.engines.megatron.quantize import BF16, FP8, Quantized
from jobs.engines.megatron.rope_kernels import rope, rope_backward
from jobs.engines.megatron.row_kernels import (
    add_norm_quantize,
    norm_backward,
    norm_backward_quantize,
    norm_quantize,
    quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
)


class GpuOps:
    """`Fp8Ops` in FP8."""

    quantized_dtype, output_dtype, is_nf4 = FP8, BF16, False

    quantize = staticmethod(quantize)
    matmul = staticmethod(fp8_gemm.matmul)
    transpose = staticmethod(fp8_gemm.transpose)
    norm_quantize = staticmethod(norm_quantize)
    add_norm_quantize = staticmethod(add_norm_quantize)
    norm_backward = staticmethod(norm_backward)
    norm_backward_quantize = staticmethod(norm_backward_quantize)
    rope = staticmethod(rope)
    rope_backward = staticmethod(rope_backward)
    normed_rope_backward = staticmethod(normed_rope_backward)
    swiglu_quantize = staticmethod(swiglu_quantize)
    swiglu_backward_quantize = staticmethod(swiglu_backward_quantize)
    down = staticmethod(down)
    down_backward = staticmethod(down_backward)
    add_down_gradient = staticmethod(add_down_gradient)

    def frozen_weights(self, linears: Sequence[Any]) -> PrefetchedTransposes:
        return PrefetchedTransposes(linears, fp8_gemm.transpose)


class PlainGpuOps:
    """`Fp8Ops` in BF16, without quantised operands.

    is_nf4: the frozen weights are stored in 4 bits.
    """

    quantized_dtype, output_dtype = None, BF16

    norm_quantize = staticmethod(partial(norm_quantize, to_fp8=False))
    add_norm_quantize = staticmethod(partial(add_norm_quantize, to_fp8=False))
    norm_backward = staticmethod(norm_backward)
    norm_backward_quantize = staticmethod(partial(norm_backward_quantize, to_fp8=False))
    rope = staticmethod(rope)
    rope_backward = staticmethod(partial(rope_backward, to_fp8=False))
    normed_rope_backward = staticmethod(partial(normed_rope_backward, to_fp8=False))
    swiglu_quantize = staticmethod(partial(swiglu_quantize, to_fp8=False))
    swiglu_backward_quantize = staticmethod(swiglu_backward_quantize)
    down = staticmethod(down)
    down_backward = staticmethod(down_backward)
    add_down_gradient = staticmethod(add_down_gradient)

    def __init__(self, is_nf4: bool = False) -> None:
        self.is_nf4 = is_nf4

    def quantize(self, x_MH: Tensor) -> Quantized:
        return Quantized(x_MH, None)

    def matmul(self, x: Quantized, weight: Quantized) -> Tensor:
        return x.values @ weight.values.T

    def transpose(self, weight: Quantized) -> Quantized:
        return Quantized(weight.values.T, None)

    def frozen_weights(self, linears: Sequence[Any]) -> DequantizedWeights | Unquantized:
        return DequantizedWeights(linears, dequantize) if self.is_nf4 else Unquantized()
