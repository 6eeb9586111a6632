"""What a training step needs of its GPU's memory, and what has to be recomputed for it to fit.

Bytes are an estimate, for a plan to be judged by before it is queued. Splits are taken as legal (`bench.planning.make_plan` refuses the
others).
"""

from bisect import bisect_left

from bench.contract.plan import Memory, Recomputed, World
from bench.contract.schema import Config, Device, Gpu, Precision, Recompute
from bench.planning.activations import BYTES, fc1_bytes, layer_bytes, qkv_bytes
from bench.planning.parallelism import num_microbatches, tokens
from bench.planning.parameters import kv_size, linear_weights, linears, lora_parameters, parameters, rank_parameters

GIB = 2**30
MAIN_GRADIENT_BYTES = 4
ADAM_BYTES = 12
"""Weight, first and second moment in FP32."""
CUDA_ALLOWANCE_GIB = 2.5
"""What nvidia-smi shows beyond torch's peak of allocations (context, kernels, NCCL, slack of the allocator), less what it could give back.

Source: docs/results/2026-11-21-fp8.md, 3.7 GiB where there was room, of it 1.7 outside of torch.
"""
HIDDEN_BYTES = 8
"""Per hidden number of a token, while one layer works: gradients of the residual and of a norm, in BF16 and FP8. Assumed."""
FIT_MARGIN_GIB = 1.0
"""What recompute=fit leaves free, since this is an estimate. Assumed."""


NOTHING = Recomputed(full=False, qkv_layers=0, fc1_layers=0)
EVERYTHING = Recomputed(full=True, qkv_layers=0, fc1_layers=0)


def estimate(config: Config, world: World, recomputed: Recomputed) -> Memory:
    """Return what training needs on a GPU of the pipeline stage that needs most.

    The distributed optimizer shards its states over dp * cp ranks.
    """
    stages = [_stage(config, world, recomputed, pp_rank) for pp_rank in range(world.pp)]
    return max(stages, key=lambda stage: stage.total_gib)


def recompute(config: Config, world: World) -> Recomputed:
    """Return what the recipe says; for `fit` as little as leaves FIT_MARGIN_GIB free, and nothing where no GPU is known.

    In FP8 first the outputs of qkv, which free most bytes for their time, then those of fc1, each in as few layers as suffice;
    otherwise, and if that is not enough, whole layers.
    """
    asked, gpu = config.recipe.recompute, _gpu(config)
    if asked is not Recompute.fit:
        return EVERYTHING if asked is Recompute.full else NOTHING
    if gpu is None:
        return NOTHING
    limit_gib = gpu.memory_gib - FIT_MARGIN_GIB
    most = config.model.num_layers // world.pp if config.precision is Precision.fp8 else 0

    def fits(recomputed: Recomputed) -> bool:
        return estimate(config, world, recomputed).total_gib <= limit_gib

    by_qkv = [Recomputed(full=False, qkv_layers=n, fc1_layers=0) for n in range(1, most + 1)]
    by_fc1 = [Recomputed(full=False, qkv_layers=most, fc1_layers=n) for n in range(1, most + 1)]
    for choices in ([NOTHING], by_qkv, by_fc1):  # within each, more layers always need less
        first = bisect_left(choices, True, key=fits)
        if first < len(choices):
            return choices[first]
    return EVERYTHING


def _gpu(config: Config) -> Gpu | None:
    return config.cluster.gpu if config.cluster.device is Device.cuda else None


