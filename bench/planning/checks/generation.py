"""Checks of a generation task."""

import math
from collections.abc import Iterator

from bench.contract.engine import HuggingFace, Strategy
from bench.contract.generation import Batching, Generation, GenerationMemory, GenerationRequest, Order
from bench.contract.layers import differs_from_llama
from bench.contract.schema import Config, Device, EngineName, Precision, ProfileKind
from bench.contract.task import Kind
from bench.errors import ConfigError
from bench.planning.checks.huggingface import attention_of
from bench.planning.parallelism import NF4_BLOCK
from bench.texts import counted, with_article, with_verb

Refusal = tuple[bool, str, str, str]
"""Whether it is refused, the problem, the config keys, the fix."""
BLOCK = "task.generation"
HF = "engine.huggingface"
TRAINING_ONLY = ("offload_optimizer", "offload_parameters", "offload_activations")


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that is invalid, or that this engine does not support."""
    generation = config.task.generation
    assert generation is not None  # a task of this kind has the block
    for is_refused, what, where, fix in (
        *_amounts(generation),
        *_order(generation),
        *_sampling(generation),
        *_layout(config),
        *_precision(config, generation),
        *_engine(config, generation),
    ):
        if is_refused:
            raise ConfigError(what, where=where, fix=fix)


def check_sharing(config: Config) -> None:
    """Raise ConfigError if ranks of a task of another kind should share GPUs."""
    if config.parallel.share_gpu and config.task.kind is not Kind.generate:
        raise ConfigError(
            f"only a task of kind generate can share GPUs, but task {config.task.name} is of kind "
            f"{config.task.kind.name}",
            where="parallel.share_gpu",
            fix="remove parallel.share_gpu",
        )


def check_requests(config: Config, requests: list[GenerationRequest], num_replicas: int) -> None:
    """Raise ConfigError if a request exceeds the model's context, or a replica has no request."""
    longest = max(requests, key=lambda one: one.length + (one.prompt_tokens if one.prompt is None else 1))
    prompt_tokens = longest.prompt_tokens if longest.prompt is None else 1
    max_tokens = config.model.max_seq_length
    if prompt_tokens + longest.length > max_tokens:
        raise ConfigError(
            f"a prompt of at least {prompt_tokens} tokens and an answer of {longest.length} tokens do not fit: the "
            f"context of {config.model.name} has {max_tokens} tokens",
            where=f"{BLOCK}.lengths, model.max_seq_length",
            fix=f"set all lengths to at most {max_tokens - prompt_tokens} tokens",
        )
    if len(requests) < num_replicas:
        raise ConfigError(
            f"the task has {counted(len(requests), 'request')} for {num_replicas} replicas, so some replicas would "
            "have no work",
            where=f"{BLOCK}.lengths, parallel.groups",
            fix=f"list at least {num_replicas} lengths, or set parallel.groups to at most {len(requests)}",
        )


def check_memory(config: Config, memory: GenerationMemory) -> None:
    """Raise ConfigError if the estimate exceeds the GPU's memory."""
    if memory.fits is not False:
        return
    gpu = config.cluster.gpu
    assert gpu is not None
    raise ConfigError(
        f"estimated memory is {memory.total_gib:.1f} GiB per GPU, but {with_article(gpu.name)} has "
        f"{gpu.memory_gib:g} GiB; the estimate is the sum of weights {memory.weights_gib:.1f}, "
        f"KV cache {memory.kv_cache_gib:.1f} and workspace "
        f"{memory.workspace_gib:.1f}",
        where=f"parallel.tp, precision, {BLOCK}.max_batch, {BLOCK}.nf4",
        fix=f"for smaller weights, raise parallel.tp, or set precision=fp8 or {BLOCK}.nf4=true; for a smaller KV "
        f"cache, lower {BLOCK}.max_batch",
    )


def _amounts(generation: Generation) -> Iterator[Refusal]:
    lengths, where = generation.lengths, f"{BLOCK}.lengths"
    yield not lengths, "lengths is empty", where, "list the length of each answer, such as [100, 110]"
    wrong = [length for length in lengths if length < 1]
    what = f"the length of an answer is {min(lengths, default=0)} tokens, but must be 1 or more"
    yield bool(wrong), what, where, "set every length to 1 or more"
    what = f"{len(lengths):,} answers exceed the maximum of {MAX_ANSWERS:,}"
    yield len(lengths) > MAX_ANSWERS, what, where, f"list {MAX_ANSWERS:,} lengths or fewer"
    for name in ("prompt_tokens", "warmup_tokens"):
        amount = getattr(generation, name)
        what = f"{name} is {amount}, but must be 1 or more"
        yield amount < 1, what, f"{BLOCK}.{name}", f"set {BLOCK}.{name} to 1 or more"
    yield (
        not generation.question.strip(),
        "the question is empty",
        f"{BLOCK}.question",
        f"set {BLOCK}.question to a text",
    )


