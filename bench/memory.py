"""How many parameters a rank holds, and what a training step needs of its GPU's memory.

Counts are exact for megatron-core's GPTModel; bytes are an estimate, for a plan to be judged by before it is queued.
Splits are taken as legal (`bench.plan` refuses the others): tp divides heads, query groups, MLP and vocabulary, pp * vpp
divides the layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.schema import Activation, Config, Device, Lora, Model, Norm, Position, Precision, Recompute

GIB = 2**30
MAIN_GRADIENT_BYTES = 4
ADAM_BYTES = 8
"""First and second moment in FP32."""
CUDA_ALLOWANCE_GIB = 3.0
"""CUDA context, cuBLAS workspaces, NCCL channels, allocator slack: assumed, not measured."""

_BYTES = {Precision.fp32: 4, Precision.bf16: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one GPU of the fullest pipeline stage needs and has; None where there is no GPU."""

    base_weights_gib: float
    """The model itself, which LoRA freezes."""
    adapter_weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float
    total_gib: float
    capacity_gib: float | None
    fits: bool | None
    parameters: int
    """Of the whole model with its adapters, each counted once."""
    trainable_parameters: int
    rank_parameters: int
    rank_trainable_parameters: int


@dataclass(frozen=True, slots=True)
class _Linear:
    """A projection of every layer; TP splits its outputs (column-parallel) or its inputs (row-parallel)."""

    num_in: int
    num_out: int
    is_column: bool


def _norm_size(model: Model) -> int:
    return model.hidden_size * (2 if model.norm is Norm.LayerNorm else 1)


def _linears(model: Model) -> dict[str, _Linear]:
    """Return a layer's projections by megatron-core's names."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    kv = hidden // model.num_attention_heads * model.num_query_groups
    gates = 2 if model.activation is Activation.swiglu else 1
    return {
        "linear_qkv": _Linear(hidden, hidden + 2 * kv, True),
        "linear_proj": _Linear(hidden, hidden, False),
        "linear_fc1": _Linear(hidden, gates * ffn, True),
        "linear_fc2": _Linear(ffn, hidden, False),
    }


def _adapted(model: Model, lora: Lora) -> Iterable[_Linear]:
    linears = _linears(model)
    for name in lora.target_modules:
        yield linears[name]


def _layer_parameters(model: Model, tp: int) -> int:
    """Return a TP rank's share of one layer; norms and row-parallel biases are whole on every rank."""
    count = 2 * _norm_size(model)
    for linear in _linears(model).values():
        count += linear.num_in * linear.num_out // tp
        if model.bias:
            count += linear.num_out // tp if linear.is_column else linear.num_out
    return count


