"""Work out a generation task: which replica answers what, what a GPU needs for it, and how fast a token can be."""

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.contract.generation import Asked, Generation, GenerationMemory, Order, TokenCost, WeightPrecision
from bench.contract.model import Activation, Weights
from bench.contract.plan import World
from bench.contract.plan_kinds import GenerationPlan
from bench.contract.schema import Config, Device, Precision
from bench.errors import ConfigError
from bench.planning.checks import generation as generation_checks
from bench.planning.commands import fields_of_all
from bench.planning.estimates.memory import CUDA_ALLOWANCE_GIB, GIB, NF4_BYTES, gpu
from bench.planning.estimates.parameters import kv_size, linear_weights, rank_parameters
from bench.planning.replicas import per_gpu, shards, split

KEYS = ("prompt", "length")
MOST_BYTES = 4 * 2**20
"""Of all prompts together: the plan holds them, and a batch script holds the plan."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One answer that is asked for."""

    prompt: str | None
    """None: random tokens."""
    length: int


def wanted(generation: Generation, *, has_text: bool) -> list[Wanted]:
    """Return what is asked for, in its order; without text, prompts are random.

    Raises:
        ConfigError: the file of prompts cannot be read, or one of its lines is no prompt.
    """
    if generation.prompts is None:
        return [Wanted(generation.question if has_text else None, length) for length in generation.lengths]
    found: list[Wanted] = []
    for number, line in enumerate(_lines(Path(generation.prompts)), start=1):
        prompt, length = _parsed(line, f"{generation.prompts}, line {number}")
        usual = generation.lengths[len(found) % len(generation.lengths)]
        found.append(Wanted(prompt if has_text else None, usual if length is None else length))
    if not found:
        raise ConfigError("no prompt in this file", where=generation.prompts, fix=_prompt_fix())
    return found


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines that are not blank."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"{path.stat().st_size:,} bytes of prompts, and a plan holds {MOST_BYTES:,} of them",
                where=str(path),
                fix="ask for less: a sample of the prompts, or shorter ones",
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"no prompts can be read: {error.strerror}"
        raise ConfigError(what, where=str(path), fix="correct task.generation.prompts") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason}", where=str(path), fix=_prompt_fix()) from error
    yield from (line for line in text.split("\n") if line.strip())


def _parsed(line: str, where: str) -> tuple[str, int | None]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", where=where, fix=_prompt_fix()) from error
    if not isinstance(record, dict) or set(record) - set(KEYS):
        keys = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"not an object of prompt and length, but {keys:.100}", where=where, fix=_prompt_fix())
    prompt, length = record.get("prompt"), record.get("length")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"the prompt is {prompt!r:.100}", where=where, fix=_prompt_fix())
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # JSON can write one half of a character, as \ud800
        what = f"the prompt holds {prompt[error.start]!a}, which is no character"
        raise ConfigError(what, where=where, fix=_prompt_fix()) from error
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"the length is {length!r:.100}, not a number of tokens", where=where, fix=_prompt_fix())
    return prompt, length


def _prompt_fix() -> str:
    return 'write one object a line, such as {"prompt": "Why is the sky blue?", "length": 200}; length may be left out'


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
    """Return the bytes of keys and values of one token on one GPU, of all layers that it has."""
    of_layer = 2 * kv_size(config.model) * BYTES[config.precision]
    return config.model.num_layers * of_layer / shards(config, world)


def _weight_bytes(config: Config, world: World) -> float:
    """Return the bytes of the weights on one GPU: linears as they are stored, the rest as activations are."""
    model = config.model
    num_shards = shards(config, world)
    held = rank_parameters(model, None, tp=num_shards, pp=1, pp_rank=0)[0]
    linear = model.num_layers * linear_weights(model) / num_shards
    return linear * LINEAR_BYTES[weights(config)] + (held - linear) * BYTES[config.precision]


def _temporary_bytes(config: Config, world: World, batch: int, prompt: int) -> float:
    """Return the bytes of the widest moment: the MLP of the prompts' tokens, or the logits of one token each."""
    model = config.model
    gates = 3 if model.activation is Activation.swiglu else 2
    mlp = gates * model.ffn_hidden_size / shards(config, world) + 4 * model.hidden_size
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
    read = _weight_bytes(config, world) - embedding / shards(config, world)
    read += before * kv_bytes(config, world)
    return TokenCost(
        bytes_per_token=read,
        bandwidth_gbs=device.rates.copy_gbs,
        token_s=read / (device.rates.copy_gbs * 1e9),
    )


def make(config: Config, base: Config | None) -> GenerationPlan:
    """Return the plan of a run that generates."""
    world = split(config)
    requests = asked(config, world)
    generation_checks.check_asked(config, requests, world.dp)
    needed = memory(config, world, requests)
    generation_checks.check_memory(config, needed)
    return GenerationPlan(
        **fields_of_all(config),
        world=world,
        weights=weights(config),
        asked=requests,
        memory=needed,
        cost=cost(config, world, requests),
        base_dir=None if config.model.weights is Weights.random else config.cluster.paths.model,
    )