def _order(generation: Generation) -> Iterator[Refusal]:
    most, where = generation.max_batch, f"{BLOCK}.max_batch"
    what = f"max_batch is {most}, but must be 1 or more"
    yield most is not None and most < 1, what, where, f"set {where} to 1 or more, or to null"
    is_alone = generation.order is Order.one_by_one
    side_by_side = f"or set {BLOCK}.order=side_by_side"
    what = f"max_batch is {most}, but order=one_by_one generates one answer at a time"
    yield is_alone and most not in (None, 1), what, f"{BLOCK}.order, {where}", f"set {where}=null, {side_by_side}"
    is_continuous = generation.batching is Batching.continuous
    where = f"{BLOCK}.order, {BLOCK}.batching"
    what = "batching is continuous, but order=one_by_one generates one answer at a time"
    yield is_alone and is_continuous, what, where, f"set {BLOCK}.batching=static, {side_by_side}"
    what = "batching=continuous needs max_batch: without it all requests run in one static batch"
    yield is_continuous and most is None, what, f"{BLOCK}.max_batch", f"set {BLOCK}.max_batch, such as 8"


def _sampling(generation: Generation) -> Iterator[Refusal]:
    s, where = generation.sampling, f"{BLOCK}.sampling"
    is_wrong = not 0 <= s.temperature < math.inf
    what, fix = f"temperature is {s.temperature:g}, but must be 0 or more", "set temperature to 0 (greedy) or more"
    yield is_wrong, what, f"{where}.temperature", fix
    what = f"top_k is {s.top_k}, but must be 1 or more"
    yield s.top_k is not None and s.top_k < 1, what, f"{where}.top_k", "set top_k to 1 or more, or to null"
    what, fix = f"top_p is {s.top_p}, but must be above 0 and at most 1", "set top_p to a value such as 0.9, or to null"
    yield s.top_p is not None and not 0 < s.top_p <= 1, what, f"{where}.top_p", fix
    is_cut = s.top_k is not None or s.top_p is not None
    what = "top_k or top_p is set, but temperature 0 is greedy decoding and ignores them"
    yield s.temperature == 0 and is_cut, what, where, "set temperature above 0, or set top_k and top_p to null"


def _layout(config: Config) -> Iterator[Refusal]:
    p = config.parallel
    split = [name for name in ("pp", "cp", "vpp") if (getattr(p, name) or 1) > 1] + (["sp"] if p.sp else [])
    where = ", ".join(f"parallel.{name}" for name in split) or "parallel"
    what = f"{with_verb(split, 'is', 'are')} set, but generation supports only tensor parallelism"
    fix = f"set {' and '.join(split)} to 1 (sp to false), and use parallel.tp and parallel.groups"
    yield bool(split), what, where, fix
    for name in ("groups", "tp"):
        size = getattr(p, name)
        what = f"{name} is {size}, but must be 1 or more"
        yield size is not None and size < 1, what, f"parallel.{name}", f"set parallel.{name} to 1 or more"
    what = "share_gpu is true, but cluster.device is cpu"
    is_cpu = config.cluster.device is Device.cpu
    yield bool(p.share_gpu) and is_cpu, what, "parallel.share_gpu", "remove share_gpu, and raise cluster.ranks_per_node"
    is_profiled = config.launch.profile is not ProfileKind.none
    what = f"launch.profile={config.launch.profile.name} needs training steps, but this task does not train"
    yield is_profiled, what, "launch.profile", "set launch.profile=none"


def _precision(config: Config, generation: Generation) -> Iterator[Refusal]:
    is_4_bit = bool(generation.nf4) and config.precision is not Precision.bf16
    what = f"nf4 needs precision bf16, but precision is {config.precision.name}"
    yield is_4_bit, what, f"precision, {BLOCK}.nf4", f"set precision=bf16, or {BLOCK}.nf4=null"
    gpu = config.cluster.gpu if config.cluster.device is Device.cuda else None
    has_none = config.precision is Precision.fp8 and gpu is not None and not gpu.has_fp8
    what = f"precision is fp8, but {gpu.why_no_fp8 if gpu else ''}"
    yield has_none, what, "precision, cluster.gpu.peak_fp8_tflops", "set precision=bf16"


def _engine(config: Config, generation: Generation) -> Iterator[Refusal]:
    name, block = config.engine.name, config.engine.huggingface
    what = f"engine.name is {name.name}, but {HF} is {'missing' if block is None else 'given'}"
    differs = (name is EngineName.huggingface) != (block is not None)
    yield differs, what, f"engine.name, {HF}", f"set engine={name.name} instead of engine.name"
    what = f"engine={name.name} does not support generation"
    yield name in (EngineName.nemo, EngineName.command), what, "engine", "choose engine=megatron or huggingface"
    if name is EngineName.megatron:
        yield from _ours(config, generation)
    if config.huggingface is not None:
        yield from _huggingface(config, generation, config.huggingface)


