"""RoPE's angles of all positions, by megatron-core as in training, Llama 3.1's scaling included."""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from bench.contract.task import Model


def angles(model: Model, num_positions: int, device: torch.device) -> Tensor:
    """Return the angles [T, D] in FP32; both halves of a row are the same."""
    rope = RotaryEmbedding(
        kv_channels=model.hidden_size // model.num_attention_heads,
        rotary_percent=1.0,
        rotary_base=model.rope_base,
        rope_scaling=model.rope_scaling_factor != 1,
        rope_scaling_factor=model.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    return rope.get_freqs_non_repeated(num_positions).repeat(1, 2).to(device)
