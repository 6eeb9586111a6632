"""Plan a serving task: its loads, and the checks of its config."""

import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from bench.contract.model import Weights
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Config, Device, ProfileKind
from bench.contract.serving import Arrivals, Load, Server, Serving, ServingMemory, total_tokens
from bench.errors import ConfigError
from bench.planning import request_lengths
from bench.planning.commands import fields_of_all
from bench.planning.estimates import serving_memory
from bench.planning.parallelism import split

PLACEHOLDERS = ("python", "model", "host", "port", "tp", "device", "total", "requests", "memory_fraction")
"""The placeholders of a server's command line."""
PROFILE = "profile"
"""The placeholder of the folder of traces, in the options of a profile."""
MAX_REQUESTS = 20_000
"""One record of the log contains all latencies of a load, and a record has at most one megabyte."""
SERVER = "task.serving.server"
COMMAND = f"{SERVER}.argv, {SERVER}.options"
BRACES = (
    f"use the placeholders {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}; {{model}} and {{port}} are "
    "required; write {{ and }} for literal braces, as in JSON"
)


def loads(serving: Serving) -> list[Load]:
    """Return the loads of a task, in its order."""
    return [load for arrivals in serving.arrivals for load in _of(arrivals, serving)]


def _of(arrivals: Arrivals, serving: Serving) -> Iterator[Load]:
    batched = serving.server.batches_tokens or None
    same: dict[str, Any] = {"arrivals": arrivals, "requests": serving.requests, "batched_tokens": batched}
    match arrivals:
        case Arrivals.poisson:
            yield from (Load(name=f"poisson {rate:g}/s", rate=rate, **same) for rate in serving.rates)
        case Arrivals.concurrent:
            yield from (Load(name=f"concurrency {n}", concurrency=n, **same) for n in serving.concurrency)
        case _:
            yield Load(name=arrivals.name.replace("_", " "), **same)


def model_folder(config: Config) -> str | None:
    """Return the model folder of the server; None if the run creates it, or the server runs elsewhere."""
    server = required(config).server
    if server.url is not None or config.model.weights is Weights.random:
        return None
    return server.model or config.cluster.paths.model


def required(config: Config) -> Serving:
    """Return the task's serving block; only for tasks of kind serve."""
    assert config.task.serving is not None
    return config.task.serving


def check(config: Config) -> None:
    """Raise ConfigError for a serving task that cannot run."""
    serving = required(config)
    _check_amounts(serving)
    _check_arrivals(serving)
    _check_concurrency(serving)
    _check_place(config)
    _check_lengths(config)
    _check_profile(config, serving.server)
    if serving.server.url is None:
        _check_tensor_parallel(config)
        _check_started(config, serving.server)
    else:
        _check_elsewhere(serving.server)


def _check_amounts(serving: Serving) -> None:
    limits = serving.limits
    positive: dict[str, float | None] = {
        "task.serving.requests": serving.requests,
        "task.serving.tokens_in": serving.tokens_in,
        "task.serving.tokens_out": serving.tokens_out,
        "task.serving.warm_up": serving.warm_up,
        "task.serving.request_timeout_s": serving.request_timeout_s,
        "task.serving.max_client_delay": serving.max_client_delay,
        f"{SERVER}.startup_timeout_s": serving.server.startup_timeout_s,
        "task.serving.limits.ttft_s": limits.ttft_s,
        "task.serving.limits.tpot_s": limits.tpot_s,
        "task.serving.limits.latency_s": limits.latency_s,
    }
    for key, number in positive.items():
        if number is not None and not 0 < number < float("inf"):
            raise ConfigError(
                f"{key} is {number:g}, but must be a positive number", where=key, fix=f"set {key} to a positive number"
            )
    if serving.requests > MAX_REQUESTS:
        raise ConfigError(
            f"task.serving.requests is {serving.requests:,}, but each load level can have at most {MAX_REQUESTS:,} "
            "requests",
            where="task.serving.requests",
            fix=f"set task.serving.requests to {MAX_REQUESTS:,} or less; for more requests in total, raise trials",
        )
    if serving.max_client_delay > 1:
        raise ConfigError(
            f"max_client_delay is {serving.max_client_delay:g}, but must be a share of the latency, at most 1",
            where="task.serving.max_client_delay",
            fix="set task.serving.max_client_delay to a share such as 0.05",
        )