def _ours(config: Config, generation: Generation) -> Iterator[Refusal]:
    """Yield what engine=megatron does not support."""
    unmet, tp = differs_from_llama(config.model), config.parallel.tp or 1
    differing = ", ".join(f"{key} is {value}" for key, value in unmet.items())
    what = f"engine=megatron generates only with the layers of Llama, Mistral or Qwen, but {differing}"
    yield bool(unmet), what, ", ".join(unmet) or "model", "set model= to a Llama, Mistral or Qwen model"
    for key in ("hidden_size", "q_size", "ffn_hidden_size"):
        width = getattr(config.model, key) // tp
        what = f"nf4 needs {key} / tp to be a multiple of {NF4_BLOCK}, but {key} / tp is {width}"
        is_cut = bool(generation.nf4) and width % NF4_BLOCK != 0
        yield is_cut, what, f"{BLOCK}.nf4, parallel.tp", f"lower parallel.tp, or set {BLOCK}.nf4=null"


def _huggingface(config: Config, generation: Generation, hf: HuggingFace) -> Iterator[Refusal]:
    """Yield what engine=huggingface does not support."""
    described = config.model.described
    if described is not None:
        yield attention_of(hf.attention, described)
    unmet = {} if described is not None else differs_from_llama(config.model)
    what = (
        f"engine=huggingface generates only with Llama models, but {', '.join(f'{k} is {v}' for k, v in unmet.items())}"
    )
    yield bool(unmet), what, ", ".join(unmet) or "model", "set model= to a Llama model"
    tp = config.parallel.tp
    what = f"tp is {tp}, but engine=huggingface does not support tensor parallelism"
    fix = f"set parallel.tp=1; {HF}.strategy=balanced places the layers of a replica on several GPUs"
    yield tp is not None and tp > 1, what, "parallel.tp", fix
    is_fp8 = config.precision is Precision.fp8
    what = "engine=huggingface generates in FP32, BF16 or 4 bits, not in FP8"
    yield is_fp8, what, "precision", f"set precision=bf16 (with {BLOCK}.nf4=true for 4 bits)"
    is_continuous = generation.batching is Batching.continuous
    what = "engine=huggingface supports static batching only"
    yield is_continuous, what, f"{BLOCK}.batching", f"set {BLOCK}.batching=static"
    what = "peer_memory is false, but this key has no effect with engine=huggingface"
    yield not generation.peer_memory, what, f"{BLOCK}.peer_memory", f"remove {BLOCK}.peer_memory"
    is_sharded = hf.strategy not in (Strategy.ddp, Strategy.balanced)
    what = f"strategy {hf.strategy.name} is for training only; generation uses one process per replica"
    yield (
        is_sharded,
        what,
        f"{HF}.strategy",
        f"set {HF}.strategy=ddp, or balanced for several GPUs per replica",
    )
    is_balanced = hf.strategy is Strategy.balanced
    allowed = "1 or more" if is_balanced else "1"
    what = f"num_gpus is {hf.num_gpus}, but must be {allowed} with strategy={hf.strategy.name}"
    wrong = hf.num_gpus < 1 or hf.num_gpus > 1 and not is_balanced
    yield wrong, what, f"{HF}.num_gpus", f"set {HF}.num_gpus=1, or set strategy=balanced and num_gpus to 1 or more"
    is_cpu = config.cluster.device is Device.cpu
    what = f"num_gpus is {hf.num_gpus}, but cluster.device is cpu"
    fix = f"set {HF}.num_gpus=1, or cluster.device=cuda"
    yield is_cpu and hf.num_gpus > 1, what, f"{HF}.num_gpus, cluster.device", fix
    is_plain = not hf.compile and not generation.nf4
    what = "strategy=balanced does not support compile or nf4"
    where = f"{HF}.strategy, {HF}.compile, {BLOCK}.nf4"
    yield is_balanced and not is_plain, what, where, f"set {HF}.strategy=ddp, with one GPU per replica"
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    what = f"strategy=balanced uses one process for all GPUs, but this cluster has {num_ranks} ranks"
    where = "cluster.num_nodes, cluster.ranks_per_node"
    fix = f"set cluster.num_nodes=1, cluster.ranks_per_node=1 and {HF}.num_gpus={max(hf.num_gpus, num_ranks)}"
    yield is_balanced and num_ranks > 1, what, where, fix
    for key in TRAINING_ONLY:
        yield (
            getattr(hf, key),
            f"{key} is for training only",
            f"{HF}.{key}",
            f"set {HF}.{key}=false",
        )
    what = "deepspeed_json is for training only"
    yield (
        hf.deepspeed_json is not None,
        what,
        f"{HF}.deepspeed_json",
        f"set {HF}.deepspeed_json=null",
    )


MAX_ANSWERS = 10_000
