"""Count the parameters of a model, and those that one rank holds; exact for megatron-core's GPTModel.

The functions assume a legal split (`bench.planning.parallelism` refuses the others): tp divides heads, query groups,
MLP width and vocabulary, and pp * vpp divides the layers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.training import Lora


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection of every layer; TP splits its outputs (column-parallel) or its inputs (row-parallel)."""

    num_in: int
    num_out: int
    is_column: bool

    @property
    def weights(self) -> int:
        return self.num_in * self.num_out


EXPERT_LINEARS = ("linear_fc1", "linear_fc2")
"""The projections that each expert has."""


def linears(model: Model) -> Mapping[str, Linear]:
    """Return a layer's projections by megatron-core's names; with experts, fc1 and fc2 are those of one expert."""
    gates = 2 if model.activation is Activation.swiglu else 1
    return _linears(model.hidden_size, model.mlp_size, model.q_size, model.kv_size, gates)


@lru_cache(maxsize=64)
def _linears(hidden: int, ffn: int, q: int, kv: int, gates: int) -> Mapping[str, Linear]:
    """Return the projections of these widths; cached, because the search for a layout calls this ten thousand times."""
    return {
        "linear_qkv": Linear(hidden, q + 2 * kv, True),
        "linear_proj": Linear(q, hidden, False),
        "linear_fc1": Linear(hidden, gates * ffn, True),
        "linear_fc2": Linear(ffn, hidden, False),
    }


def peft_linears(model: Model) -> Mapping[str, tuple[int, int]]:
    """Return the inputs and outputs of the linear layers of transformers' Llama, by PEFT's names."""
    hidden, ffn, q, kv = model.hidden_size, model.ffn_hidden_size, model.q_size, model.kv_size
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, ffn),
        "up_proj": (hidden, ffn),
        "down_proj": (ffn, hidden),
    }


def linear_weights(model: Model) -> int:
    """Return the weights of one layer's projections, those of all its experts included.

    Of a model that transformers describes, this is the mean of its layers.
    """
    if model.described is not None:
        return model.described.layer_weights // model.num_layers
    return sum(_copies(model, name) * linear.weights for name, linear in linears(model).items())


def active_linear_weights(model: Model) -> int:
    """Return the weights of one layer's projections that a token uses: of its experts, and of the router."""
    of_expert = sum(linears(model)[name].weights for name in EXPERT_LINEARS)
    return linear_weights(model) - _inactive_experts(model) * of_expert + _router_weights(model)


def _copies(model: Model, name: str, ep: int = 1) -> int:
    """Return how many linears of this name a rank has in one layer."""
    return model.experts.num_experts // ep if model.experts and name in EXPERT_LINEARS else 1


def _inactive_experts(model: Model) -> int:
    return model.experts.num_experts - model.experts.experts_per_token if model.experts else 0


def _router_weights(model: Model) -> int:
    return model.experts.num_experts * model.hidden_size if model.experts else 0


def _expert_parameters(model: Model) -> int:
    """Return the parameters of one expert."""
    projections = (linears(model)[name] for name in EXPERT_LINEARS)
    return sum(linear.weights + (linear.num_out if model.bias else 0) for linear in projections)


def weight_bytes(model: Model, *, shards: int, linear_bytes: float, other_bytes: float) -> float:
    """Return the bytes of the weights on one of the GPUs that share a model: linears, and all others, by their size."""
    held = rank_parameters(model, None, tp=shards, pp=1, pp_rank=0)[0]
    linear = model.num_layers * linear_weights(model) / shards
    return linear * linear_bytes + (held - linear) * other_bytes


def rank_parameters(model: Model, lora: Lora | None, *, tp: int, pp: int, pp_rank: int, ep: int = 1) -> tuple[int, int]:
    """Return how many parameters a rank of pipeline stage pp_rank holds: of the model, and of its adapters.

    Interleaving (vpp) changes which layers a stage holds, not how many. Tied embeddings are held by the first and by
    the last stage. ep ranks hold different experts.
    """
    num_layers, vocab = model.num_layers // pp, model.vocab_size // tp * model.hidden_size
    if model.described is not None:  # only engine=huggingface has it, which does not split layers
        return model.described.parameters, lora_parameters(model, lora) if lora else 0
    base = num_layers * _layer_parameters(model, tp, ep)
    if pp_rank == 0:
        base += vocab
        if model.position is Position.learned:
            base += model.max_seq_length * model.hidden_size
    if pp_rank == pp - 1:
        base += _norm_size(model)
        if pp > 1 or not model.tied_embeddings:
            base += vocab
    return base, num_layers * _adapter_parameters(model, lora, tp) if lora else 0


def parameters(model: Model) -> int:
    """Return how many parameters the model has, with the configured vocabulary size; tied embeddings count once."""
    return rank_parameters(model, None, tp=1, pp=1, pp_rank=0)[0]


def active_parameters(model: Model) -> int:
    """Return how many parameters a token uses: all but those of the experts that it is not sent to."""
    if model.described is not None:
        return model.described.active_parameters
    return parameters(model) - model.num_layers * _inactive_experts(model) * _expert_parameters(model)


def lora_parameters(model: Model, lora: Lora) -> int:
    """Return how many parameters all adapters have together."""
    if model.described is not None:
        return model.described.adapter_parameters(lora.rank, lora.peft_modules)
    return model.num_layers * _adapter_parameters(model, lora, 1)


def _norm_size(model: Model) -> int:
    return model.hidden_size * (2 if model.norm is Norm.LayerNorm else 1)


def _layer_parameters(model: Model, tp: int, ep: int) -> int:
    """Return a TP rank's share of one layer; norms, router and row-parallel biases are replicated on every rank."""
    count = 2 * _norm_size(model) + _router_weights(model)
    if model.experts and model.bias:
        count += model.experts.num_experts
    if model.attention_sinks:
        count += model.num_attention_heads // tp
    if model.qkv_bias:
        count += linears(model)["linear_qkv"].num_out // tp
    if model.qk_norm:
        count += 2 * model.head_size
    for name, linear in linears(model).items():
        one = linear.weights // tp
        if model.bias:
            one += linear.num_out // tp if linear.is_column else linear.num_out
        count += _copies(model, name, ep) * one
    return count


def _adapter_parameters(model: Model, lora: Lora, tp: int) -> int:
    """Return a TP rank's share of one layer's adapters: the one of A and B on the split side of the linear is split.

    Adapters with separate matrices A are never split.
    """
    if not lora.shared_a:
        sizes = peft_linears(model)
        return sum(lora.rank * sum(sizes[name]) for name in lora.peft_modules)
    count = 0
    for linear in _adapted_linears(model, lora):
        replicated, split = (linear.num_in, linear.num_out) if linear.is_column else (linear.num_out, linear.num_in)
        count += lora.rank * (replicated + split // tp)
    return count


def _adapted_linears(model: Model, lora: Lora) -> Iterable[Linear]:
    projections = linears(model)
    for name in lora.target_modules:
        yield projections[name]


def largest_trained(model: Model, lora: Lora | None) -> int:
    """Return the elements of the largest trained weight."""
    if model.described is not None:
        sides = (one.largest_side for one in model.described.projections)
        return lora.rank * max(sides, default=0) if lora else model.described.largest_parameter
    if lora is None:
        return model.hidden_size * max(model.vocab_size, model.mlp_size)
    return lora.rank * max(max(one.num_in, one.num_out) for one in linears(model).values())