def _check_arrivals(serving: Serving) -> None:
    arrivals, rates, is_poisson = serving.arrivals, serving.rates, Arrivals.poisson in serving.arrivals
    where = "task.serving.arrivals, task.serving.rates"
    if not arrivals or len(set(arrivals)) != len(arrivals):
        known_arrivals = ", ".join(arrival.name for arrival in Arrivals)
        raise ConfigError(
            f"task.serving.arrivals contains a value twice: {', '.join(arrival.name for arrival in arrivals)}"
            if arrivals
            else "task.serving.arrivals is empty",
            where=where,
            fix=f"list one or more of {known_arrivals} in task.serving.arrivals, without duplicates",
        )
    if is_poisson and not rates:
        raise ConfigError(
            "task.serving.arrivals contains poisson, but task.serving.rates is empty",
            where=where,
            fix="set task.serving.rates to requests per second, such as [1,2,4], or remove poisson",
        )
    if rates and not is_poisson:
        raise ConfigError(
            "task.serving.rates is set, but task.serving.arrivals does not contain poisson",
            where=where,
            fix="add poisson to task.serving.arrivals, or set task.serving.rates=[]",
        )
    if any(not 0 < rate < float("inf") for rate in rates) or sorted(set(rates)) != list(rates):
        raise ConfigError(
            f"task.serving.rates is {', '.join(f'{rate:g}' for rate in rates)}, but rates must be above 0 and in "
            "ascending order",
            where=where,
            fix="list rates in requests per second, in ascending order and without duplicates",
        )
    if is_poisson and serving.limits.latency_s is None:
        raise ConfigError(
            "poisson arrivals need a latency limit, but task.serving.limits.latency_s is not set",
            where="task.serving.limits.latency_s",
            fix="set task.serving.limits.latency_s to the highest allowed 99th percentile of the latency, in seconds",
        )


def _check_concurrency(serving: Serving) -> None:
    numbers, where = serving.concurrency, "task.serving.arrivals, task.serving.concurrency"
    if numbers and Arrivals.concurrent not in serving.arrivals:
        raise ConfigError(
            "task.serving.concurrency is set, but task.serving.arrivals does not contain concurrent",
            where=where,
            fix="add concurrent to task.serving.arrivals",
        )
    if not numbers and Arrivals.concurrent in serving.arrivals:
        raise ConfigError(
            "task.serving.arrivals contains concurrent, but task.serving.concurrency is empty",
            where=where,
            fix="set task.serving.concurrency to numbers of requests, such as [1,8,32]",
        )
    if sorted(set(numbers)) != list(numbers) or any(not 1 <= number <= serving.requests for number in numbers):
        raise ConfigError(
            f"task.serving.concurrency is {numbers}, but the numbers must be in ascending order, from 1 to "
            "task.serving.requests",
            where=where,
            fix=f"list numbers from 1 to {serving.requests}, in ascending order and without duplicates",
        )


def _check_place(config: Config) -> None:
    cluster, tp = config.cluster, config.parallel.tp or 1
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"a server runs on one node, but cluster.num_nodes is {cluster.num_nodes}",
            where="cluster.num_nodes",
            fix="set cluster.num_nodes=1",
        )
    max_tp = cluster.ranks_per_node if cluster.device is Device.cuda else 1
    if tp > max_tp:
        raise ConfigError(
            f"parallel.tp is {tp}, but a node has only {max_tp} GPUs"
            if cluster.device is Device.cuda
            else f"parallel.tp is {tp}, but a server on a CPU supports only parallel.tp=1",
            where="parallel.tp, cluster.ranks_per_node",
            fix=f"set parallel.tp to at most {max_tp}",
        )
    if (config.parallel.pp or 1) > 1 or (config.parallel.cp or 1) > 1:
        raise ConfigError(
            "parallel.pp or parallel.cp is above 1, but a server supports only tensor parallelism",
            where="parallel.pp, parallel.cp",
            fix="set parallel.pp=1 parallel.cp=1",
        )


