"""Work out a generation task: which replica answers what, what a GPU needs for it, and how fast a token can be."""

import heapq
from statistics import fmean

from bench.contract.generation import Asked, GenerationMemory, Order, TokenCost, WeightPrecision
from bench.contract.plan import World
from bench.contract.schema import Config, Device, Precision
from bench.contract.task import Activation, Weights
from bench.planning import replicas
from bench.planning.memory import CUDA_ALLOWANCE_GIB, GIB, NF4_BYTES, gpu
from bench.planning.parameters import kv_size, linear_weights, rank_parameters
from bench.planning.prompts import Wanted, wanted

BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 2}
"""Of a number that is no weight of a linear: activations, keys and values, embeddings, the head."""
LINEAR_BYTES = {
    WeightPrecision.fp32: 4.0,
    WeightPrecision.bf16: 2.0,
    WeightPrecision.fp8: 1.0,
    WeightPrecision.nf4: NF4_BYTES,
}
LOGIT_COPIES = 3
"""FP32 logits of the answers at work: as computed, scaled, and their probabilities. Assumed."""


def weights(config: Config) -> WeightPrecision:
    """Return how the linears' weights lie in memory."""
    assert config.task.generation is not None
    return WeightPrecision.nf4 if config.task.generation.nf4 else WeightPrecision[config.precision.name]


def asked(config: Config, world: World) -> list[Asked]:
    """Return every answer with the replica that gives it: the longest first, each to the replica with the least.

    No replica then has more than 4/3 of the best share. Source: Graham 1969, Bounds on Multiprocessing Timing
    Anomalies.
    """
    generation = config.task.generation
    assert generation is not None
    every = wanted(generation, has_text=config.model.weights is not Weights.random)
    shares = [(0, replica) for replica in range(world.dp)]
    replica_of = {}
    for index in sorted(range(len(every)), key=lambda index: (-every[index].length, index)):
        tokens, replica = heapq.heappop(shares)
        replica_of[index] = replica
        heapq.heappush(shares, (tokens + every[index].length, replica))
    return [
        Asked(
            index=index,
            replica=replica_of[index],
            prompt=one.prompt,
            prompt_tokens=_most_tokens(one, generation.prompt_tokens),
            length=one.length,
        )
        for index, one in enumerate(every)
    ]


def _most_tokens(one: Wanted, random_tokens: int) -> int:
    """Return how many tokens a prompt has at most: one a byte, behind the token that begins a text."""
    return random_tokens if one.prompt is None else 1 + len(one.prompt.encode())


def at_work(config: Config, asked: list[Asked], world: World) -> int:
    """Return how many answers a replica works on at one time."""
    generation = config.task.generation
    assert generation is not None
    if generation.order is Order.one_by_one:
        return 1
    largest = max(sum(one.replica == replica for one in asked) for replica in range(world.dp))
    return min(largest, generation.max_batch or largest)


def memory(config: Config, world: World, asked: list[Asked]) -> GenerationMemory:
    """Return what the fullest GPU needs, by an estimate: all replicas that share it count."""
    batch, longest = at_work(config, asked, world), max(one.prompt_tokens + one.length for one in asked)
    prompt = max(one.prompt_tokens for one in asked)
    num_sharing, own = replicas.per_gpu(config, world), 0.0
    if config.cluster.device is Device.cuda:
        own = CUDA_ALLOWANCE_GIB * GIB
    parts = {
        "weights_gib": num_sharing * _weight_bytes(config, world) / GIB,
        "kv_cache_gib": num_sharing * batch * longest * kv_bytes(config, world) / GIB,
        "workspace_gib": num_sharing * (own + _temporary_bytes(config, world, batch, prompt)) / GIB,
    }
    total_gib, device = sum(parts.values()), gpu(config)
    return GenerationMemory(
        **parts,
        total_gib=total_gib,
        capacity_gib=device.memory_gib if device else None,
        fits=total_gib <= device.memory_gib if device else None,
    )


def kv_bytes(config: Config, world: World) -> float:
    """Return the bytes of keys and values of one token on one GPU, of all layers that it has."""
    of_layer = 2 * kv_size(config.model) * BYTES[config.precision]
    return config.model.num_layers * of_layer / replicas.shards(config, world)


def _weight_bytes(config: Config, world: World) -> float:
    """Return the bytes of the weights on one GPU: linears as they are stored, the rest as activations are."""
    model = config.model
    shards = replicas.shards(config, world)
    held = rank_parameters(model, None, tp=shards, pp=1, pp_rank=0)[0]
    linear = model.num_layers * linear_weights(model) / shards
    return linear * LINEAR_BYTES[weights(config)] + (held - linear) * BYTES[config.precision]


def _temporary_bytes(config: Config, world: World, batch: int, prompt: int) -> float:
    """Return the bytes of the widest moment: the MLP of the prompts' tokens, or the logits of one token each."""
    model = config.model
    gates = 3 if model.activation is Activation.swiglu else 2
    mlp = gates * model.ffn_hidden_size / replicas.shards(config, world) + 4 * model.hidden_size
    return max(batch * prompt * mlp * BYTES[config.precision], LOGIT_COPIES * 4 * batch * model.vocab_size)


def cost(config: Config, world: World, asked: list[Asked]) -> TokenCost | None:
    """Return what the memory bandwidth says of a token of one answer; None where it was not measured.

    All weights are read but the embedding, of which one row is, and the keys and values of what stands before: on the
    mean, the prompt and half of the answer.
    """
    device = gpu(config)
    if device is None or device.rates is None:
        return None
    model = config.model
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size * BYTES[config.precision]
    before = fmean(one.prompt_tokens + one.length / 2 for one in asked)
    read = _weight_bytes(config, world) - embedding / replicas.shards(config, world)
    read += before * kv_bytes(config, world)
    return TokenCost(
        bytes_per_token=read,
        bandwidth_gbs=device.rates.copy_gbs,
        token_s=read / (device.rates.copy_gbs * 1e9),
    )
