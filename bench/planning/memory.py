"""Estimate the GPU memory of a training step, and choose what is recomputed so that it fits.

The estimate judges a plan before it is queued. The functions assume a legal split (`bench.planning.parallelism` refuses
the others).
"""

from bisect import bisect_left

from bench.contract.layers import Layer, has_fp8_head, layer_of
from bench.contract.plan import Memory, Recomputed, World
from bench.contract.schema import Config, Device, Gpu, Precision
from bench.contract.task import MomentPrecision, Recompute, Trains
from bench.planning.activations import BYTES, fc1_bytes, layer_bytes, qkv_bytes, quantized_bytes
from bench.planning.parallelism import num_microbatches, tokens
from bench.planning.parameters import kv_size, linear_weights, linears, lora_parameters, parameters, rank_parameters

GIB = 2**30
OFFLOADED_PIECE = 2**25
"""Weights whose moments are in one of two buffers. Source: jobs/engines/megatron/adam/offload.py."""
OFFLOADED_AT_A_TIME = 2
"""Offloaded layers whose activations are on the GPU: one is at work while another's are copied. Source:
jobs/engines/megatron/offload.py."""
MAIN_GRADIENT_BYTES = 4
MASTER_WEIGHT_BYTES = 4
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Per weight of a 4-bit base: 4 bits, an 8-bit scale for 64 of them, and for 256 of those an FP32 scale; 4.127 bits.

Source: Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3.
"""
CUDA_ALLOWANCE_GIB = 2.5
"""GPU memory beyond torch's peak allocation: CUDA context, kernels, NCCL, and what the allocator cannot give back.

Source: docs/results/2026-11-21-fp8.md: nvidia-smi showed 3.7 GiB more than the peak on a GPU with free memory, and 1.7
GiB of them were outside torch.
"""
HIDDEN_BYTES = 8
"""Per number of a hidden state in the layer at work: gradients of the residual and of a norm, BF16 and FP8. Assumed."""
FIT_MARGIN_GIB = 1.0
"""How much memory recompute=fit leaves free, because all of this is an estimate. Assumed."""

NOTHING = Recomputed(full=False, qkv_layers=0, fc1_layers=0)
EVERYTHING = Recomputed(full=True, qkv_layers=0, fc1_layers=0)


def estimate(config: Config, world: World, recomputed: Recomputed) -> Memory:
    """Return the memory of one GPU of the pipeline stage that needs most.

    The distributed optimizer shards its states over dp * cp ranks.
    """
    stages = [_stage(config, world, recomputed, pp_rank) for pp_rank in range(world.pp)]
    return max(stages, key=lambda stage: stage.total_gib)


def recompute(config: Config, world: World) -> Recomputed:
    """Return what every rank recomputes, as the recipe says.

    `fit` recomputes as little as leaves FIT_MARGIN_GIB free, and nothing if the GPU is not known. In hand-written
    layers it first recomputes the output of qkv, which frees most memory for its time, then that of fc1, each in as few
    layers as suffice; or it offloads the activations of as few layers as suffice, where the recipe says so. If that is
    not enough, and in megatron-core's layers, it recomputes whole layers.
    """
    requested, device, offloads = config.recipe.recompute, gpu(config), config.recipe.offload_activations
    num_layers = 0 if layer_of(config) is Layer.megatron else config.model.num_layers // world.pp
    if requested is not Recompute.fit:
        return EVERYTHING if requested is Recompute.full else offloaded(num_layers if offloads else 0)
    if device is None:
        return NOTHING
    limit_gib = device.memory_gib - FIT_MARGIN_GIB

    def fits(recomputed: Recomputed) -> bool:
        return estimate(config, world, recomputed).total_gib <= limit_gib

    by_qkv = [Recomputed(full=False, qkv_layers=n, fc1_layers=0) for n in range(1, num_layers + 1)]
    by_fc1 = [Recomputed(full=False, qkv_layers=num_layers, fc1_layers=n) for n in range(1, num_layers + 1)]
    by_offload = [offloaded(n) for n in range(1, num_layers + 1)]
    # In each list, every further layer needs less memory.
    for choices in ([NOTHING], by_offload) if offloads else ([NOTHING], by_qkv, by_fc1):
        if choices and fits(choices[-1]):
            return choices[bisect_left(choices, True, key=fits)]
    return EVERYTHING


def offloaded(num_layers: int) -> Recomputed:
    """Return that a rank offloads the activations of so many layers, and recomputes nothing."""
    return Recomputed(full=False, qkv_layers=0, fc1_layers=0, offloaded_layers=num_layers)


def gpu(config: Config) -> Gpu | None:
    """Return the GPU that a rank has; None on a CPU, and where the cluster does not say which it is."""
    return config.cluster.gpu if config.cluster.device is Device.cuda else None


def _stage(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> Memory:
    """Return the memory of a rank of one pipeline stage."""
    model, lora, size = config.model, config.training.lora, BYTES[config.precision]
    base, adapters = rank_parameters(model, lora, tp=world.tp, pp=world.pp, pp_rank=pp_rank)
    trainable = adapters if lora else base
    shards = world.dp * world.cp if config.parallel.distributed_optimizer else 1
    parts = {
        "base_weights_gib": (base * size + _quantized_weights_bytes(config, world, pp_rank)) / GIB,
        "adapter_weights_gib": adapters * size / GIB,
        "gradients_gib": trainable * MAIN_GRADIENT_BYTES / GIB,
        "optimizer_gib": _optimizer_bytes(config, trainable / shards) / GIB,
        "activations_gib": _activation_bytes(config, world, recomputed, pp_rank) / GIB,
        "workspace_gib": _workspace_bytes(config, world, recomputed, pp_rank) / GIB,
    }
    total_gib = sum(parts.values())
    device = gpu(config)
    adapters_total = lora_parameters(model, lora) if lora else 0
    return Memory(
        **parts,
        total_gib=total_gib,
        capacity_gib=device.memory_gib if device else None,
        fits=total_gib <= device.memory_gib if device else None,
        parameters=parameters(model) + adapters_total,
        trainable_parameters=adapters_total if lora else parameters(model),
        rank_parameters=base + adapters,
        rank_trainable_parameters=trainable,
    )


def moment_bytes(config: Config) -> int:
    """Return the bytes of both of Adam's moments of one parameter."""
    return 4 if config.recipe.moments is MomentPrecision.bf16 else 8


def _optimizer_bytes(config: Config, updated: float) -> float:
    """Return the bytes of master weights and moments on a GPU that updates so many weights.

    Moments in the host's memory pass through two buffers.
    """
    on_gpu = min(updated, 2 * OFFLOADED_PIECE) if config.recipe.offload_moments else updated
    return MASTER_WEIGHT_BYTES * updated + moment_bytes(config) * on_gpu


def _quantized_weights_bytes(config: Config, world: World, pp_rank: int) -> float:
    """Return how many bytes more, or less, a stage needs than for weights in BF16.

    Frozen linears are stored in FP8 or in 4 bits only. Trained ones have FP8 copies, which the GEMMs read, beside them.
    A head in FP8 has two, one of them transposed; an evaluation reads the head in BF16.
    """
    weights = config.model.num_layers // world.pp * linear_weights(config.model) // world.tp
    if has_fp8_head(config):
        is_last = pp_rank == world.pp - 1
        return 2 * config.model.vocab_size * config.model.hidden_size // world.tp * is_last - weights
    if config.training.trains is Trains.qlora:
        return weights * (NF4_BYTES - BYTES[config.precision])
    if config.precision is not Precision.fp8:
        return 0
    return weights if layer_of(config) is Layer.trained else -weights


def _activation_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return the bytes that the layers of a stage store for the backward pass.

    If whole layers are recomputed, these are the inputs of all layers and all activations of one. Of offloaded layers,
    those of two are on the GPU at a time. A head that is trained stores the final norm's input and its own, which are
    not counted with a frozen one.
    """
    layer, in_flight = layer_bytes(config, world), _layers_in_flight(config, world, pp_rank)
    hidden = BYTES[config.precision] * config.model.hidden_size / world.sequence_tp
    head = 2 * hidden * tokens(config, world) if _has_trained_head(config, world, pp_rank) else 0
    if recomputed.full:
        return head + tokens(config, world) * (in_flight * hidden + layer - hidden)
    freed = recomputed.qkv_layers * qkv_bytes(config, world) + recomputed.fc1_layers * fc1_bytes(config, world)
    stored = in_flight * (layer - freed * world.pp / config.model.num_layers)
    in_host = in_flight * layer * recomputed.offloaded_layers * world.pp / config.model.num_layers
    return head + tokens(config, world) * (stored - in_host + min(OFFLOADED_AT_A_TIME * layer, in_host))


def _has_trained_head(config: Config, world: World, pp_rank: int) -> bool:
    return pp_rank == world.pp - 1 and config.training.trains is Trains.all


def _layers_in_flight(config: Config, world: World, pp_rank: int) -> float:
    """Return of how many layers a stage stores activations at once; each layer counts once per micro-batch.

    A stage computes its warm-up micro-batches and one more before the first backward pass: min(pp - pp_rank,
    micro-batches) times its layers in the 1F1B schedule. In the interleaved schedule, with enough micro-batches, the
    first stage holds num_layers * (1 + (pp - 1) / (pp * vpp)).

    Source: megatron-core 0.16.1, pipeline_parallel.schedules.get_pp_rank_microbatches.
    """
    pp, vpp = world.pp, world.vpp
    ahead = pp - pp_rank - 1 if vpp == 1 else 2 * (pp - pp_rank - 1) + (vpp - 1) * pp
    return min(ahead + 1, num_microbatches(config, world) * vpp) * config.model.num_layers / (pp * vpp)


def _workspace_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return the bytes of temporary tensors, and on a GPU also CUDA's own memory.

    Temporary tensors are those of the layer at work or, on the last stage, the logits if these are larger. Logits exist
    after the last layer's forward pass and before its backward pass; their gradient overwrites them, but in FP8 lies
    beside them. A head that is trained also has a gradient in the model's precision, before that is added to the FP32
    one.
    """
    temporary = _transient_bytes(config, world, recomputed)
    if pp_rank == world.pp - 1:
        numbers = tokens(config, world) * config.model.vocab_size / world.tp
        if _has_trained_head(config, world, pp_rank):
            numbers += config.model.hidden_size * config.model.vocab_size / world.tp
        temporary = max(temporary, numbers * (BYTES[config.precision] + has_fp8_head(config)))
    if config.cluster.device is not Device.cuda:
        return temporary
    return temporary + (CUDA_ALLOWANCE_GIB * GIB + _weight_buffers_bytes(config, world))


