"""Estimate the GPU memory of a step of engine=huggingface, by strategy.

Memory has two peaks in a step: at the start of the backward pass, with all activations, and in the optimizer step, with
all gradients. The parts of the estimate are those of the higher peak, so that they add up.
"""

import math
from dataclasses import dataclass

from bench.contract.described_model import Described
from bench.contract.engine import MOST_ZERO_STAGE, Attention, Bf16, HuggingFace, Strategy
from bench.contract.model import Norm
from bench.contract.plan import Memory, Recomputed, World
from bench.contract.schema import Config, Device, Precision
from bench.contract.training import Recompute, Trains
from bench.planning import deepspeed
from bench.planning.estimates.memory import (
    CUDA_ALLOWANCE_GIB,
    EVERYTHING,
    FIT_MARGIN_GIB,
    GIB,
    NF4_BYTES,
    NF4_SCALE_BYTES,
    NOTHING,
    gpu,
)
from bench.planning.estimates.parameters import (
    largest_trained,
    linear_weights,
    linears,
    lora_parameters,
    parameters,
    peft_linears,
)
from bench.planning.parallelism import num_microbatches, tokens

LOSS_BYTES = 12
"""Per logit while the loss is differentiated: log-softmax in FP32 and two gradients of that size."""


def compute_bytes(config: Config) -> int:
    """Return the bytes per element in GEMMs."""
    return 4 if config.precision is Precision.fp32 else 2


def is_autocast(config: Config, hf: HuggingFace) -> bool:
    """Return whether GEMMs compute in BF16 from trained weights in FP32, under autocast."""
    is_fsdp = hf.strategy in (
        Strategy.fsdp2,
        Strategy.fsdp2_hybrid,
    )  # its gathered weights are BF16: no autocast
    return config.precision is Precision.bf16 and hf.bf16_mode is Bf16.autocast and not is_fsdp


def residual_bytes(config: Config, hf: HuggingFace) -> int:
    """Return the bytes per element of the residual stream: FP32 after trained embeddings in FP32."""
    is_wide = is_autocast(config, hf) and config.training.trains is Trains.all
    return 4 if is_wide else compute_bytes(config)


def layer_bytes(config: Config, hf: HuggingFace) -> float:
    """Return the bytes that one layer stores per token of one micro-batch."""
    if config.model.described is not None:
        return _probed_bytes(config, config.model.described)
    is_llama = config.model.norm is Norm.RMSNorm
    if config.training.trains is not Trains.all:
        return _frozen_llama_bytes(config, hf)
    return _llama_bytes(config, hf) if is_llama else _gpt2_bytes(config, hf)


def _probed_bytes(config: Config, described: Described) -> float:
    """Return the bytes per token that a layer stored when it was probed, at the row length of the plan."""
    probe = described.probe
    assert probe is not None, "a plan of training probes the layers"
    return probe.bytes_per_token + probe.bytes_per_key * config.training_data.seq_length


def _llama_bytes(config: Config, hf: HuggingFace) -> float:
    """Return the bytes of a Llama layer whose weights are trained: p bytes per GEMM element, hidden h, MLP f.

    | stored tensor                                          | bytes            | under autocast |
    | ------------------------------------------------------ | ---------------- | -------------- |
    | inputs of the two norms, in FP32; 1 / rms              | 8 h + 8          | 8 h + 8        |
    | normalized, before the norm's weight                   | 2 p h            | 8 h            |
    | inputs of q, k, v and of gate, up                      | 2 p h            | 5 p h          |
    | q, k, v after RoPE, output of attention; see attention | p (h + 2 k), p h | as without     |
    | gate, its SiLU, up, their product                      | 4 p f            | 4 p f          |
    | norms on q and k: `_qk_norm_bytes`                     |                  |                |
    """
    h, f, p = config.model.hidden_size, config.model.ffn_hidden_size, compute_bytes(config)
    norms = 8 * h + 8 + (8 * h + 5 * p * h if is_autocast(config, hf) else 4 * p * h)
    return norms + _attention_bytes(config, hf) + _qk_norm_bytes(config, p) + 4 * p * f


