"""Specs of the transformer layers: megatron-core's layer or a hand-written one; norm, attention and linears."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from bench.contract.training import Lora
from jobs.engines.megatron.attention import Attention
from jobs.engines.megatron.frozen import linear
from jobs.engines.megatron.frozen.layer import Fp8Layer
from jobs.engines.megatron.frozen.ops import Fp8Ops
from jobs.engines.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from jobs.engines.megatron.trained.layer import TrainedLayer
from jobs.engines.megatron.trained.ops import TrainedOps

Linear: TypeAlias = ModuleSpec | type
"""A linear in a megatron-core spec."""
_LINEARS = (ColumnParallelLinear, LoraColumnParallelLinear, RowParallelLinear, LoraRowParallelLinear)


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration, plus the adapters'."""

    lora: Lora | None = None


class Norm(torch.nn.Module):
    """torch's RMSNorm or LayerNorm; under SP the gradients of its weights are summed over the TP ranks."""

    def __new__(cls, config: LayerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        return _marked(kind, config, hidden_size, eps)


class HeadNorm(torch.nn.Module):
    """torch's RMSNorm of the heads of q or of k; the gradients of its weight are summed over the TP ranks."""

    def __new__(cls, config: LayerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        return _marked(torch.nn.RMSNorm, config, hidden_size, eps)


def _marked(kind: type[torch.nn.Module], config: LayerConfig, size: int, eps: float) -> torch.nn.Module:
    """Return a norm whose parameters megatron-core knows to be the same on all TP ranks."""
    norm = kind(size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
    parameters: Iterator[Any] = norm.parameters()
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def trained_spec(ops: TrainedOps, *, qk_norm: bool = False, **recomputed: bool) -> ModuleSpec:
    """Return the spec of the layer that trains all weights; recomputed: arguments of TrainedLayer."""
    column, row = ColumnParallelLinear, RowParallelLinear
    submodules = _submodules(qkv=column, proj=row, fc1=column, fc2=row, qk_norm=qk_norm)
    return ModuleSpec(TrainedLayer, params={"ops": ops, **recomputed}, submodules=submodules)


def lora_spec(lora: Lora, fp8_ops: Fp8Ops | None, *, qk_norm: bool = False, **recomputed: bool) -> ModuleSpec:
    """Return the spec of a frozen layer, with adapters on the linears that LoRA targets.

    fp8_ops: the operations of the hand-written layer; None: use megatron-core's layer.
    recomputed: arguments of the hand-written layer that select what it recomputes.
    """
    column, adapted_column, row, adapted_row = _frozen_linears(fp8_ops) if fp8_ops else _LINEARS
    submodules = _submodules(
        qkv=adapted_column if "linear_qkv" in lora.target_modules else column,
        proj=adapted_row if "linear_proj" in lora.target_modules else row,
        fc1=column,
        fc2=row,
        qk_norm=qk_norm,
    )
    if fp8_ops is None:
        return ModuleSpec(TransformerLayer, submodules=submodules)
    return ModuleSpec(Fp8Layer, params={"ops": fp8_ops, **recomputed}, submodules=submodules)


def _submodules(
    *, qkv: Linear, proj: Linear, fc1: Linear, fc2: Linear, qk_norm: bool = False
) -> TransformerLayerSubmodules:
    """Return the submodules of a layer with these linears; qk_norm: with norms of the heads of q and k."""
    norm = HeadNorm if qk_norm else None
    norms = {"q_layernorm": norm, "k_layernorm": norm}
    attention = SelfAttentionSubmodules(linear_qkv=qkv, core_attention=Attention, linear_proj=proj, **norms)
    causal = {"attn_mask_type": AttnMaskType.causal}
    return TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=ModuleSpec(SelfAttention, params=causal, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)),
        mlp_bda=get_bias_dropout_add,
    )


def _frozen_linears(ops: Fp8Ops) -> Sequence[Linear]:
    """Return the counterparts of `_LINEARS` that store frozen weights in the format of the operations."""
    if ops.is_nf4:
        return linear.NF4_LINEARS
    if ops.quantized_dtype is None:
        return _LINEARS
    return [ModuleSpec(kind, params={"weight_dtype": ops.quantized_dtype}) for kind in linear.FP8_LINEARS]
