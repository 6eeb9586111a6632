"""The architecture of a decoder-only transformer."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT
from bench.contract.described_model import Described


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
class Experts:
    """A mixture of experts in place of the MLP of every layer."""

    num_experts: int
    experts_per_token: int
    """How many experts a token is sent to (top-k)."""
    ffn_hidden_size: int
    """Width of one expert's MLP."""
    normalize_top_k: bool = True
    """Whether the weights of a token's experts add up to 1."""
    aux_loss_coef: float = 0.0
    """Coefficient of the load-balancing loss in training: the mean over layers of num_experts * sum over experts of
    (its tokens / all tokens) * (mean of its probabilities), for each micro-batch. 0: no such loss.

    Source: transformers 5.23, load_balancing_loss_func, which first takes both means over the tokens of all layers.
    """


@dataclass(slots=True, kw_only=True)
class Model:
    """Architecture of a decoder-only transformer. All sizes are 0 for a model that runstop does not know."""

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
    family: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """The file of bench/contract/families/ that describes the model; None: the one with its layers."""
    head_dim: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Size of an attention head; None: hidden_size / num_attention_heads."""
    qkv_bias: bool = field(default=False, metadata=OMIT_DEFAULT)
    """Whether only q, k and v have biases, as in Qwen2; `bias` gives one to every linear."""
    qk_norm: bool = field(default=False, metadata=OMIT_DEFAULT)
    """Whether each head of q and of k is normalised (RMSNorm) before RoPE, as in Qwen3."""
    experts: Experts | None = field(default=None, metadata=OMIT_DEFAULT)
    """None: every layer has one MLP of ffn_hidden_size."""
    attention_sinks: bool = field(default=False, metadata=OMIT_DEFAULT)
    """Whether each head has one more logit in its softmax, which is learned and has no value, as in gpt-oss."""
    sliding_window: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Number of keys that a query of every second layer sees at most, from the first layer on. None: all before it."""
    described: Described | None = field(default=None, metadata=OMIT_DEFAULT)
    """What transformers says about a model of the family transformers; engine=huggingface builds it from this."""
    weights: Weights = Weights.checkpoint

    @property
    def is_known(self) -> bool:
        """Return whether the sizes are known; those of a program's own model need not be."""
        return any((self.num_layers, self.hidden_size, self.num_attention_heads, self.vocab_size))

    @property
    def head_size(self) -> int:
        """Return the size of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        """Return the width of an MLP: that of one expert, if there are experts."""
        return self.experts.ffn_hidden_size if self.experts else self.ffn_hidden_size

    @property
    def q_size(self) -> int:
        """Return the width of a token's queries: that of the input of the output projection."""
        return self.head_size * self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """Return the width of a token's keys; its values have the same width."""
        return self.head_size * self.num_query_groups