def _qk_norm_bytes(config: Config, weight: int) -> float:
    """Return the bytes that norms on the heads of q and k store: their inputs in FP32, and 1 / rms of each head.

    weight: bytes per element of what a trained weight of a norm stores, 0 for a frozen one.
    """
    m = config.model
    heads = m.num_attention_heads + m.num_query_groups
    return ((4 + weight) * (m.q_size + m.kv_size) + 4 * heads) if m.qk_norm else 0.0


def _frozen_llama_bytes(config: Config, hf: HuggingFace) -> float:
    """Return the bytes of a Llama layer under adapters: linears that are frozen store no input.

    | stored tensor                                 | bytes                                                     |
    | --------------------------------------------- | --------------------------------------------------------- |
    | inputs of the two norms, in FP32; 1 / rms     | 8 h + 8                                                   |
    | q, k, v after RoPE, output of attention       | p (h + 2 k), p h                                          |
    | gate, its SiLU, up                            | 3 p f                                                     |
    | inputs of adapters, i numbers each:           |                                                           |
    | without dropout                               | p h for q, k, v together, and for gate, up; p f for down  |
    | under autocast, each                          | p i                                                       |
    | with dropout: its output and its mask, each   | (p + 1) i                                                 |
    | A x, each                                     | p rank                                                    |
    """
    lora, h, f = config.training.lora, config.model.hidden_size, config.model.ffn_hidden_size
    assert lora is not None
    p, modules = compute_bytes(config), lora.peft_modules
    has_copies = lora.dropout > 0 or is_autocast(config, hf)
    if has_copies:
        inputs = sum(peft_linears(config.model)[name][0] for name in modules) * (p + (1 if lora.dropout else 0))
    else:  # attention's output, the input of o_proj, is stored already
        inputs = p * sum(size for names, size in _shared_inputs(config) if names.intersection(modules))
    if hf.attention is Attention.eager and (has_copies or "o_proj" not in modules):
        inputs -= p * config.model.q_size  # eager attention does not store its output, and no other operation does
    norms = 8 * h + 8 + _qk_norm_bytes(config, 0)
    return norms + _attention_bytes(config, hf) + 3 * p * f + inputs + len(modules) * p * lora.rank


def _shared_inputs(config: Config) -> tuple[tuple[frozenset[str], int], ...]:
    """Return the linear layers of a Llama that read the same tensor, and its size per token."""
    h, f = config.model.hidden_size, config.model.ffn_hidden_size
    return (
        (frozenset({"q_proj", "k_proj", "v_proj"}), h),
        (frozenset({"gate_proj", "up_proj"}), h),
        (frozenset({"down_proj"}), f),
    )


def _gpt2_bytes(config: Config, hf: HuggingFace) -> float:
    """Return the bytes of a GPT-2 layer whose weights are trained; r bytes per element of the residual stream.

    | stored tensor                                  | bytes          |
    | ---------------------------------------------- | -------------- |
    | inputs of the two norms; their mean and 1 / sd | 2 r h + 4 r    |
    | outputs of the two norms                       | 2 p h          |
    | q, k, v, output of attention                   | 3 p h, p h     |
    | input and output of GELU                       | 2 p f          |
    """
    h, f, p = config.model.hidden_size, config.model.ffn_hidden_size, compute_bytes(config)
    r = residual_bytes(config, hf)
    return 2 * r * h + 4 * r + 2 * p * h + _attention_bytes(config, hf) + 2 * p * f


