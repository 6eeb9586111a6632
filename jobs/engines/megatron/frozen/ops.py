"""The operations of the layer with frozen linears, as an interface.

The implementation is chosen once, where the model is built (`device_ops`), and handed to the layers and their linears.

Shape letters: M rows (tokens), H hidden, F width of the MLP, D head dimension, G query groups, R queries of a group;
of adapters: R LoRA rank, I and O a linear's input and output; of GEMMs: weight [N, K].
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from jobs.engines.megatron.quantize import Adapted, Dropout, Lora, Quantized


class FrozenWeights(Protocol):
    """The weights of a rank's frozen linears, as operands of GEMMs; what is stored in 4 bits is dequantised here."""

    def forward(self, linear: Any) -> Quantized:
        """Return the weight [O, I]; valid until another one is asked for."""

    def backward(self, linear: Any) -> Quantized:
        """Return the weight as [I, O], in FP8 contiguous; valid until another one is asked for."""


class Fp8Ops(Protocol):
    """The operations of the layer. Sums are in FP32; activations and gradients are quantised with one scale a row.

    Plain operations (`quantized_dtype` is None) quantise nothing: where FP8 is said below, they return BF16 without a
    scale.
    """

    @property
    def quantized_dtype(self) -> torch.dtype | None:
        """The dtype of every GEMM's operands: FP8, or None where they are in `output_dtype`."""

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of every GEMM's output, of adapters and of the activations between layers: BF16."""

    @property
    def is_nf4(self) -> bool:
        """Whether the frozen weights are stored in 4 bits; otherwise they are stored as the GEMMs' operands."""

    def quantize(self, x_MH: Tensor, /) -> Quantized:
        """Return the rows in FP8, each with its own scale."""

    def matmul(self, x: Quantized, weight: Quantized, /) -> Tensor:
        """Return x weight^T [M, N] in BF16, for a weight [N, K] with one scale."""

    def transpose(self, weight: Quantized, /) -> Quantized:
        """Return the weight [N, K] as [K, N], contiguous."""

    def frozen_weights(self, linears: Sequence[Any]) -> FrozenWeights:
        """Return the source of the weights; linears: all of this rank, in the order of the backward pass."""

    def norm_quantize(self, x_MH: Tensor, weight_H: Tensor, eps: float, /) -> tuple[Quantized, Tensor]:
        """Return RMSNorm(x) in FP8, and 1 / rms [M]."""

    def add_norm_quantize(
        self, x_MH: Tensor, y_MH: Tensor, weight_H: Tensor, eps: float, /
    ) -> tuple[Tensor, Quantized, Tensor]:
        """Return x + y, its RMSNorm in FP8, and 1 / rms [M]."""

    def norm_backward(
        self,
        grad_MH: Tensor,
        residual_MH: Tensor,
        normed: Quantized,
        rstd_M: Tensor,
        weight_H: Tensor,
        adapted: Adapted | None = None,
        /,
    ) -> Tensor:
        """Return residual + the gradient of the norm's input.

        It is computed from the gradient of the norm's output, to which `adapted` is added, and from that output.
        """

    def norm_backward_quantize(
        self, grad_MH: Tensor, residual_MH: Tensor, normed: Quantized, rstd_M: Tensor, weight_H: Tensor, /
    ) -> tuple[Tensor, Quantized]:
        """Return what `norm_backward` does, and the same in FP8."""

    def rope(
        self, qkv: Tensor, freqs_MD: Tensor, groups: int, lora: Lora | None = None, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [M, G*R, D], k and v [M, G, D] with RoPE applied to q and k.

        qkv: rows that hold each group's queries, key and value; what an adapter adds to them is added first.
        """

    def rope_backward(self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor, /) -> tuple[Tensor, Quantized]:
        """Return the gradient of the rows that `rope` takes, in the type of dq and in FP8."""

    def swiglu_quantize(self, gate_up: Tensor, /, *, keep: bool = True) -> tuple[Quantized, Quantized | None]:
        """Return silu(gate) * up [M, F] in FP8, and gate and up for the backward pass.

        Those are in FP8 [2 M, F], gates first; plain operations return gate_up [M, 2 F] itself.
        """

    def swiglu_backward_quantize(self, grad_MF: Tensor, gate_up: Quantized, /) -> Quantized:
        """Return the gradient of gate and up [M, 2 F] in FP8."""

    def down(self, x: Tensor | Quantized, a_RI: Tensor, drop: Dropout, /) -> Tensor:
        """Return dropout(x) A^T [M, R] in BF16."""

    def down_backward(self, low_grad_MR: Tensor, x: Tensor | Quantized, drop: Dropout, /) -> Tensor:
        """Return the gradient of A [R, I]."""

    def add_down_gradient(self, grad_MI: Tensor, low_grad_MR: Tensor, a_RI: Tensor, drop: Dropout, /) -> Tensor:
        """Add the adapter's part, dropout(low_grad A), to the gradient of the linear's input in place; return it."""