def _adapter_parameters(model: Model, lora: Lora, tp: int) -> int:
    """Return a TP rank's share of one layer's adapters: the side of A or B that faces the split is split with it."""
    count = 0
    for linear in _adapted(model, lora):
        whole, split = (linear.num_in, linear.num_out) if linear.is_column else (linear.num_out, linear.num_in)
        count += lora.rank * (whole + split // tp)
    return count


def rank_parameters(model: Model, lora: Lora | None, *, tp: int, pp: int, pp_rank: int) -> tuple[int, int]:
    """Return the parameters that a rank of pipeline stage pp_rank holds: of the model, and of its adapters.

    Interleaving (vpp) changes which layers a stage holds, not how many. Tied embeddings live on both ends of a pipeline.
    """
    num_layers, vocab = model.num_layers // pp, model.vocab_size // tp * model.hidden_size
    base = num_layers * _layer_parameters(model, tp)
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
    """Return the model's parameters, with the vocabulary as configured and tied embeddings counted once."""
    return rank_parameters(model, None, tp=1, pp=1, pp_rank=0)[0]


def lora_parameters(model: Model, lora: Lora) -> int:
    """Return the adapters' parameters, all of them trainable."""
    return model.num_layers * _adapter_parameters(model, lora, 1)


def _kept_input_bytes(name: str, lora: Lora | None, size: int) -> int:
    """Return bytes kept per number of a projection's input, for the gradient of its weights or of its adapter's."""
    if lora is None or (name in lora.target_modules and not lora.dropout):
        return 0 if name == "linear_proj" else size  # attention keeps its output, which is proj's input, anyway
    return size + 1 if name in lora.target_modules else 0  # dropout's output and its mask


def _layer_bytes(config: Config) -> float:
    """Return bytes that one layer keeps per token of one micro-batch for its backward pass.

    Flash attention and a fused activation; p bytes per number, width h, K or V width k, MLP width f, sequence S.

    | kept                       | bytes             | split over | for the                                 |
    | -------------------------- | ----------------- | ---------- | --------------------------------------- |
    | inputs of the two norms    | 2 p h             | tp if sp   | norms' backward, frozen or not          |
    | inputs of qkv and fc1      | 2 p h             | tp if sp   | weights' gradient: not kept when frozen |
    | q, k, v                    | p (h + 2 k)       | tp         | attention's backward                    |
    | attention's output         | p h               | tp         | same, and proj's weights' gradient      |
    | softmax statistics         | 4 heads           | tp         | attention's backward                    |
    | fc1's output               | p f, swiglu 2 p f | tp         | activation's backward                   |
    | input of fc2               | p f               | tp         | weights' gradient: not kept when frozen |
    | scores when cp > 1         | 2 p heads S       | tp         | no flash kernel takes cp's mask         |
    | LoRA: dropout(x), its mask | (p + 1) width(x)  | as x       | gradient of A                           |
    | LoRA: A dropout(x)         | p rank            | nothing    | gradient of B                           |

    Without dropout an adapter keeps x itself, which attention already keeps for proj. In BF16 a GPT layer (k = h,
    f = 4 h) comes to 32 h, which is Korthikanti et al. 2022's 34 h less its two dropout masks.
    """
    model, lora, size, tp = config.model, config.task.lora, _BYTES[config.precision], config.parallel.tp
    sequence_tp, linears = tp if config.parallel.sp else 1, _linears(model)
    kept = 2 * size * model.hidden_size / sequence_tp
    kept += size * (linears["linear_qkv"].num_out + model.hidden_size + linears["linear_fc1"].num_out) / tp
    kept += 4 * model.num_attention_heads / tp
    if config.parallel.cp > 1:
        kept += 2 * size * model.num_attention_heads * config.data.seq_length / tp
    for name, linear in linears.items():
        split = sequence_tp if linear.is_column else tp
        kept += linear.num_in * _kept_input_bytes(name, lora, size) / split
    if lora:
        kept += size * lora.rank * len(lora.target_modules)
    return kept


def _layers_in_flight(config: Config, dp: int, pp_rank: int) -> float:
    """Return how many layers' activations a stage holds at once, each of one micro-batch.

    A stage runs ahead by its warm-up and one more: min(pp - pp_rank, micro-batches) times its layers in 1F1B.
    Interleaved, given enough micro-batches, the first holds num_layers * (1 + (pp - 1) / (pp * vpp)).

    Source: megatron-core 0.16.1, pipeline_parallel.schedules.get_pp_rank_microbatches.
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp
    num_microbatches = max(1, config.recipe.global_batch_size // (dp * config.recipe.micro_batch(dp)))
    ahead = pp - pp_rank - 1 if vpp == 1 else 2 * (pp - pp_rank - 1) + (vpp - 1) * pp
    return min(ahead + 1, num_microbatches * vpp) * config.model.num_layers / (pp * vpp)


def _tokens(config: Config, dp: int) -> float:
    """Return the tokens of one micro-batch that one rank sees."""
    return config.recipe.micro_batch(dp) * config.data.seq_length / config.parallel.cp


def _activation_bytes(config: Config, dp: int, pp_rank: int) -> float:
    """Return what a stage's layers keep for backward: everything, or their inputs and everything of one of them.

    The embedding's output, the final norm and transient gradients are left out.
    """
    layer, layers = _layer_bytes(config), _layers_in_flight(config, dp, pp_rank)
    if config.recipe.recompute is Recompute.none:
        return _tokens(config, dp) * layers * layer
    split = config.parallel.tp if config.parallel.sp else 1
    layer_input = _BYTES[config.precision] * config.model.hidden_size / split
    return _tokens(config, dp) * (layers * layer_input + layer - layer_input)


def _workspace_bytes(config: Config, dp: int, pp_rank: int) -> float:
    """Return the last stage's logits (as computed, in FP32, their gradient), and on a GPU CUDA's own."""
    workspace = CUDA_ALLOWANCE_GIB * GIB if config.cluster.device is Device.cuda else 0.0
    if pp_rank == config.parallel.pp - 1:
        logits = _tokens(config, dp) * config.model.vocab_size / config.parallel.tp
        workspace += logits * (_BYTES[config.precision] + 4 + 4)
    return workspace


def _stage(config: Config, dp: int, pp_rank: int) -> Memory:
    """Return what a rank of one pipeline stage needs."""
    model, lora, split, size = config.model, config.task.lora, config.parallel, _BYTES[config.precision]
    base, adapters = rank_parameters(model, lora, tp=split.tp, pp=split.pp, pp_rank=pp_rank)
    trainable = adapters if lora else base
    master_bytes = 4 if config.precision is Precision.bf16 else 0
    shards = dp * split.cp if split.distributed_optimizer else 1
    parts = {
        "base_weights_gib": base * size / GIB,
        "adapter_weights_gib": adapters * size / GIB,
        "gradients_gib": trainable * MAIN_GRADIENT_BYTES / GIB,
        "optimizer_gib": trainable * (master_bytes + ADAM_BYTES) / shards / GIB,
        "activations_gib": _activation_bytes(config, dp, pp_rank) / GIB,
        "workspace_gib": _workspace_bytes(config, dp, pp_rank) / GIB,
    }
    total_gib = sum(parts.values())
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    adapters_total = lora_parameters(model, lora) if lora else 0
    return Memory(
        **parts,
        total_gib=total_gib,
        capacity_gib=gpu.memory_gib if gpu else None,
        fits=total_gib <= gpu.memory_gib if gpu else None,
        parameters=parameters(model) + adapters_total,
        trainable_parameters=adapters_total if lora else parameters(model),
        rank_parameters=base + adapters,
        rank_trainable_parameters=trainable,
    )


def estimate(config: Config, *, dp: int) -> Memory:
    """Return what training needs on a GPU of the pipeline stage that needs most.

    dp counts replicas of the model; the distributed optimizer shards its states over dp * cp ranks.
    """
    stages = [_stage(config, dp, pp_rank) for pp_rank in range(config.parallel.pp)]
    return max(stages, key=lambda stage: stage.total_gib)
