"""megatron-core's transformer layer, with our norm, attention and linears."""

from dataclasses import dataclass

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from bench.contract.task import Lora
from jobs.engines.megatron.attention import Attention
from jobs.engines.megatron.fp8 import linear
from jobs.engines.megatron.fp8.layer import Fp8Layer
from jobs.engines.megatron.fp8.ops import Fp8Ops
from jobs.engines.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear

_LINEARS = (ColumnParallelLinear, LoraColumnParallelLinear, RowParallelLinear, LoraRowParallelLinear)


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration, with that of the adapters."""

    lora: Lora | None = None


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm of torch; under SP its weights' gradients are summed over the TP ranks."""

    def __new__(cls, config: LayerConfig, hidden_size: int, eps: float = 1e-5):
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def spec(lora: Lora | None, fp8_ops: Fp8Ops | None, **recomputed: bool) -> ModuleSpec:
    """Return the layer's parts, with adapters where LoRA targets them.

    fp8_ops: the operations of the FP8 layer; None: the layer is megatron-core's.
    recomputed: arguments of the FP8 layer.
    """
    targets = lora.target_modules if lora else []
    column, adapted_column, row, adapted_row = _fp8_linears(fp8_ops) if fp8_ops else _LINEARS
    attention = SelfAttentionSubmodules(
        linear_qkv=adapted_column if "linear_qkv" in targets else column,
        core_attention=Attention,
        linear_proj=adapted_row if "linear_proj" in targets else row,
    )
    return ModuleSpec(
        module=Fp8Layer if fp8_ops else TransformerLayer,
        params={"ops": fp8_ops, **recomputed} if fp8_ops else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _fp8_linears(ops: Fp8Ops) -> list[ModuleSpec]:
    """Return the same kinds as `_LINEARS`, with frozen weights in FP8."""
    linears = (
        linear.Fp8ColumnParallelLinear,
        linear.LoraFp8ColumnParallelLinear,
        linear.Fp8RowParallelLinear,
        linear.LoraFp8RowParallelLinear,
    )
    return [ModuleSpec(linear, params={"weight_dtype": ops.quantized_dtype}) for linear in linears]
