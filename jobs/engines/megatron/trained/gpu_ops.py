"""`TrainedOps` on a GPU, in BF16 and in FP8: Triton kernels and cuBLAS's GEMMs.

The scales of FP8 rows are powers of two, so that operands of weight gradients are converted exactly to one common scale
(`fp8_weights.tokens_last`).
"""

from collections.abc import Sequence

from torch import Tensor

from jobs.engines.megatron import fp8_gemm, head_norm_kernels, rope_kernels, row_kernels
from jobs.engines.megatron.head_norms import HeadNormGradients, HeadNorms
from jobs.engines.megatron.linear_weights import Unquantized
from jobs.engines.megatron.quantize import BF16
from jobs.engines.megatron.tensor_parallel import ParallelLinear
from jobs.engines.megatron.trained import gemm, norm_kernels
from jobs.engines.megatron.trained.fp8_weights import Fp8Weights
from jobs.engines.megatron.trained.ops import NormGradients, NormStats, NormWeights, Operand


class Bf16GpuOps:
    """`TrainedOps` in BF16."""

    dtype, to_fp8 = BF16, False

    def linear_weights(self, linears: Sequence[ParallelLinear]) -> "Unquantized | Fp8Weights":
        return Unquantized()

    def operand(self, x_MH: Tensor) -> Operand:
        return Operand(x_MH)

    def matmul(self, x: Operand, weight: Operand) -> Tensor:
        return x.values @ weight.values.T

    def add_weight_gradient(self, main_grad_OI: Tensor, grad: Operand, x: Operand) -> None:
        gemm.add_weight_gradient(main_grad_OI, grad, x)

    def column_sum(self, x: Tensor | Operand) -> Tensor:
        return norm_kernels.column_sum(x)

    def norm(self, x_MH: Tensor, weights: NormWeights) -> tuple[Operand, NormStats]:
        return norm_kernels.norm(x_MH, weights, to_fp8=self.to_fp8)

    def add_norm(
        self, x_MH: Tensor, y_MH: Tensor, bias_H: Tensor | None, weights: NormWeights
    ) -> tuple[Tensor, Operand, NormStats]:
        return norm_kernels.add_norm(x_MH, y_MH, bias_H, weights, to_fp8=self.to_fp8)

    def recompute_norm(self, x_MH: Tensor, stats: NormStats, weights: NormWeights) -> Operand:
        return norm_kernels.recompute_norm(x_MH, stats, weights, to_fp8=self.to_fp8)

    def norm_backward(
        self, grad_MH: Tensor, residual_MH: Tensor, x_MH: Tensor, stats: NormStats, weights: NormWeights
    ) -> tuple[Tensor, Operand, NormGradients]:
        return norm_kernels.norm_backward(grad_MH, residual_MH, x_MH, stats, weights, to_fp8=self.to_fp8)

    def split_heads(
        self,
        qkv_MO: Tensor,
        bias_O: Tensor | None,
        freqs_MD: Tensor | None,
        groups: int,
        head_dim: int,
        norms: HeadNorms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return rope_kernels.split_heads(qkv_MO, bias_O, freqs_MD, groups, head_dim, norms=norms)

    def merge_heads(self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None) -> Operand:
        return rope_kernels.merge_heads(dq, dk, dv, freqs_MD, to_fp8=self.to_fp8)

    def merge_normed_heads(
        self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None, qkv_MO: Tensor, norms: HeadNorms
    ) -> tuple[Operand, HeadNormGradients]:
        return head_norm_kernels.merge_normed_heads(dq, dk, dv, freqs_MD, qkv_MO, norms, to_fp8=self.to_fp8)

    def swiglu(self, gate_up_M2F: Tensor) -> tuple[Operand, Operand]:
        hidden, saved = row_kernels.swiglu_quantize(gate_up_M2F, to_fp8=self.to_fp8, powers=True)
        assert saved is not None
        return hidden, saved

    def swiglu_backward(self, grad_MF: Tensor, saved: Operand) -> tuple[Operand, Operand]:
        return row_kernels.swiglu_backward_recompute(grad_MF, saved)

    def gelu(self, x_MF: Tensor, bias_F: Tensor | None) -> tuple[Operand, Operand]:
        return norm_kernels.gelu(x_MF, bias_F, to_fp8=self.to_fp8)

    def gelu_backward(self, grad_MF: Tensor, saved: Operand) -> tuple[Operand, Operand]:
        return norm_kernels.gelu_backward(grad_MF, saved)


class Fp8GpuOps(Bf16GpuOps):
    """`TrainedOps` in FP8; activations between GEMMs and weights are in BF16."""

    to_fp8 = True

    def linear_weights(self, linears: Sequence[ParallelLinear]) -> Fp8Weights:
        return Fp8Weights(linears)

    def operand(self, x_MH: Tensor) -> Operand:
        return row_kernels.quantize(x_MH, powers=True)

    def matmul(self, x: Operand, weight: Operand) -> Tensor:
        return fp8_gemm.matmul(x, weight)
