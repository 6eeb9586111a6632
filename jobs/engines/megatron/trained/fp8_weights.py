"""FP8 copies of the linears' trained weights, made once a step without waiting for the device."""

from collections.abc import Sequence

import torch

from jobs.engines.megatron.fp8.gpu_ops import transpose
from jobs.engines.megatron.fp8.quantize import FP8, Quantized, weight_scale
from jobs.engines.megatron.fp8.transposed_weights import PrefetchedTransposes
from jobs.engines.megatron.trained.ops import Operand
from jobs.engines.megatron.trained.transpose_kernels import quantize_tensor


class Fp8Weights:
    """`LinearWeights` in FP8 on a GPU: a copy of each weight with one scale, transposed when the backward pass asks.

    The TP ranks of a weight share its scale, so that their number does not change how it is rounded.
    """

    def __init__(self, linears: Sequence[torch.nn.Module]) -> None:
        self.linears = linears
        device = linears[0].weight.device
        self.scales = torch.ones(len(linears), 1, device=device)
        self.copies = {
            linear: Quantized(torch.empty(linear.weight.shape, dtype=FP8, device=device), scale)
            for linear, scale in zip(linears, self.scales, strict=True)
        }
        self.transposes = PrefetchedTransposes(linears, transpose, self.copies.__getitem__)

    def forward(self, linear: torch.nn.Module) -> Operand:
        return self.transposes.forward(linear)

    def backward(self, linear: torch.nn.Module) -> Operand:
        return self.transposes.backward(linear)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weights again."""
        self.transposes.forget()
        amax = torch.stack([torch.linalg.vector_norm(linear.weight, float("inf")) for linear in self.linears]).float()
        group = self.linears[0].tp_group
        if group.size() > 1:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        self.scales.copy_(weight_scale(amax)[:, None])
        for linear, copy in self.copies.items():
            quantize_tensor(linear.weight, copy.scale, copy.values)
