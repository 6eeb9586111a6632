"""`GenerationOps` on a GPU: few rows through kernels of their own, many rows (of prompts) through torch's GEMMs."""

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from jobs.engines.megatron.generation import attention_kernels, few_rows_kernels, one_row_kernels
from jobs.engines.megatron.generation.few_rows_kernels import MOST_ROWS
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
        return _kernels(x_MI).linear(x_MI, weight, norm=norm, residual=residual_MO)

    def logits(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.logits(x_MI, weight, norm)
        return _kernels(x_MI).linear(x_MI, weight, norm=norm, in_fp32=True)

    def gated(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.gated(x_MI, weight, norm)
        return _kernels(x_MI).gated(x_MI, weight, norm)

    def attend(
        self, qkv_BO: Tensor, keys_BGTD: Tensor, values_BGTD: Tensor, positions_B: Tensor, angles_TD: Tensor
    ) -> Tensor:
        return attention_kernels.attend(qkv_BO, keys_BGTD, values_BGTD, positions_B, angles_TD)


def _kernels(x_MI: Tensor) -> ModuleType:
    return one_row_kernels if len(x_MI) == 1 else few_rows_kernels