def _check_tensor_parallel(config: Config) -> None:
    """Raise ConfigError if tp does not divide the model. Servers store copies of KV heads if there are more GPUs."""
    m, tp, most = config.model, config.parallel.tp or 1, config.cluster.ranks_per_node

    def undivided(tp: int) -> list[str]:
        sizes = {"attention heads": m.num_attention_heads, "FFN columns": m.ffn_hidden_size}
        own = [f"{size} {name}" for name, size in sizes.items() if size % tp]
        return own + [f"{m.num_query_groups} KV heads"] * bool(m.num_query_groups % tp and tp % m.num_query_groups)

    if undivided_sizes := undivided(tp):
        legal = ", ".join(str(n) for n in range(1, most + 1) if not undivided(n))
        raise ConfigError(
            f"tp {tp} does not divide the {', '.join(undivided_sizes)} of {m.name}",
            where="parallel.tp",
            fix=f"set parallel.tp to one of {legal}",
        )


def _check_profile(config: Config, server: Server) -> None:
    kind = config.launch.profile
    if kind in (ProfileKind.kernels, ProfileKind.nsys):
        raise ConfigError(
            f"launch.profile={kind.name} needs training steps, but this task does not train",
            where="launch.profile",
            fix="set launch.profile=modules or launch.profile=none",
        )
    if kind is ProfileKind.modules and (server.profile is None or server.url is not None):
        raise ConfigError(
            f"runstop cannot profile the GPU time of the server {server.name.name}"
            if server.url is None
            else "runstop can profile only a server that runstop starts, but task.serving.server.url is set",
            where="launch.profile",
            fix="set launch.profile=none, or let runstop start a server of transformers, vllm, sglang or lightllm",
        )


def check_memory(config: Config, needed: ServingMemory) -> None:
    """Raise ConfigError if the weights and one request do not fit."""
    if needed.fits is not False:
        return
    gpu = config.cluster.gpu
    assert gpu is not None
    least_gib = needed.weights_gib + needed.workspace_gib + needed.request_gib
    usable_gib = needed.fraction * gpu.memory_gib
    raise ConfigError(
        f"even for one request, a server needs {least_gib:.1f} GiB per GPU (weights {needed.weights_gib:.1f}, KV cache "
        f"{needed.request_gib:.2f}, workspace {needed.workspace_gib:.1f}), but it may use only {usable_gib:.1f} GiB",
        where=f"parallel.tp, precision, {SERVER}.memory_fraction",
        fix="raise parallel.tp to split weights and KV cache over more GPUs, set precision=fp8, or use GPUs with more "
        "memory",
    )


def _check_lengths(config: Config) -> None:
    serving, longest = required(config), config.model.max_seq_length
    if serving.lengths.vary:
        request_lengths.check(serving.lengths, config)
        return
    total = total_tokens(serving, None)
    if total > longest:
        raise ConfigError(
            f"a prompt and its answer have {total:,} tokens, but {config.model.name} supports only {longest:,} tokens",
            where="task.serving.tokens_in, task.serving.tokens_out",
            fix=f"set tokens_in and tokens_out to a total of at most {longest:,} tokens",
        )


