"""The transformer layer: megatron-core's, with norm, attention and linears of our choice."""

from dataclasses import dataclass

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from bench.schema import Lora
from jobs.megatron.attention import Attention
from jobs.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration and our adapters'."""

    lora: Lora | None = None


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm of torch; under SP its weights' gradients are summed over the TP ranks."""

    def __new__(cls, config: LayerConfig, hidden_size: int, eps: float = 1e-5):
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def spec(lora: Lora | None) -> ModuleSpec:
    """Return the layer's parts, with adapters where LoRA targets them."""
    targets = lora.target_modules if lora else []
    attention = SelfAttentionSubmodules(
        linear_qkv=LoraColumnParallelLinear if "linear_qkv" in targets else ColumnParallelLinear,
        core_attention=Attention,
        linear_proj=LoraRowParallelLinear if "linear_proj" in targets else RowParallelLinear,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )
