"""Estimate the GPU memory of a training step, and choose what is recomputed so that it fits.

The estimate judges a plan before it is queued. The functions assume a legal split (`bench.planning.parallelism` refuses
the others).
"""

from bisect import bisect_left

from bench.contract.plan import Memory, Recomputed, World
from bench.contract.schema import Config, Device, Gpu, Precision
from bench.contract.task import Recompute
from bench.planning.activations import BYTES, fc1_bytes, layer_bytes, qkv_bytes
from bench.planning.parallelism import num_microbatches, tokens
from bench.planning.parameters import kv_size, linear_weights, linears, lora_parameters, parameters, rank_parameters

GIB = 2**30
MAIN_GRADIENT_BYTES = 4
ADAM_BYTES = 12
"""Main weight, first moment and second moment, each in FP32."""
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

    `fit` recomputes as little as leaves FIT_MARGIN_GIB free, and nothing if the GPU is not known. In FP8 it first
    recomputes the output of qkv, which frees most memory for its time, then that of fc1, each in as few layers as
    suffice. If that is not enough, and in every other precision, it recomputes whole layers.
    """
    requested, gpu = config.recipe.recompute, _gpu(config)
    if requested is not Recompute.fit:
        return EVERYTHING if requested is Recompute.full else NOTHING
    if gpu is None:
        return NOTHING
    limit_gib = gpu.memory_gib - FIT_MARGIN_GIB
    num_layers = config.model.num_layers // world.pp if config.precision is Precision.fp8 else 0

    def fits(recomputed: Recomputed) -> bool:
        return estimate(config, world, recomputed).total_gib <= limit_gib

    by_qkv = [Recomputed(full=False, qkv_layers=n, fc1_layers=0) for n in range(1, num_layers + 1)]
    by_fc1 = [Recomputed(full=False, qkv_layers=num_layers, fc1_layers=n) for n in range(1, num_layers + 1)]
    for choices in ([NOTHING], by_qkv, by_fc1):  # in each list, every further layer needs less memory
        first = bisect_left(choices, True, key=fits)
        if first < len(choices):
            return choices[first]
    return EVERYTHING


def _gpu(config: Config) -> Gpu | None:
    return config.cluster.gpu if config.cluster.device is Device.cuda else None


def _stage(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> Memory:
    """Return the memory of a rank of one pipeline stage."""
    model, lora, size = config.model, config.task.training.lora, BYTES[config.precision]
    base, adapters = rank_parameters(model, lora, tp=world.tp, pp=world.pp, pp_rank=pp_rank)
    trainable = adapters if lora else base
    shards = world.dp * world.cp if config.parallel.distributed_optimizer else 1
    parts = {
        "base_weights_gib": (base * size - _bytes_saved_by_fp8(config, world)) / GIB,
        "adapter_weights_gib": adapters * size / GIB,
        "gradients_gib": trainable * MAIN_GRADIENT_BYTES / GIB,
        "optimizer_gib": trainable * ADAM_BYTES / shards / GIB,
        "activations_gib": _activation_bytes(config, world, recomputed, pp_rank) / GIB,
        "workspace_gib": _workspace_bytes(config, world, recomputed, pp_rank) / GIB,
    }
    total_gib = sum(parts.values())
    gpu = _gpu(config)
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


def _bytes_saved_by_fp8(config: Config, world: World) -> int:
    """Return how many bytes the frozen linears of a stage save in FP8, compared with BF16."""
    if config.precision is not Precision.fp8:
        return 0
    return config.model.num_layers // world.pp * linear_weights(config.model) // world.tp


def _activation_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return the bytes that the layers of a stage store for the backward pass.

    If whole layers are recomputed, these are the inputs of all layers and all activations of one. The output of the
    embedding and the final norm are not counted.
    """
    layer, in_flight = layer_bytes(config, world), _layers_in_flight(config, world, pp_rank)
    if recomputed.full:
        layer_input = BYTES[config.precision] * config.model.hidden_size / world.sequence_tp
        return tokens(config, world) * (in_flight * layer_input + layer - layer_input)
    freed = recomputed.qkv_layers * qkv_bytes(config, world) + recomputed.fc1_layers * fc1_bytes(config, world)
    return tokens(config, world) * in_flight * (layer - freed * world.pp / config.model.num_layers)


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
    after the last layer's forward pass and before its backward pass; their gradient overwrites them.
    """
    temporary = _transient_bytes(config, world, recomputed)
    if pp_rank == world.pp - 1:
        logits = tokens(config, world) * config.model.vocab_size / world.tp
        temporary = max(temporary, logits * BYTES[config.precision])
    if config.cluster.device is not Device.cuda:
        return temporary
    return temporary + (CUDA_ALLOWANCE_GIB * GIB + _transposed_weights_bytes(config, world))


def _transposed_weights_bytes(config: Config, world: World) -> float:
    """Return the bytes of the two buffers for transposed weights.

    FP8 GEMMs on Hopper need both operands with the summed axis last.
    """
    if config.precision is not Precision.fp8:
        return 0.0
    return 2 * max(linear.weights for linear in linears(config.model).values()) / world.tp


def _transient_bytes(config: Config, world: World, recomputed: Recomputed) -> float:
    """Return the peak bytes of temporary tensors in one layer, beside the stored activations; an estimate.

    p bytes per number, q bytes per quantized number (1 in FP8, else p), o width of the fc1 output, w width of the qkv
    output; all are split over tp:

    | phase                 | bytes per token                                                                        |
    | --------------------- | -------------------------------------------------------------------------------------- |
    | forward of the MLP    | output of fc1 p o, output of the activation q f                                        |
    | backward of the MLP   | gradients of the activation p f and of fc1 q o; p o more if fc1 is recomputed          |
    | backward of attention | gradients of attention p h and of qkv p w; p w more if qkv is recomputed; with cp also |
    |                       | k and v of every cp rank and their gradients, 4 p k cp                                 |

    The buffers for transposed FP8 weights are counted in `_transposed_weights_bytes`.
    """
    model, size = config.model, BYTES[config.precision]
    is_fp8 = config.precision is Precision.fp8
    fc1, qkv = linears(model)["linear_fc1"], linears(model)["linear_qkv"]
    quantized = 1 if is_fp8 else size
    forward = size * fc1.num_out + quantized * model.ffn_hidden_size
    mlp = size * model.ffn_hidden_size + (quantized + (size if recomputed.fc1_layers else 0)) * fc1.num_out
    attention = size * (model.hidden_size + (2 if recomputed.qkv_layers else 1) * qkv.num_out)
    if world.cp > 1:
        attention += 4 * size * kv_size(model) * world.cp
    count = tokens(config, world)
    return max(forward, mlp, attention) * count / world.tp + HIDDEN_BYTES * model.hidden_size * count
