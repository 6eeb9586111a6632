"""`GenerationOps` on a GPU: few rows through kernels of their own, many rows (of prompts) through torch's GEMMs."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from jobs.engines.megatron.generation import attention_kernels, few_rows_kernels, one_row_kernels
from jobs.engines.megatron.generation.few_rows_kernels import MOST_ROWS
from jobs.engines.megatron.generation.one_row_kernels import of_gates_and_ups, of_outputs
from jobs.engines.megatron.generation.ops import TorchOps
from jobs.engines.megatron.generation.weights import Linear
from jobs.engines.megatron.trained.ops import NormWeights


@dataclass(frozen=True)
class GpuOps:
    """The operations in BF16."""

    many_rows: TorchOps

    def linear(
        self, x_MI: Tensor, weight: Linear, *, norm: NormWeights | None = None, residual_MO: Tensor | None = None
    ) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.linear(x_MI, weight, norm=norm, residual_MO=residual_MO)
        out_MO = x_MI.new_empty(len(x_MI), weight.shape[0])
        return _kernels(x_MI).multiply(x_MI, of_outputs(weight), norm=norm, residual=residual_MO, out=out_MO)

    def logits(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.logits(x_MI, weight, norm)
        out_MO = x_MI.new_empty(len(x_MI), weight.shape[0], dtype=torch.float32)
        return _kernels(x_MI).multiply(x_MI, of_outputs(weight), norm=norm, residual=None, out=out_MO)

    def gated(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.gated(x_MI, weight, norm)
        out_MF = x_MI.new_empty(len(x_MI), weight.shape[0] // 2)
        return _kernels(x_MI).multiply(x_MI, of_gates_and_ups(weight), norm=norm, residual=None, out=out_MF)

    def attend(
        self, qkv_BO: Tensor, keys_BGTD: Tensor, values_BGTD: Tensor, positions_B: Tensor, angles_TD: Tensor
    ) -> Tensor:
        return attention_kernels.attend(qkv_BO, keys_BGTD, values_BGTD, positions_B, angles_TD)


def _kernels(x_MI: Tensor) -> ModuleType:
    return one_row_kernels if len(x_MI) == 1 else few_rows_kernels
