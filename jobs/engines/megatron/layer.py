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
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from bench.contract.model import Model
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


class Router(TopKRouter):
    """megatron-core's router, whose linear needs no Transformer Engine: that of 0.16.1 does, by an undefined name."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [S, B, experts] of hidden states [S, B, hidden]."""
        return torch.nn.functional.linear(input, self.weight)


def trained_spec(ops: TrainedOps, *, qk_norm: bool = False, **recomputed: bool) -> ModuleSpec:
    """Return the spec of the layer that trains all weights; recomputed: arguments of TrainedLayer."""
    column, row = ColumnParallelLinear, RowParallelLinear
    submodules = _submodules(qkv=column, proj=row, fc1=column, fc2=row, qk_norm=qk_norm)
    return ModuleSpec(TrainedLayer, params={"ops": ops, **recomputed}, submodules=submodules)


def lora_spec(lora: Lora, fp8_ops: Fp8Ops, *, qk_norm: bool = False, **recomputed: bool) -> ModuleSpec:
    """Return the spec of the hand-written frozen layer, with adapters on the linears that LoRA targets.

    recomputed: arguments of the layer that select what it recomputes.
    """
    submodules = _submodules(**_adapted(lora, _frozen_linears(fp8_ops)), qk_norm=qk_norm)
    return ModuleSpec(Fp8Layer, params={"ops": fp8_ops, **recomputed}, submodules=submodules)


def megatron_spec(model: Model, lora: Lora | None) -> ModuleSpec:
    """Return the spec of megatron-core's layer, with adapters on the linears that LoRA targets.

    A model with experts has megatron-core's MoE layer in place of the MLP; experts and router have no adapters.
    """
    submodules = _submodules(**_adapted(lora, _LINEARS), qk_norm=model.qk_norm)
    if model.experts is not None:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(SequentialMLP, submodules=linears)
        submodules.mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
    return ModuleSpec(TransformerLayer, submodules=submodules)


def _adapted(lora: Lora | None, linears: Sequence[Linear]) -> dict[str, Linear]:
    """Return a layer's linears by their short names; those that LoRA targets have adapters."""
    column, adapted_column, row, adapted_row = linears
    targets = lora.target_modules if lora else []
    return {
        "qkv": adapted_column if "linear_qkv" in targets else column,
        "proj": adapted_row if "linear_proj" in targets else row,
        "fc1": column,
        "fc2": row,
    }


def _submodules(*, qkv: Linear, proj: Linear, fc1: Linear, fc2: Linear, qk_norm: bool) -> TransformerLayerSubmodules:
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
