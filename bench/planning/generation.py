"""Plan a generation task: assign requests to replicas, estimate GPU memory and the time per token."""

import heapq
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.contract.generation import Generation, GenerationMemory, GenerationRequest, Order, TokenCost, WeightPrecision
from bench.contract.model import Activation, Weights
from bench.contract.plan import World
from bench.contract.plan_kinds import GenerationPlan
from bench.contract.schema import Config, Device, Precision
from bench.errors import ConfigError
from bench.planning.checks import generation as generation_checks
from bench.planning.commands import fields_of_all
from bench.planning.estimates.memory import CUDA_ALLOWANCE_GIB, GIB, NF4_BYTES, gpu
from bench.planning.estimates.parameters import weight_bytes
from bench.planning.replicas import per_gpu, shards, split
from bench.planning.text_files import TextFile

KEYS = ("prompt", "length")
FILE = TextFile(
    name="file of prompts",
    setting="task.generation.prompts",
    max_bytes=4 * 2**20,  # the plan contains the prompts, and a batch script contains the plan
    shorten="use fewer or shorter prompts",
    fix='write one object per line, such as {"prompt": "Why is the sky blue?", "length": 200}; length is optional',
)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One requested answer: its prompt and its number of new tokens."""

    prompt: str | None
    """None: random tokens."""
    length: int


def prompt_lines(generation: Generation, *, has_text: bool) -> list[PromptLine]:
    """Return the requested answers in order; without text, prompts are random.

    Raises:
        ConfigError: the file of prompts cannot be read, or one of its lines is not a valid prompt.
    """
    if generation.prompts is None:
        return [PromptLine(generation.question if has_text else None, length) for length in generation.lengths]
    requested: list[PromptLine] = []
    path = Path(generation.prompts)
    for record, where in FILE.json_lines(FILE.read(path)[0], path):
        prompt, length = _checked(record, where)
        usual = generation.lengths[len(requested) % len(generation.lengths)]
        requested.append(PromptLine(prompt if has_text else None, usual if length is None else length))
    if not requested:
        raise ConfigError("the file of prompts is empty", where=generation.prompts, fix=FILE.fix)
    return requested


def _checked(record: Any, where: str) -> tuple[str, int | None]:
    """Return the prompt and the length of a line."""
    if not isinstance(record, dict) or set(record) - set(KEYS):
        content = f"the keys {', '.join(sorted(record))}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ConfigError(
            f"the line must be a JSON object with only the keys prompt and length, but has {content:.100}",
            where=where,
            fix=FILE.fix,
        )
    prompt, length = record.get("prompt"), record.get("length")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(
            f"the prompt is {prompt!r:.100}, but must be a text that is not empty", where=where, fix=FILE.fix
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # JSON can write one half of a character, as \ud800
        raise ConfigError(
            f"the prompt contains {prompt[error.start]!a}, which is not a valid character", where=where, fix=FILE.fix
        ) from error
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(
            f"the length is {length!r:.100}, but must be a number of tokens, 1 or more", where=where, fix=FILE.fix
        )
    return prompt, length


BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 2}
"""Bytes per element of everything except linear weights: activations, KV cache, embeddings, the head."""
LINEAR_BYTES = {
    WeightPrecision.fp32: 4.0,
    WeightPrecision.bf16: 2.0,
    WeightPrecision.fp8: 1.0,
    WeightPrecision.nf4: NF4_BYTES,
}
LOGIT_COPIES = 3
"""FP32 logits of the running requests: as computed, scaled, and their probabilities. Assumed."""


def weights(config: Config) -> WeightPrecision:
    """Return the precision of the linears' weights in memory."""
    assert config.task.generation is not None
    return WeightPrecision.nf4 if config.task.generation.nf4 else WeightPrecision[config.precision.name]