def _attention_bytes(config: Config, hf: HuggingFace) -> float:
    """Return the bytes of q, k, v, the output, and further tensors by attention implementation.

    sdpa and flash_attention_2 store one FP32 number per head. eager stores the probabilities, heads x row length
    elements per token, in the GEMM precision (with Llama or autocast in FP32 as well), and k, v for every head.
    """
    model, p, a = config.model, compute_bytes(config), config.model.num_attention_heads
    stored = p * (linears(model)["linear_qkv"].num_out + model.q_size)
    if hf.attention is not Attention.eager:
        return stored + 4 * a
    is_upcast = p == 2 and (model.norm is Norm.RMSNorm or is_autocast(config, hf))
    repeated = 2 * p * (model.q_size - model.kv_size)
    return stored + repeated + (p + (4 if is_upcast else 0)) * a * config.training_data.seq_length


def transient_bytes(config: Config, hf: HuggingFace) -> float:
    """Return the estimated peak of temporary bytes per token in the running layer, without stored activations.

    The backward pass of the MLP has gradients of the product, of SiLU and of both projections; that of eager attention
    has gradients of the probabilities in both precisions.
    """
    model, p = config.model, compute_bytes(config)
    mlp = 4 * p * model.ffn_hidden_size
    is_eager = hf.attention is Attention.eager
    return max(mlp, (p + 8) * model.num_attention_heads * config.training_data.seq_length if is_eager else 0)


PACKED = 4
"""Weights of a 4-bit base in one BF16 element of its storage."""
GATHERED_LAYERS = 3
"""FSDP2: the weights of the running layer, and of the next one in the all-gather buffer and unpacked. Assumed."""
HOST_LAYERS = 2
"""With offloaded activations: the running layer, and the layer that is being copied. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one rank: persistent states, and temporary buffers."""

    base: float
    """Weights of the base; with qlora also their scales, which are on every rank."""
    adapters: float
    optimizer: float
    """Master weights and moments."""
    gradients: float
    """In the optimizer step."""
    early_gradients: float
    """Gradients that exist when the last backward pass begins."""
    copies: float = 0.0
    """BF16 copies of weights, from the forward to the backward pass."""
    buffers: float
    """Persistent buffers: FSDP2's gathered weights, DDP's buckets, ZeRO-3's gradient bucket."""
    reduction: float = 0.0
    """During the backward pass: DeepSpeed's gradient buckets, their copies, and ZeRO-3's gathered weights."""
    step: float = 0.0
    """Additional memory of the optimizer step."""


def estimate(config: Config, world: World, recomputed: Recomputed) -> Memory:
    """Return the memory of one GPU."""
    hf = config.huggingface
    assert hf is not None
    states = _states(config, hf, world)
    activations = states.copies + _activation_bytes(config, hf, world, recomputed)
    work = max(
        _head_bytes(config, hf, world),
        tokens(config, world) * transient_bytes(config, hf) + _dequantized_bytes(config),
    )
    work += states.reduction
    is_at_step = states.gradients + states.step > states.early_gradients + activations + work
    own = CUDA_ALLOWANCE_GIB * GIB if config.cluster.device is Device.cuda else 0
    parts = {
        "base_weights_gib": states.base,
        "adapter_weights_gib": states.adapters,
        "gradients_gib": states.gradients if is_at_step else states.early_gradients,
        "optimizer_gib": states.optimizer,
        "activations_gib": 0.0 if is_at_step else activations,
        "workspace_gib": own + states.buffers + (states.step if is_at_step else work),
    }
    in_gib = {name: size / GIB for name, size in parts.items()}
    total_gib, device = sum(in_gib.values()), gpu(config)
    every, trained = counts(config)
    shards = weight_shards(hf, world)
    return Memory(
        **in_gib,
        total_gib=total_gib,
        capacity_gib=device.memory_gib if device else None,
        fits=total_gib <= device.memory_gib if device else None,
        parameters=every,
        trainable_parameters=trained,
        rank_parameters=math.ceil(every / shards),
        rank_trainable_parameters=math.ceil(trained / shards),
    )


