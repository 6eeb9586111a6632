"""Weights that GEMMs take as they are, in BF16 or FP32."""

import torch

from jobs.engines.megatron.fp8.quantize import Quantized


class Unquantized:
    """`FrozenWeights`, and `LinearWeights` of trained ones, without copies.

    cuBLAS reads the transposed view as fast as the weight.
    """

    def forward(self, linear: torch.nn.Module) -> Quantized:
        return Quantized(linear.weight, None)

    def backward(self, linear: torch.nn.Module) -> Quantized:
        return Quantized(linear.weight.T, None)

    def refresh(self) -> None:
        """Do nothing: there are no copies."""