def _stage(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> Memory:
    """Return what a rank of one pipeline stage needs."""
    model, lora, size = config.model, config.task.training.lora, BYTES[config.precision]
    base, adapters = rank_parameters(model, lora, tp=world.tp, pp=world.pp, pp_rank=pp_rank)
    trainable = adapters if lora else base
    shards = world.dp * world.cp if config.parallel.distributed_optimizer else 1
    parts = {
        "base_weights_gib": (base * size - _saved_by_fp8(config, world)) / GIB,
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


def _saved_by_fp8(config: Config, world: World) -> int:
    """Return by how many bytes a stage's frozen linears are smaller in FP8 than in BF16."""
    if config.precision is not Precision.fp8:
        return 0
    return config.model.num_layers // world.pp * linear_weights(config.model) // world.tp


def _activation_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return what a stage's layers keep for backward; if whole layers are recomputed, their inputs and all of one of them.

    The embedding's output and the final norm are left out.
    """
    layer, in_flight = layer_bytes(config, world), _layers_in_flight(config, world, pp_rank)
    if recomputed.full:
        layer_input = BYTES[config.precision] * config.model.hidden_size / world.sequence_tp
        return tokens(config, world) * (in_flight * layer_input + layer - layer_input)
    freed = recomputed.qkv_layers * qkv_bytes(config, world) + recomputed.fc1_layers * fc1_bytes(config, world)
    return tokens(config, world) * in_flight * (layer - freed * world.pp / config.model.num_layers)


def _layers_in_flight(config: Config, world: World, pp_rank: int) -> float:
    """Return how many layers' activations a stage holds at once, each of one micro-batch.

    A stage runs ahead by its warm-up and one more: min(pp - pp_rank, micro-batches) times its layers in 1F1B.
    Interleaved, given enough micro-batches, the first holds num_layers * (1 + (pp - 1) / (pp * vpp)).

    Source: megatron-core 0.16.1, pipeline_parallel.schedules.get_pp_rank_microbatches.
    """
    pp, vpp = world.pp, world.vpp
    ahead = pp - pp_rank - 1 if vpp == 1 else 2 * (pp - pp_rank - 1) + (vpp - 1) * pp
    return min(ahead + 1, num_microbatches(config, world) * vpp) * config.model.num_layers / (pp * vpp)


def _workspace_bytes(config: Config, world: World, recomputed: Recomputed, pp_rank: int) -> float:
    """Return the larger of one layer at work and, on the last stage, the logits; and on a GPU CUDA's own.

    The logits' gradient takes their place. They come after the last layer and before its backward.
    """
    at_work = _transient_bytes(config, world, recomputed)
    if pp_rank == world.pp - 1:
        logits = tokens(config, world) * config.model.vocab_size / world.tp
        at_work = max(at_work, logits * BYTES[config.precision])
    own = CUDA_ALLOWANCE_GIB * GIB + _turned_bytes(config, world) if config.cluster.device is Device.cuda else 0.0
    return at_work + own


def _turned_bytes(config: Config, world: World) -> float:
    """Return the two buffers for transposed weights: FP8 products of Hopper want the summed axis of both operands last."""
    if config.precision is not Precision.fp8:
        return 0.0
    return 2 * max(linear.weights for linear in linears(config.model).values()) / world.tp


def _transient_bytes(config: Config, world: World, recomputed: Recomputed) -> float:
    """Return what one layer holds beside what it keeps, at its worst moment; an estimate.

    p bytes per number, q per quantised one (in FP8 1, else p), o the width of fc1's output, w of qkv's, split over tp:

    | moment               | per token                                                                                |
    | -------------------- | ---------------------------------------------------------------------------------------- |
    | forward of the MLP   | fc1's output p o, the activation q f                                                     |
    | its backward         | gradients of the activation p f and of fc1's output q o; p o more if that is recomputed   |
    | attention's backward | gradients of its output p h and of qkv's p w; p w more if recomputed; with cp every rank's |
    |                      | k and v and their gradients, 4 p k cp                                                    |

    The transposed weights of FP8 have buffers of their own, `_turned_bytes`.
    """
    model, size = config.model, BYTES[config.precision]
    is_fp8 = config.precision is Precision.fp8
    fc1, qkv = linears(model)["linear_fc1"], linears(model)["linear_qkv"]
    stored = 1 if is_fp8 else size
    forward = size * fc1.num_out + stored * model.ffn_hidden_size
    mlp = size * model.ffn_hidden_size + (stored + (size if recomputed.fc1_layers else 0)) * fc1.num_out
    attention = size * (model.hidden_size + (2 if recomputed.qkv_layers else 1) * qkv.num_out)
    if world.cp > 1:
        attention += 4 * size * kv_size(model) * world.cp
    count = tokens(config, world)
    return max(forward, mlp, attention) * count / world.tp + HIDDEN_BYTES * model.hidden_size * count