def recompute(config: Config, world: World) -> Recomputed:
    """Return whether all layers are recomputed: by engine.huggingface, else by the recipe; `fit`: only if necessary."""
    hf = config.huggingface
    assert hf is not None
    if hf.activation_checkpointing is not None:
        return EVERYTHING if hf.activation_checkpointing else NOTHING
    requested, device = config.training_recipe.recompute, gpu(config)
    if requested is not Recompute.fit or device is None:
        return EVERYTHING if requested is Recompute.full else NOTHING
    fits = estimate(config, world, NOTHING).total_gib <= device.memory_gib - FIT_MARGIN_GIB
    return NOTHING if fits else EVERYTHING


def counts(config: Config) -> tuple[int, int]:
    """Return how many parameters there are, and how many are trained."""
    base, lora = parameters(config.model), config.training.lora
    adapters = lora_parameters(config.model, lora) if lora else 0
    return base + adapters, adapters if lora else base


def weight_shards(hf: HuggingFace, world: World) -> int:
    """Return over how many ranks, or GPUs of one process, the weights are split."""
    if hf.strategy is Strategy.balanced:
        return hf.num_gpus
    if not hf.is_sharded:
        return 1
    return min(world.ranks_per_node, world.num_ranks) if hf.strategy is Strategy.fsdp2_hybrid else world.num_ranks


def _states(config: Config, hf: HuggingFace, world: World) -> States:
    if hf.strategy is Strategy.deepspeed:
        return _zero(config, hf, world)
    if hf.strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid):
        return _fsdp2(config, hf, world)
    return _replicated(config, hf, world)


def _trained_bytes(config: Config, hf: HuggingFace) -> int:
    """Return the bytes of a trained weight; its gradient and moments have the same size if torch updates it."""
    return 4 if config.precision is Precision.fp32 or hf.bf16_mode is Bf16.autocast else 2


def _base_bytes(config: Config, size: int) -> float:
    """Return the bytes of the base: trained with `size` bytes per weight, or frozen (with qlora, linears in 4 bits)."""
    base, in_4_bits = parameters(config.model), _weights_in_4_bits(config)
    if config.training.trains is Trains.all:
        return float(size * base)
    return compute_bytes(config) * (base - in_4_bits) + NF4_BYTES * in_4_bits


def _weights_in_4_bits(config: Config) -> int:
    """Return how many weights of the base are stored in 4 bits."""
    is_qlora = config.training.trains is Trains.qlora
    if config.model.described is not None:
        return sum(one.weights for one in config.model.described.projections) if is_qlora else 0
    return config.model.num_layers * linear_weights(config.model) if is_qlora else 0


def _base_shard_bytes(config: Config, size: int, share: float) -> float:
    """Return the bytes of a rank's share of the base: the scales of a 4-bit base are whole on every rank."""
    scales = NF4_SCALE_BYTES * _weights_in_4_bits(config)
    return share * (_base_bytes(config, size) - scales) + scales


def _adapter_bytes(config: Config, size: int) -> float:
    lora = config.training.lora
    return float(size * lora_parameters(config.model, lora)) if lora else 0.0


def _is_accumulating(config: Config, world: World) -> bool:
    return num_microbatches(config, world) > 1


def _replicated(config: Config, hf: HuggingFace, world: World) -> States:
    """Return the states of DDP and balanced: weights, gradients and moments have one size; DDP's buckets are copies of
    all gradients.

    Under autocast the BF16 copies of all linears' weights are kept from the forward to the backward pass.
    """
    size, trained, over = _trained_bytes(config, hf), counts(config)[1], weight_shards(hf, world)
    buckets = size * trained if world.dp > 1 else 0
    return States(
        base=_base_bytes(config, size) / over,
        adapters=_adapter_bytes(config, size) / over,
        optimizer=2 * size * trained / over,
        gradients=size * trained / over,
        early_gradients=size * trained / over if _is_accumulating(config, world) else 0.0,
        copies=2 * trained / over if is_autocast(config, hf) else 0.0,
        buffers=buckets,
    )