def assign_requests(config: Config, world: World) -> list[GenerationRequest]:
    """Return all requests, each assigned to a replica: longest first, each to the replica with the fewest tokens.

    No replica then has more than 4/3 of the optimal share. Source: Graham 1969, Bounds on Multiprocessing Timing
    Anomalies.
    """
    generation = config.task.generation
    assert generation is not None
    every = prompt_lines(generation, has_text=config.model.weights is not Weights.random)
    shares = [(0, replica) for replica in range(world.dp)]
    replica_of = {}
    for index in sorted(range(len(every)), key=lambda index: (-every[index].length, index)):
        tokens, replica = heapq.heappop(shares)
        replica_of[index] = replica
        heapq.heappush(shares, (tokens + every[index].length, replica))
    return [
        GenerationRequest(
            index=index,
            replica=replica_of[index],
            prompt=one.prompt,
            prompt_tokens=_most_tokens(one, generation.prompt_tokens),
            length=one.length,
        )
        for index, one in enumerate(every)
    ]


def _most_tokens(one: PromptLine, random_tokens: int) -> int:
    """Return the upper bound of a prompt's tokens: one per byte, plus the BOS token."""
    return random_tokens if one.prompt is None else 1 + len(one.prompt.encode())


def batch_size(config: Config, requests: list[GenerationRequest], world: World) -> int:
    """Return how many requests a replica runs at one time."""
    generation = config.task.generation
    assert generation is not None
    if generation.order is Order.one_by_one:
        return 1
    largest = max(sum(one.replica == replica for one in requests) for replica in range(world.dp))
    return min(largest, generation.max_batch or largest)


def memory(config: Config, world: World, requests: list[GenerationRequest]) -> GenerationMemory:
    """Return the estimated memory of the fullest GPU, including all replicas that share it."""
    batch, longest = batch_size(config, requests, world), max(one.prompt_tokens + one.length for one in requests)
    prompt = max(one.prompt_tokens for one in requests)
    num_sharing, own = per_gpu(config, world), 0.0
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
    """Return the KV cache bytes of one token on one GPU, for all of its layers; windows of attention save none."""
    if config.model.described is not None:
        return float(config.model.described.kv_width * BYTES[config.precision])
    of_layer = 2 * config.model.kv_size * BYTES[config.precision]
    return config.model.num_layers * of_layer / shards(config, world)


def _weight_bytes(config: Config, world: World) -> float:
    """Return the bytes of the weights on one GPU: linears in their own precision, the rest in that of activations."""
    sizes = {"linear_bytes": LINEAR_BYTES[weights(config)], "other_bytes": BYTES[config.precision]}
    return weight_bytes(config.model, shards=shards(config, world), **sizes)


def _temporary_bytes(config: Config, world: World, batch: int, prompt: int) -> float:
    """Return the peak of temporary bytes: the MLP of the prompts' tokens, or the logits of one token per request."""
    model = config.model
    gates = 3 if model.activation is Activation.swiglu else 2
    mlp = gates * model.ffn_hidden_size / shards(config, world) + 4 * model.hidden_size
    return max(batch * prompt * mlp * BYTES[config.precision], LOGIT_COPIES * 4 * batch * model.vocab_size)


def cost(config: Config, world: World, requests: list[GenerationRequest]) -> TokenCost | None:
    """Return the time of one token of one request by memory bandwidth alone; None if the bandwidth was not measured.

    Each token reads all weights that it uses except the embedding (one row), and the KV cache of the tokens before it:
    on average the prompt and half of the answer.
    """
    device = gpu(config)
    if device is None or device.rates is None:
        return None
    model = config.model
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size * BYTES[config.precision]
    before = fmean(one.prompt_tokens + one.length / 2 for one in requests)
    used = 1.0
    if model.described is not None:
        used = model.described.active_parameters / model.described.parameters
    read = used * _weight_bytes(config, world) - embedding / shards(config, world)
    read += before * kv_bytes(config, world)
    return TokenCost(
        bytes_per_token=read,
        bandwidth_gbs=device.rates.copy_gbs,
        token_s=read / (device.rates.copy_gbs * 1e9),
    )


def make(config: Config, base: Config | None) -> GenerationPlan:
    """Return the plan of a generation run."""
    world = split(config)
    requests = assign_requests(config, world)
    generation_checks.check_requests(config, requests, world.dp)
    needed = memory(config, world, requests)
    generation_checks.check_memory(config, needed)
    return GenerationPlan(
        **fields_of_all(config),
        world=world,
        weights=weights(config),
        requests=requests,
        memory=needed,
        cost=cost(config, world, requests),
        base_dir=None if config.model.weights is Weights.random else config.cluster.paths.model,
    )