def _check_started(config: Config, server: Server) -> None:
    """Refuse a server that cannot be started as configured."""
    names = _placeholders(server)
    if not server.argv or (unknown := names - set(PLACEHOLDERS)) or not {"model", "port"} <= names:
        is_unknown = server.argv and unknown
        raise ConfigError(
            f"the command line of the server contains the unknown placeholder {{{min(unknown)}}}"
            if is_unknown
            else "the command line of the server must contain the placeholders {model} and {port}",
            where=COMMAND,
            fix=BRACES,
        )
    if "tp" not in names and (config.parallel.tp or 1) > 1:
        raise ConfigError(
            f"parallel.tp is {config.parallel.tp}, but the command line of the server {server.name.name} has no "
            "placeholder {tp}",
            where="parallel.tp",
            fix="set parallel.tp=1, or set server= to another server",
        )
    if not 0 < server.memory_fraction <= 1:
        raise ConfigError(
            f"memory_fraction is {server.memory_fraction:g}, but must be above 0 and at most 1",
            where=f"{SERVER}.memory_fraction",
            fix=f"set {SERVER}.memory_fraction to a share such as 0.9",
        )
    if config.precision.name not in server.precisions:
        raise ConfigError(
            f"the server {server.name.name} has no command-line options for precision={config.precision.name}",
            where="precision",
            fix=f"set precision to one of {', '.join(server.precisions)}, or add the options to {SERVER}.precisions",
        )
    if server.port is not None and not 1 <= server.port <= 65535:
        raise ConfigError(
            f"{SERVER}.port is {server.port}, which is not a valid port",
            where=f"{SERVER}.port",
            fix=f"set {SERVER}.port to a port from 1 to 65535, or to null",
        )
    if model_folder(config) is None and config.model.weights is not Weights.random:
        raise ConfigError(
            "the folder of the model is not set",
            where=f"{SERVER}.model, cluster.paths.model",
            fix="export MODEL=FOLDER with a folder in Hugging Face format, or set model.weights=random",
        )


def _placeholders(server: Server) -> set[str]:
    """Return the placeholders in the command line; raises ConfigError for an unmatched brace."""
    arguments = [*server.argv, *chain(*server.precisions.values()), *server.cpu_options, *server.options]
    try:
        names = _fields(arguments)
        if server.profile is not None:
            names |= _fields([*server.profile.options, *server.profile.environment.values()]) - {PROFILE}
    except ValueError as error:
        raise ConfigError(
            f"the command line of the server contains an unmatched brace: {error}", where=COMMAND, fix=BRACES
        ) from error
    return names


def _fields(arguments: list[str]) -> set[str]:
    return {field for argument in arguments for _, field, _, _ in string.Formatter().parse(argument) if field}


def _check_elsewhere(server: Server) -> None:
    """Refuse the URL of a running server if it is malformed, or its model or tokenizer is not given."""
    assert server.url is not None
    if not server.url.startswith(("http://", "https://")) or server.url.rstrip("/").endswith("/v1"):
        raise ConfigError(
            f"{SERVER}.url is {server.url}, but must be a URL such as http://node7:8000",
            where=f"{SERVER}.url",
            fix="write http:// or https://, then the host and the port, without /v1",
        )
    if server.model is None or server.tokenizer is None:
        raise ConfigError(
            "the model name or the tokenizer of the running server is not set",
            where=f"{SERVER}.model, {SERVER}.tokenizer",
            fix=f"set {SERVER}.model to the name of the model on this server, and {SERVER}.tokenizer to a folder with "
            "tokenizer.json",
        )


def make(config: Config, base: Config | None) -> ServingPlan:
    """Return the plan of a serving run."""
    serving, memory, fields = required(config), None, fields_of_all(config)
    lengths = request_lengths.sampled(config, [trial.seed for trial in fields["trials"]])
    if serving.server.url is None:
        memory = serving_memory.estimate(config, serving, loads(serving), lengths)
        check_memory(config, memory)
    return ServingPlan(
        **fields,
        world=replace(split(config, tp=1, pp=1, cp=1, sp=False), tp=config.parallel.tp or 1, dp=1),
        loads=loads(serving),
        base_dir=model_folder(config),
        memory=memory,
        lengths=lengths,
    )
