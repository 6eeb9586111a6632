"""Estimate the GPU memory of a training step, and choose what is recomputed so that it fits.

The estimate judges a plan before it is queued. The functions assume a legal split (`bench.planning.parallelism` refuses
the others).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from bench.contract.layers import Layer, has_fp8_head, layer_of
from bench.contract.plan import Memory, Recomputed, World
from bench.contract.schema import Config, Device, Gpu, Precision
from bench.contract.training import MomentPrecision, Recompute, Trains
from bench.planning.estimates import workspace
from bench.planning.estimates.activations import BYTES, fc1_bytes, hidden_bytes, layer_bytes, qkv_bytes, stores_inputs
from bench.planning.estimates.parameters import linear_weights, lora_parameters, parameters, rank_parameters
from bench.planning.parallelism import num_microbatches, tokens

GIB = 2**30
OFFLOADED_PIECE = 2**25
"""Weights whose moments are in one of two buffers. Source: jobs/engines/megatron/adam/offload.py."""
OFFLOADED_AT_A_TIME = 2
"""Offloaded layers whose activations are on the GPU: one is running while another one is copied. Source:
jobs/engines/megatron/offload.py."""
MAIN_GRADIENT_BYTES = 4
MASTER_WEIGHT_BYTES = 4
NF4_SCALE_BYTES = (8 / 64 + 32 / (64 * 256)) / 8
"""Per weight of a 4-bit base: an 8-bit scale for 64 of them, and for 256 of those an FP32 scale.

Source: as NF4_BYTES.
"""
NF4_BYTES = 4 / 8 + NF4_SCALE_BYTES
"""Per weight of a 4-bit base: 4 bits and its share of the scales; 4.127 bits.

Source: Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3.
"""
CUDA_ALLOWANCE_GIB = 2.5
"""GPU memory beyond torch's peak allocation: CUDA context, kernels, NCCL, and allocator fragmentation.