def _fsdp2(config: Config, hf: HuggingFace, world: World) -> States:
    """Return the states of FSDP2: sharded weights, gradients and moments.

    Some layers, and all weights outside of layers, are gathered in the GEMM precision; layers of a 4-bit base are
    gathered in 4 bits.

    Gradients of micro-batches before the last one are not reduced, so each rank keeps them whole.
    """
    size, trained, over = _trained_bytes(config, hf), counts(config)[1], weight_shards(hf, world)
    on_gpu = 0 if hf.offload_parameters else 1
    p, model = compute_bytes(config), config.model
    layers = (model.num_layers * linear_weights(model)) or 1
    root = parameters(model) - layers
    layer_size = 0.5 if _weights_in_4_bits(config) else p
    gathered = layer_size * GATHERED_LAYERS * layers / model.num_layers + p * root
    share = trained / parameters(model) if config.training.lora else 1.0
    reduced = 2 * p * share * layers / model.num_layers
    whole = p * trained if _is_accumulating(config, world) else 0
    return States(
        base=_base_shard_bytes(config, size, on_gpu / over),
        adapters=on_gpu * _adapter_bytes(config, size) / over,
        optimizer=on_gpu * 2 * size * trained / over,
        gradients=on_gpu * size * trained / over,
        early_gradients=whole,
        buffers=gathered + reduced,
    )


def _zero(config: Config, hf: HuggingFace, world: World) -> States:
    """Return the states of ZeRO. s: bytes of a weight or gradient; t: trained weights; N: ranks; o: 1, with offload 0.

    m: bytes of a master weight, of its gradient and of each moment: 2 with bf16=pure, else 4.

    | bytes                    | stage 0     | 1               | 2               | 3                          |
    | ------------------------ | ----------- | --------------- | --------------- | -------------------------- |
    | weights                  | s           | s               | s               | s / N; offloaded 0         |
    | master weights           | 4 t, FP32 0 | m o t / N       | m o t / N       | m o t / N                  |
    | moments                  | 8 t         | 2 m o t / N     | 2 m o t / N     | 2 m o t / N                |
    | gradients                | s t         | s t             | s o t / N       | s o t / N                  |
    | in the step              | 4 t, FP32 0 | (m + s) o t / N | (m + s) o t / N | (m + s) o of a sub-group   |
    | buckets, in the backward | one         | 2 or 3          | 2 or 3          | 2, of which one stays      |
    | with offloaded states    |             | of one weight   | of one weight   |                            |
    | gathered weights         |             |                 |                 | see deepspeed.gathered     |

    In FP32 and with bf16=pure the step needs m where BF16 needs m + s: there is nothing to convert.

    Source: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py, runtime/zero/stage_1_and_2.py (_release_ipg_buffers,
    step) and stage3.py (_prepare_fp32_grad_for_sub_group); runtime/base_optimizer.py (_configure_master_weights).
    """
    sizes, size, stage = deepspeed.sizes(config), compute_bytes(config), hf.zero_stage
    trained, shards = counts(config)[1], world.num_ranks if stage else 1
    on_gpu = 0 if hf.offload_optimizer else 1
    weight_bytes = 0 if hf.offload_parameters else 1 / weight_shards(hf, world)
    has_copies, state_bytes = size < 4 or stage > 0, 2 if hf.bf16_mode is Bf16.pure else 4
    own = trained / shards
    gradients = size * (trained if stage < 2 else own) * (on_gpu if stage else 1)
    is_kept = _is_accumulating(config, world) or stage == MOST_ZERO_STAGE
    return States(
        base=_base_shard_bytes(config, size, weight_bytes),
        adapters=weight_bytes * _adapter_bytes(config, size),
        optimizer=(2 + has_copies) * state_bytes * own * on_gpu,
        gradients=gradients,
        early_gradients=gradients if is_kept else 0.0,
        buffers=float(size * _zero_buffers(config, hf, sizes)),
        reduction=float(size * _zero_reduction(config, hf, world, sizes)),
        step=_zero_step(sizes, own, size=size, state_bytes=state_bytes, stage=stage) * on_gpu,
    )


