"""The operations of the layer that trains all weights, as an interface; there is one implementation per device.

Shape letters: M rows (tokens), H hidden, F width of the MLP, O and I output and input of a linear, D head dimension,
N heads, G query groups.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jobs.engines.megatron.head_norms import HeadNormGradients, HeadNorms
from jobs.engines.megatron.quantize import Quantized
from jobs.engines.megatron.tensor_parallel import ParallelLinear

Operand = Quantized
"""An operand of a GEMM. In FP8, activations and gradients have one scale per row; a weight has one scale."""


class NormStats(NamedTuple):
    """The statistics for a norm's backward pass: 1 / rms [M], and LayerNorm's mean [M] (None for RMSNorm)."""

    rstd_M: Tensor
    mean_M: Tensor | None = None


class NormWeights(NamedTuple):
    """A norm's weight [H], LayerNorm's bias [H] (None for RMSNorm) and its epsilon."""

    weight_H: Tensor
    bias_H: Tensor | None
    eps: float


class NormGradients(NamedTuple):
    """The gradients of a norm's weight [H] and bias [H], in FP32; without a bias, None."""

    weight_H: Tensor
    bias_H: Tensor | None


class LinearWeights(Protocol):
    """The weights of this rank's linears as GEMM operands: BF16 weights, or FP8 copies updated once a step."""

    def forward(self, linear: ParallelLinear) -> Operand:
        """Return the weight [O, I]."""

    def backward(self, linear: ParallelLinear) -> Operand:
        """Return the weight as [I, O], not always contiguous in BF16; valid until two others are requested."""

    def refresh(self, linears: Sequence[ParallelLinear] | None = None) -> None:
        """Update copies after the optimizer or a checkpoint has changed the weights: of all linears, or of these.

        linears: neighbours in the order of the backward pass.
        """


class TrainedOps(Protocol):
    """The operations. Sums are in FP32. A bias is None if the model has no biases."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type of weights and of activations between GEMMs: BF16; on CPUs also FP32."""

    def linear_weights(self, linears: Sequence[ParallelLinear]) -> LinearWeights:
        """Return the weights of this rank's linears as operands; `linears` are in the order of the backward pass."""

    def operand(self, x_MH: Tensor) -> Operand:
        """Return the rows as a GEMM operand."""

    def matmul(self, x: Operand, weight: Operand) -> Tensor:
        """Return x weight^T [M, O] in `dtype`, for x [M, I] and weight [O, I]."""

    def add_weight_gradient(self, main_grad_OI: Tensor, grad: Operand, x: Operand) -> None:
        """Add grad^T x to the FP32 gradient in place, for grad [M, O] and x [M, I]."""

    def column_sum(self, x: Tensor | Operand) -> Tensor:
        """Return the sum over rows [O] in FP32, the gradient of a bias."""

    def norm(self, x_MH: Tensor, weights: NormWeights) -> tuple[Operand, NormStats]:
        """Return RMSNorm(x), or LayerNorm(x) if there is a bias."""

    def add_norm(
        self, x_MH: Tensor, y_MH: Tensor, bias_H: Tensor | None, weights: NormWeights
    ) -> tuple[Tensor, Operand, NormStats]:
        """Return x + y + bias, and its norm."""

    def recompute_norm(self, x_MH: Tensor, stats: NormStats, weights: NormWeights) -> Operand:
        """Recompute the output of `norm` from its input and statistics."""

    def norm_backward(
        self, grad_MH: Tensor, residual_MH: Tensor, x_MH: Tensor, stats: NormStats, weights: NormWeights
    ) -> tuple[Tensor, Operand, NormGradients]:
        """Return residual + the gradient of the norm's input x, the same as an operand, and the weights' gradients.

        grad: the gradient of the norm's output.
        """

    def split_heads(
        self,
        qkv_MO: Tensor,
        bias_O: Tensor | None,
        freqs_MD: Tensor | None,
        groups: int,
        head_dim: int,
        norms: HeadNorms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [M, N, D], k and v [M, G, D], each contiguous, with the bias added and RoPE applied to q and k.

        qkv: rows of each group's queries, key and value; freqs: RoPE's angles, None for learned positions. Without bias
        and RoPE the results may be views.
        norms: applied before RoPE. They overwrite qkv by the sum that they read, for `merge_normed_heads`.
        """

    def merge_heads(self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None) -> Operand:
        """Return the gradient of the qkv rows [M, O] of `split_heads`."""

    def merge_normed_heads(
        self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None, qkv_MO: Tensor, norms: HeadNorms
    ) -> tuple[Operand, HeadNormGradients]:
        """Return the same through the norms, which read qkv, and the gradients of their weights."""

    def swiglu(self, gate_up_M2F: Tensor) -> tuple[Operand, Operand]:
        """Return silu(gate) * up [M, F], and the tensor for `swiglu_backward`; gates are the first half of a row."""

    def swiglu_backward(self, grad_MF: Tensor, saved: Operand) -> tuple[Operand, Operand]:
        """Return the gradient of gate and up [M, 2 F], and the recomputed silu(gate) * up [M, F]."""

    def gelu(self, x_MF: Tensor, bias_F: Tensor | None) -> tuple[Operand, Operand]:
        """Return GELU(x + bias) [M, F], exact (erf), and the tensor for `gelu_backward`."""

    def gelu_backward(self, grad_MF: Tensor, saved: Operand) -> tuple[Operand, Operand]:
        """Return the gradient of x [M, F], and the recomputed GELU(x + bias)."""