Source: docs/results/2026-11-21-fp8.md: nvidia-smi showed 3.7 GiB more than the peak on a GPU with free memory, and 1.7
GiB of them were outside torch.
"""
FIT_MARGIN_GIB = 1.0
"""How much memory recompute=fit leaves free, because all of this is an estimate. Assumed."""

NOTHING = Recomputed(full=False, qkv_layers=0, fc1_layers=0)
EVERYTHING = Recomputed(full=True, qkv_layers=0, fc1_layers=0)


def estimate(config: Config, world: World, recomputed: Recomputed, *, has_graph: bool = False) -> Memory:
    """Return the memory of one GPU of the pipeline stage that needs most.

    The distributed optimizer shards its states over dp * cp ranks. has_graph: a CUDA graph launches the passes.
    """
    pp_rank, parts = _fullest_stage(config, world, recomputed)
    stage = _stage(config, world, pp_rank, parts)
    return _with_evaluation(config, world, stage) if has_graph else stage


def recompute(config: Config, world: World) -> Recomputed:
    """Return what every rank recomputes, as the recipe says.

    `fit` recomputes as little as leaves FIT_MARGIN_GIB free, and nothing if the GPU is unknown. In our own layers it
    first recomputes the output of qkv, which frees most memory for its time, then that of fc1, each in as few layers as
    necessary; with offload_activations it offloads as few layers as necessary instead. If that is not enough, and in
    megatron-core's layers, it recomputes whole layers.
    """
    requested, device, offloads = (
        config.training_recipe.recompute,
        gpu(config),
        config.training_recipe.offload_activations,
    )
    num_layers = 0 if layer_of(config) is Layer.megatron else config.model.num_layers // world.pp
    if requested is not Recompute.fit:
        return EVERYTHING if requested is Recompute.full else offloaded(num_layers if offloads else 0)
    if device is None:
        return NOTHING
    limit_gib = device.memory_gib - FIT_MARGIN_GIB

    def fits(recomputed: Recomputed) -> bool:
        return sum(_fullest_stage(config, world, recomputed)[1].values()) <= limit_gib

    def by_qkv(num: int) -> Recomputed:
        return Recomputed(full=False, qkv_layers=num, fc1_layers=0)

    def by_fc1(num: int) -> Recomputed:
        return Recomputed(full=False, qkv_layers=num_layers, fc1_layers=num)

    if fits(NOTHING):
        return NOTHING
    for choice in (offloaded,) if offloads else (by_qkv, by_fc1):
        if num_layers and fits(choice(num_layers)):
            return _fewest(choice, fits, num_layers)
    return EVERYTHING


def _fewest(choice: Callable[[int], Recomputed], fits: Callable[[Recomputed], bool], num_layers: int) -> Recomputed:
    """Return the choice with the fewest layers that fits. More layers need less memory; all layers must fit."""
    too_few = bisect_left(range(1, num_layers), True, key=lambda num: fits(choice(num)))
    return choice(too_few + 1)


def offloaded(num_layers: int) -> Recomputed:
    """Return the choice that offloads the activations of so many layers and recomputes nothing."""
    return Recomputed(full=False, qkv_layers=0, fc1_layers=0, offloaded_layers=num_layers)


def gpu(config: Config) -> Gpu | None:
    """Return the GPU of a rank; None on CPUs, and if the cluster does not give it."""
    return config.cluster.gpu if config.cluster.device is Device.cuda else None


def _fullest_stage(config: Config, world: World, recomputed: Recomputed) -> tuple[int, dict[str, float]]:
    """Return the pipeline stage that needs most memory, and the GiB of its parts.

    Only the first, second and last stages are compared: the stages after the second need no more, because fewer
    micro-batches are in flight there.
    """
    stages = {k: _parts(config, world, recomputed, k) for k in sorted({0, min(1, world.pp - 1), world.pp - 1})}
    return max(stages.items(), key=lambda stage: sum(stage[1].values()))


def _parts(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> dict[str, float]:
    """Return the memory of a rank of one pipeline stage by part, in GiB."""
    lora, size = config.training.lora, BYTES[config.precision]
    stage = {"tp": world.tp, "pp": world.pp, "pp_rank": pp_rank}
    base, adapters = rank_parameters(config.model, lora, **stage, ep=world.ep)
    trainable = adapters if lora else base
    # dp * cp ranks share the states of the experts of all ep ranks.
    sharded = trainable if lora else rank_parameters(config.model, None, **stage)[0]
    shards = world.dp * world.cp if config.parallel.distributed_optimizer else 1
    return {
        "base_weights_gib": (base * size + _quantized_weights_bytes(config, world, pp_rank)) / GIB,
        "adapter_weights_gib": adapters * size / GIB,
        "gradients_gib": trainable * MAIN_GRADIENT_BYTES / GIB,
        "optimizer_gib": _optimizer_bytes(config, (sharded if shards > 1 else trainable) / shards) / GIB,
        "activations_gib": _activation_bytes(config, world, recomputed, pp_rank) / GIB,
        "workspace_gib": _workspace_bytes(config, world, recomputed, pp_rank) / GIB,
    }


def _stage(config: Config, world: World, pp_rank: int, parts: dict[str, float]) -> Memory:
    """Return the memory of a rank of one pipeline stage, given its parts."""
    model, lora, device, total_gib = config.model, config.training.lora, gpu(config), sum(parts.values())
    base, adapters = rank_parameters(model, lora, tp=world.tp, pp=world.pp, pp_rank=pp_rank, ep=world.ep)
    whole, adapters_total = parameters(model), lora_parameters(model, lora) if lora else 0
    return Memory(
        **parts,
        total_gib=total_gib,
        capacity_gib=device.memory_gib if device else None,
        fits=total_gib <= device.memory_gib if device else None,
        parameters=whole + adapters_total,
        trainable_parameters=adapters_total if lora else whole,
        rank_parameters=base + adapters,
        rank_trainable_parameters=adapters if lora else base,
    )


def _with_evaluation(config: Config, world: World, stage: Memory) -> Memory:
    """Return the memory where a CUDA graph launches the passes of training.

    The graph keeps its own memory pool, so the temporary tensors of an evaluation need additional memory.
    """
    evaluation_gib = max(workspace.forward_bytes(config, world), workspace.logits_bytes(config, world)) / GIB
    total_gib = stage.total_gib + evaluation_gib
    fits = None if stage.capacity_gib is None else total_gib <= stage.capacity_gib
    return replace(stage, workspace_gib=stage.workspace_gib + evaluation_gib, total_gib=total_gib, fits=fits)


def moment_bytes(config: Config) -> int:
    """Return the bytes of both of Adam's moments of one parameter."""
    return 4 if config.training_recipe.moments is MomentPrecision.bf16 else 8


