"""The operations of the layer with frozen linears, as an interface.

`device_ops` selects the implementation when the model is built, and passes it to the layers and their linears.

Shape letters: M rows (tokens), H hidden, F width of the MLP, D head dimension, G query groups, R queries of a group;
of adapters: R LoRA rank, I and O a linear's input and output; of GEMMs: weight [N, K].
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.quantize import Adapted, Dropout, Lora, Quantized


class FrozenWeights(Protocol):
    """The weights of a rank's frozen linears as operands of GEMMs; NF4 weights are dequantised here."""

    def forward(self, linear: Any) -> Quantized:
        """Return the weight [O, I]; valid until another weight is requested."""

    def backward(self, linear: Any) -> Quantized:
        """Return the weight as [I, O], contiguous in FP8; valid until another weight is requested."""


class Fp8Ops(Protocol):
    """The operations of the layer. Sums are in FP32; activations and gradients are quantised with one scale per row.

    BF16 operations (`quantized_dtype` is None) quantise nothing: instead of FP8 as documented below, they return BF16
    without a scale.
    """

    @property
    def quantized_dtype(self) -> torch.dtype | None:
        """The data type of GEMM operands: FP8; None: they are in `output_dtype`."""

    @property
    def output_dtype(self) -> torch.dtype:
        """The data type of GEMM outputs, of adapters and of the activations between layers: BF16."""

    @property
    def is_nf4(self) -> bool:
        """Whether frozen weights are stored in NF4; otherwise they are stored in the data type of GEMM operands."""

    def quantize(self, x_MH: Tensor, /) -> Quantized:
        """Return the rows in FP8, each with its own scale."""

    def matmul(self, x: Quantized, weight: Quantized, /) -> Tensor:
        """Return x weight^T [M, N] in BF16, for a weight [N, K] with one scale."""

    def transpose(self, weight: Quantized, /) -> Quantized:
        """Return the weight [N, K] as [K, N], contiguous."""

    def frozen_weights(self, linears: Sequence[Any]) -> FrozenWeights:
        """Return the source of the weights; linears: all linears of this rank, in the order of the backward pass."""

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

        Inputs are the norm's output and its gradient, to which `adapted` is added.
        """

    def norm_backward_quantize(
        self, grad_MH: Tensor, residual_MH: Tensor, normed: Quantized, rstd_M: Tensor, weight_H: Tensor, /
    ) -> tuple[Tensor, Quantized]:
        """Return the result of `norm_backward`, and the same in FP8."""

    def rope(
        self,
        qkv: Tensor,
        freqs_MD: Tensor,
        groups: int,
        lora: Lora | None = None,
        bias_O: Tensor | None = None,
        norms: HeadNorms | None = None,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [M, G*R, D], k and v [M, G, D] with RoPE applied to q and k.

        qkv: rows of each group's queries, key and value; the adapter's output and the bias are added first.
        norms: applied before RoPE. They overwrite qkv by the sum that they read, for `normed_rope_backward`.
        """

    def rope_backward(self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor, /) -> tuple[Tensor, Quantized]:
        """Return the gradient of qkv, in the data type of dq and in FP8."""

    def normed_rope_backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor, qkv: Tensor, norms: HeadNorms, /
    ) -> tuple[Tensor, Quantized]:
        """Return the same through the norms, which read qkv; their weights are frozen."""

    def swiglu_quantize(self, gate_up: Tensor, /, *, keep: bool = True) -> tuple[Quantized, Quantized | None]:
        """Return silu(gate) * up [M, F] in FP8, and gate and up for the backward pass.

        The latter are in FP8 [2 M, F], gates first; BF16 operations return gate_up [M, 2 F] itself.
        """

    def swiglu_backward_quantize(self, grad_MF: Tensor, gate_up: Quantized, /) -> Quantized:
        """Return the gradient of gate and up [M, 2 F] in FP8."""

    def down(self, x: Tensor | Quantized, a_RI: Tensor, drop: Dropout, /) -> Tensor:
        """Return dropout(x) A^T [M, R] in BF16."""

    def down_backward(self, low_grad_MR: Tensor, x: Tensor | Quantized, drop: Dropout, /) -> Tensor:
        """Return the gradient of A [R, I]."""

    def add_down_gradient(self, grad_MI: Tensor, low_grad_MR: Tensor, a_RI: Tensor, drop: Dropout, /) -> Tensor:
        """Add the adapter's part, dropout(low_grad A), to the gradient of the linear's input in place; return it."""