def _weight_buffers_bytes(config: Config, world: World) -> float:
    """Return the bytes of the two buffers for weights that a GEMM cannot read as they are stored.

    FP8 GEMMs on Hopper need both operands with the summed axis last, so that weights are transposed for the backward
    pass. Weights of a 4-bit base are dequantised.
    """
    is_4_bit = config.training.trains is Trains.qlora
    if config.precision is not Precision.fp8 and not is_4_bit:
        return 0.0
    size = BYTES[config.precision] if is_4_bit else 1
    return 2 * size * max(linear.weights for linear in linears(config.model).values()) / world.tp


def _transient_bytes(config: Config, world: World, recomputed: Recomputed) -> float:
    """Return the peak bytes of temporary tensors in one layer, beside the stored activations; an estimate.

    p bytes per number, q bytes per quantized number (1 in FP8, else p), o width of the fc1 output, w width of the qkv
    output; all are split over tp:

    | phase                 | bytes per token                                                                        |
    | --------------------- | -------------------------------------------------------------------------------------- |
    | forward of the MLP    | output of fc1 p o, output of the activation q f                                        |
    | backward of the MLP   | gradients of the activation p f and of fc1 q o; p o more if fc1 is recomputed; for the |
    |                       | weights' gradients also the activation q f and, in FP8, transposed operands of fc1 o   |
    | backward of attention | gradients of attention p h and of qkv p w; p w more if qkv is recomputed; with cp also |
    |                       | k and v of every cp rank and their gradients, 4 p k cp                                 |

    In FP8, transposed operands of h more, not split over tp, are in HIDDEN_BYTES. The buffers for weights are counted
    in `_weight_buffers_bytes`.
    """
    model, size, quantized = config.model, BYTES[config.precision], quantized_bytes(config)
    fc1, qkv = linears(model)["linear_fc1"], linears(model)["linear_qkv"]
    forward = size * fc1.num_out + quantized * model.ffn_hidden_size
    mlp = size * model.ffn_hidden_size + (quantized + (size if recomputed.fc1_layers else 0)) * fc1.num_out
    if layer_of(config) is Layer.trained:
        mlp += quantized * model.ffn_hidden_size + (fc1.num_out if config.precision is Precision.fp8 else 0)
    attention = size * (model.hidden_size + (2 if recomputed.qkv_layers else 1) * qkv.num_out)
    if world.cp > 1:
        attention += 4 * size * kv_size(model) * world.cp
    count = tokens(config, world)
    return max(forward, mlp, attention) * count / world.tp + HIDDEN_BYTES * model.hidden_size * count