def _optimizer_bytes(config: Config, updated: float) -> float:
    """Return the bytes of master weights and moments on a GPU that updates so many weights.

    Moments in the host's memory pass through two buffers.
    """
    on_gpu = min(updated, 2 * OFFLOADED_PIECE) if config.training_recipe.offload_moments else updated
    return MASTER_WEIGHT_BYTES * updated + moment_bytes(config) * on_gpu


def _quantized_weights_bytes(config: Config, world: World, pp_rank: int) -> float:
    """Return the difference in bytes to weights in BF16.

    Frozen linears are stored in FP8 or in 4 bits only. Trained ones have additional FP8 copies for the GEMMs.
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
    """Return the bytes that a stage stores for the backward pass: of its layers, and the tensors between stages.

    If whole layers are recomputed, these are the inputs of all layers and all activations of one. Of offloaded layers,
    those of two are on the GPU at a time. A head that is trained stores the final norm's input and its own; those of a
    frozen one are counted in `_head_bytes`.
    """
    layer, in_flight = layer_bytes(config, world), _layers_in_flight(config, world, pp_rank)
    hidden, count = hidden_bytes(config, world), tokens(config, world)
    other = _between_stages_bytes(config, world, recomputed, pp_rank)
    if _has_trained_head(config, world, pp_rank):
        other += 2 * hidden
    if recomputed.full:
        return other + in_flight * hidden + count * layer - hidden
    freed = recomputed.qkv_layers * qkv_bytes(config, world) + recomputed.fc1_layers * fc1_bytes(config, world)
    stored = in_flight * (layer - freed * world.pp / config.model.num_layers)
    in_host = in_flight * layer * recomputed.offloaded_layers * world.pp / config.model.num_layers
    return other + count * (stored - in_host + min(OFFLOADED_AT_A_TIME * layer, in_host))


def _between_stages_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return the bytes of the inputs and outputs of a stage that a pipeline holds for the micro-batches in flight.

    The last stage's output is the loss, and the first one's input, unless there are several chunks, its tokens. Where
    the first layer stores its input, that is counted with the layer.

    Source: megatron-core 0.16.1, pipeline_parallel.schedules, whose lists input_tensors and output_tensors live until
    the backward pass, since deallocate_pipeline_outputs is off.
    """
    if world.pp == 1:
        return 0.0
    has_input = (pp_rank > 0 or world.vpp > 1) and not stores_inputs(config, recomputed)
    has_output = pp_rank < world.pp - 1 or world.vpp > 1
    return (has_input + has_output) * _chunks_in_flight(config, world, pp_rank) * hidden_bytes(config, world)


def _has_trained_head(config: Config, world: World, pp_rank: int) -> bool:
    return pp_rank == world.pp - 1 and config.training.trains is Trains.all


def _layers_in_flight(config: Config, world: World, pp_rank: int) -> float:
    """Return of how many layers a stage stores activations at once; each layer counts once per micro-batch."""
    return _chunks_in_flight(config, world, pp_rank) * config.model.num_layers / (world.pp * world.vpp)


def _chunks_in_flight(config: Config, world: World, pp_rank: int) -> int:
    """Return of how many micro-batches a stage stores activations at once, of each of its vpp chunks by itself.

    A stage computes its warm-up micro-batches and one more before the first backward pass: min(pp - pp_rank,
    micro-batches) times its layers in the 1F1B schedule. In the interleaved schedule, with enough micro-batches, the
    first stage holds num_layers * (1 + (pp - 1) / (pp * vpp)).

    Source: megatron-core 0.16.1, pipeline_parallel.schedules.get_pp_rank_microbatches.
    """
    pp, vpp = world.pp, world.vpp
    ahead = pp - pp_rank - 1 if vpp == 1 else 2 * (pp - pp_rank - 1) + (vpp - 1) * pp
    return min(ahead + 1, num_microbatches(config, world) * vpp)


def _workspace_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return the bytes of temporary tensors, and on a GPU also CUDA's own memory.

    Temporary tensors are those of the layer at work or, on the last stage, of the head if these are larger: it works
    after the last layer's forward pass and before its backward pass.
    """
    temporary = workspace.layer_bytes(config, world, recomputed)
    if pp_rank == world.pp - 1:
        temporary = max(temporary, workspace.head_bytes(config, world, recomputed))
    if config.cluster.device is not Device.cuda:
        return temporary
    return temporary + (CUDA_ALLOWANCE_GIB * GIB + workspace.weight_buffers_bytes(config, world))
