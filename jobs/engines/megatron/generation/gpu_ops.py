"""`GenerationOps` on a GPU: few rows use Triton kernels, many rows (of prompts) use torch's GEMMs."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bench.contract.generation import Sampling
from jobs.engines.megatron.fp8_gemm import matmul
from jobs.engines.megatron.generation import (
    attention_kernels,
    embedding_kernels,
    few_rows_kernels,
    one_row_kernels,
    sampling_kernels,
)
from jobs.engines.megatron.generation.few_rows_kernels import LOW, MOST_ROWS
from jobs.engines.megatron.generation.kv_cache import KvCache
from jobs.engines.megatron.generation.one_row_kernels import WeightOperands, gated_operands, plain_operands
from jobs.engines.megatron.generation.ops import TorchOps
from jobs.engines.megatron.generation.peer_memory import MOST_SLOTS
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.generation.weights import Linear
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.quantize import FP8, Quantized
from jobs.engines.megatron.trained.ops import NormWeights

_FP8_ALIGNMENT = 16
"""cuBLAS requires the sizes of an FP8 weight to be multiples of this."""


@dataclass(frozen=True)
class GpuOps:
    """The operations in BF16."""

    many_rows: TorchOps

    def own_rows(self, tokens_M: Tensor, table_VH: Tensor, first: int) -> Tensor:
        return embedding_kernels.own_rows(tokens_M, table_VH, first)

    def linear(
        self, x_MI: Tensor, weight: Linear, *, norm: NormWeights | None = None, residual_MO: Tensor | None = None
    ) -> Tensor:
        if len(x_MI) > MOST_ROWS and _is_fp8_gemm(weight):
            y_MO = _fp8_product(x_MI, weight, norm)
            return y_MO if residual_MO is None else y_MO.add_(residual_MO)
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.linear(x_MI, weight, norm=norm, residual_MO=residual_MO)
        out_MO = x_MI.new_empty(len(x_MI), weight.shape[0])
        return _kernels(x_MI).multiply(x_MI, plain_operands(weight), norm=norm, residual=residual_MO, out=out_MO)

    def logits(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.logits(x_MI, weight, norm)
        out_MO = x_MI.new_empty(len(x_MI), weight.shape[0], dtype=torch.float32)
        return _kernels(x_MI).multiply(x_MI, plain_operands(weight), norm=norm, residual=None, out=out_MO)

    def gated(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        if len(x_MI) > MOST_ROWS:
            return self.many_rows.trained.swiglu(self.linear(x_MI, weight, norm=norm))[0].values
        out_MF = x_MI.new_empty(len(x_MI), weight.shape[0] // 2)
        return _kernels(x_MI).multiply(x_MI, gated_operands(weight), norm=norm, residual=None, out=out_MF)

    def attend(
        self,
        qkv_BO: Tensor,
        keys_BGTD: Tensor,
        values_BGTD: Tensor,
        positions_B: Tensor,
        angles_TD: Tensor,
        *,
        bias_O: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        caches = keys_BGTD, values_BGTD, positions_B, angles_TD
        if not attention_kernels.is_supported(keys_BGTD.shape[3]):
            return self.many_rows.attend(qkv_BO, *caches, bias_O=bias_O, norms=norms)
        return attention_kernels.attend(qkv_BO, *caches, bias=bias_O, norms=norms)

    def append(self, logits_BV: Tensor, cache: KvCache, sampling: Sampling, ranks: Ranks) -> None:
        is_filtered = sampling.top_k is not None or sampling.top_p is not None
        if is_filtered or ranks.size > 1 and (ranks.peers is None or len(logits_BV) > MOST_SLOTS):
            return self.many_rows.append(logits_BV, cache, sampling, ranks)
        return sampling_kernels.append(logits_BV, cache, sampling, ranks.peers)


class _Kernels(Protocol):
    """A module of kernels for few rows."""

    def multiply(
        self, x: Tensor, weights: WeightOperands, *, norm: NormWeights | None, residual: Tensor | None, out: Tensor
    ) -> Tensor: ...


def _kernels(x_MI: Tensor) -> _Kernels:
    return one_row_kernels if len(x_MI) == 1 else few_rows_kernels


def _is_fp8_gemm(weight: Linear) -> bool:
    """Return whether Hopper's FP8 GEMMs support this weight."""
    return weight.values.dtype is FP8 and all(size % _FP8_ALIGNMENT == 0 for size in weight.shape)


def _fp8_product(x_MI: Tensor, weight: Linear, norm: NormWeights | None) -> Tensor:
    """Return weight norm(x) [M, O] by an FP8 GEMM; each row of x is split into two FP8 rows (high and low values).

    An FP8 GEMM with twice the rows takes less time than the conversion of the weight to BF16 and a BF16 GEMM.
    """
    assert weight.scale is not None, "each row of an FP8 weight has a scale"
    numbers_2MI, scale_M = few_rows_kernels.split_fp8(x_MI, norm)
    rows = Quantized(numbers_2MI.flatten(0, 1), torch.cat([scale_M, scale_M / LOW]))
    high_MO, low_MO = matmul(rows, Quantized(weight.values, weight.scale)).chunk(2)
    return high_MO.add_(low_MO)
