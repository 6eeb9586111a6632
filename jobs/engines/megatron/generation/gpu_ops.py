"""`GenerationOps` on a GPU: few rows through kernels of their own, many rows (of prompts) through torch's GEMMs.

FP8 weights would have to be converted for torch's GEMM; reading them a few times instead takes less.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from types import ModuleType

import torch
from torch import Tensor

from jobs.engines.megatron.fp8.quantize import FP8
from jobs.engines.megatron.generation import attention_kernels, few_rows_kernels, one_row_kernels
from jobs.engines.megatron.generation.few_rows_kernels import MOST_ROWS
from jobs.engines.megatron.generation.ops import TorchOps
from jobs.engines.megatron.generation.weights import Linear
from jobs.engines.megatron.trained.ops import NormWeights

_MOST_PASSES = 8
"""Over FP8 weights, instead of their conversion."""


@dataclass(frozen=True)
class GpuOps:
    """The operations in BF16."""

    many_rows: TorchOps

    def linear(
        self, x_MI: Tensor, weight: Linear, *, norm: NormWeights | None = None, residual_MO: Tensor | None = None
    ) -> Tensor:
        if _are_many(x_MI, weight):
            return self.many_rows.linear(x_MI, weight, norm=norm, residual_MO=residual_MO)
        return _in_passes(lambda x, of: _kernels(x).linear(x, weight, norm=norm, residual=of), x_MI, residual_MO)

    def logits(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if _are_many(x_MI, weight):
            return self.many_rows.logits(x_MI, weight, norm)
        return _in_passes(lambda x, _: _kernels(x).linear(x, weight, norm=norm, in_fp32=True), x_MI)

    def gated(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if _are_many(x_MI, weight):
            return self.many_rows.gated(x_MI, weight, norm)
        return _in_passes(lambda x, _: _kernels(x).gated(x, weight, norm), x_MI)

    def attend(
        self, qkv_BO: Tensor, keys_BGTD: Tensor, values_BGTD: Tensor, positions_B: Tensor, angles_TD: Tensor
    ) -> Tensor:
        return attention_kernels.attend(qkv_BO, keys_BGTD, values_BGTD, positions_B, angles_TD)


def _are_many(x_MI: Tensor, weight: Linear) -> bool:
    passes = _MOST_PASSES if weight.values.dtype is FP8 else 1
    return len(x_MI) > passes * MOST_ROWS


def _kernels(x_MI: Tensor) -> ModuleType:
    return one_row_kernels if len(x_MI) == 1 else few_rows_kernels


def _in_passes(
    run: Callable[[Tensor, Tensor | None], Tensor], x_MI: Tensor, residual_MO: Tensor | None = None
) -> Tensor:
    """Return the results of all rows, computed as many at a time as the kernels take."""
    residuals = repeat(None) if residual_MO is None else residual_MO.split(MOST_ROWS)
    results = [run(*parts) for parts in zip(x_MI.split(MOST_ROWS), residuals, strict=False)]
    return results[0] if len(results) == 1 else torch.cat(results)
