"""The architecture of a decoder-only transformer."""

from dataclasses import dataclass
from enum import Enum


class Weights(Enum):
    """checkpoint: start as configured in the task. random: random weights and rows, to measure speed without files."""

    checkpoint = "checkpoint"
    random = "random"


class Norm(Enum):
    """Normalization, by megatron-core's names."""

    RMSNorm = "RMSNorm"
    LayerNorm = "LayerNorm"


class Activation(Enum):
    """Activation of the MLP; swiglu has a gate, so its first projection is twice as wide."""

    swiglu = "swiglu"
    gelu = "gelu"


class Position(Enum):
    """How positions are encoded."""

    rope = "rope"
    learned = "learned"


@dataclass(slots=True, kw_only=True)
class Model:
    """Architecture of a decoder-only transformer."""

    name: str
    source: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    max_seq_length: int
    norm: Norm
    norm_epsilon: float
    activation: Activation
    position: Position
    rope_base: int = 10000
    rope_scaling_factor: float = 1.0
    """Llama 3.1's frequency scaling; 1 leaves RoPE as it is."""
    bias: bool = False
    tied_embeddings: bool = False
    weights: Weights = Weights.checkpoint