def _zero_buffers(config: Config, hf: HuggingFace, sizes: deepspeed.Sizes) -> int:
    """Return the elements of ZeRO-3's bucket; below stage 3, of the buffer that copies gradients to the host.

    Source: DeepSpeed 0.19.8, stage3.py, ipg_buckets; stage_1_and_2.py, temp_grad_buffer_for_gpu_offload.
    """
    if hf.zero_stage == MOST_ZERO_STAGE:
        return sizes.bucket
    return largest_trained(config.model, config.training.lora) if hf.offload_optimizer else 0


def _zero_reduction(config: Config, hf: HuggingFace, world: World, sizes: deepspeed.Sizes) -> int:
    """Return the elements of the buffers in the backward pass: buckets, a copy of one, and ZeRO-3's gathered weights.

    A bucket is reduced from a copy, whose parts are in the order of ranks.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py, allreduce_bucket (flatten); runtime/comm/coalesced_collectives.py,
    reduce_scatter_coalesced (tensor_partition_flat_buffer).
    """
    every, trained = counts(config)
    copy = min(sizes.bucket, trained)
    if hf.zero_stage == MOST_ZERO_STAGE:
        stored = every - _weights_in_4_bits(config) * (PACKED - 1) // PACKED
        return copy + deepspeed.gathered(config, world.num_ranks, stored)
    return copy + (sizes.bucket * sizes.num_buckets if hf.zero_stage else 0)


def _head_bytes(config: Config, hf: HuggingFace, world: World) -> float:
    """Return the temporary bytes of the head: of the loss, or of the gradients of weights and logits."""
    logits, size = tokens(config, world) * config.model.vocab_size, _gradient_bytes(config, hf)
    weights = config.model.hidden_size * config.model.vocab_size if config.training.trains is Trains.all else 0
    return max(logits * LOSS_BYTES, 2 * compute_bytes(config) * logits + size * weights)


def _gradient_bytes(config: Config, hf: HuggingFace) -> int:
    """Return the bytes per element of a weight's gradient in the backward pass."""
    return _trained_bytes(config, hf) if hf.strategy in (Strategy.ddp, Strategy.balanced) else compute_bytes(config)


def _zero_step(sizes: deepspeed.Sizes, own: float, *, size: int, state_bytes: int, stage: int) -> float:
    """Return the bytes of the master weights' gradients, and of the flat copy that they are converted from."""
    converted = size if size < state_bytes else 0
    if stage == MOST_ZERO_STAGE:
        return (state_bytes + converted) * min(own, sizes.sub_group)
    if stage:
        return (state_bytes + converted) * own
    return 4 * own if size < 4 else 0.0


def _activation_bytes(config: Config, hf: HuggingFace, world: World, recomputed: Recomputed) -> float:
    """Return the bytes that layers store for the backward pass on the GPU when it begins.

    With recomputation these are the inputs of all layers, and all activations of the running one. Offloaded activations
    are on the GPU for one or two layers.
    """
    count, num_layers = tokens(config, world), config.model.num_layers
    over = hf.num_gpus if hf.strategy is Strategy.balanced else 1
    layer, hidden = layer_bytes(config, hf), residual_bytes(config, hf) * config.model.hidden_size
    whole, logits = num_layers / over, _logit_bytes(config)
    if recomputed.full:
        stored = hidden * (min(whole, 1) if hf.offload_activations else whole)
        return count * (stored + layer + logits)
    return count * (layer * (min(whole, HOST_LAYERS) if hf.offload_activations else whole) + logits)


def _logit_bytes(config: Config) -> float:
    """Return the bytes per token that are stored between the last layer and the loss, such as capped logits."""
    described = config.model.described
    if described is None or described.probe is None:
        return 0.0
    return described.probe.bytes_per_logit * config.model.vocab_size


def _dequantized_bytes(config: Config) -> float:
    """Return the bytes of the linear of a 4-bit base that is currently dequantized to BF16; gate and up are two."""
    if config.training.trains is not Trains.qlora:
        return 0.0
    return 2.0 * config.model.hidden_size * max(config.model.hidden_size, config.model.ffn_hidden_size)
