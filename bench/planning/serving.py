"""The loads of a serving task, and what is refused of it; each message says what is wrong, where, and the fix."""

import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from bench.contract.model import Weights
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Config, Device
from bench.contract.serving import Arrivals, Load, Server, Serving, total_tokens
from bench.errors import ConfigError
from bench.planning.commands import fields_of_all
from bench.planning.parallelism import split

FILLED_IN = ("python", "model", "host", "port", "tp", "device", "total", "requests")
"""The words of an argv that stand for something of the plan."""
MAX_REQUESTS = 20_000
"""A log has one record for a load, with every latency in it, and a record has a megabyte at most."""
SERVER = "task.serving.server"
COMMAND = f"{SERVER}.argv, {SERVER}.options"
BRACES = (
    f"use {', '.join(f'{{{word}}}' for word in FILLED_IN)}; {{model}} and {{port}} must be there; write {{{{ and }}}} "
    "for braces, as those of JSON"
)


def loads(serving: Serving) -> list[Load]:
    """Return the loads of a task, in its order."""
    return [load for arrivals in serving.arrivals for load in _of(arrivals, serving)]


def _of(arrivals: Arrivals, serving: Serving) -> Iterator[Load]:
    bunched = serving.server.bunches_chunks or None
    if arrivals is not Arrivals.poisson:
        yield Load(name=arrivals.name.replace("_", " "), arrivals=arrivals, requests=serving.requests, bunched=bunched)
        return
    for rate in serving.rates:
        yield Load(name=f"poisson {rate:g}/s", arrivals=arrivals, requests=serving.requests, rate=rate, bunched=bunched)


def model_folder(config: Config) -> str | None:
    """Return the folder of the model that the server loads; None: it is made on the spot, or is another machine's."""
    server = required(config).server
    if server.url is not None or config.model.weights is Weights.random:
        return None
    return server.model or config.cluster.paths.model


def required(config: Config) -> Serving:
    """Return what the task says of serving; of another kind it has none, and nobody asks."""
    assert config.task.serving is not None
    return config.task.serving


def check(config: Config) -> None:
    """Raise ConfigError for a serving task that cannot be done."""
    serving = required(config)
    _check_amounts(serving)
    _check_arrivals(serving)
    _check_place(config)
    _check_lengths(config)
    if serving.server.url is None:
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
        f"{SERVER}.healthy_within_s": serving.server.healthy_within_s,
        "task.serving.limits.ttft_s": limits.ttft_s,
        "task.serving.limits.tpot_s": limits.tpot_s,
        "task.serving.limits.latency_s": limits.latency_s,
    }
    for key, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{value:g} is not above 0 and finite", where=key, fix=f"set {key} to a positive number")
    if serving.requests > MAX_REQUESTS:
        fix = f"ask for {MAX_REQUESTS:,} or fewer, or for more trials"
        raise ConfigError(f"{serving.requests:,} requests of one load", where="task.serving.requests", fix=fix)
    if serving.max_client_delay > 1:
        what = f"a client's delay of {serving.max_client_delay:g} latencies would hide the server"
        raise ConfigError(what, where="task.serving.max_client_delay", fix="give a share, such as 0.05")


def _check_arrivals(serving: Serving) -> None:
    arrivals, rates, is_poisson = serving.arrivals, serving.rates, Arrivals.poisson in serving.arrivals
    where = "task.serving.arrivals, task.serving.rates"
    if not arrivals or len(set(arrivals)) != len(arrivals):
        fix = f"name one or more of {', '.join(one.name for one in Arrivals)}, each once"
        raise ConfigError("no arrivals, or the same ones twice", where=where, fix=fix)
    if is_poisson != bool(rates):
        what = "a Poisson load without a rate" if is_poisson else "rates without a Poisson load"
        raise ConfigError(what, where=where, fix="give rates with poisson among the arrivals, as in rates=[1,2,4]")
    if any(not 0 < rate < float("inf") for rate in rates) or sorted(set(rates)) != list(rates):
        what = f"rates {', '.join(f'{rate:g}' for rate in rates)} do not rise from above 0"
        raise ConfigError(what, where=where, fix="list requests per second in rising order, each once")
    if is_poisson and serving.limits.latency_s is None:
        raise ConfigError(
            "a Poisson load without a limit of the latency",
            where="task.serving.limits.latency_s",
            fix="say how long a request may take: loadgen holds the 99th percentile against it",
        )


def _check_place(config: Config) -> None:
    cluster, tp = config.cluster, config.parallel.tp or 1
    if cluster.num_nodes > 1:
        what = f"{cluster.num_nodes} nodes, and a server is started on one"
        raise ConfigError(what, where="cluster.num_nodes", fix="set cluster.num_nodes=1")
    most = cluster.ranks_per_node if cluster.device is Device.cuda else 1
    if tp > most:
        what = f"tp {tp}, and a node has {most} GPUs" if cluster.device is Device.cuda else f"tp {tp} on a CPU"
        raise ConfigError(what, where="parallel.tp, cluster.ranks_per_node", fix=f"set parallel.tp to at most {most}")
    if (config.parallel.pp or 1) > 1 or (config.parallel.cp or 1) > 1:
        what = "a server is split by tensor parallelism alone"
        raise ConfigError(what, where="parallel.pp, parallel.cp", fix="set parallel.pp=1 parallel.cp=1")


def _check_lengths(config: Config) -> None:
    total, longest = total_tokens(required(config)), config.model.max_seq_length
    if total > longest:
        raise ConfigError(
            f"{total:,} tokens of a request and its answer, and {config.model.name} takes {longest:,}",
            where="task.serving.tokens_in, task.serving.tokens_out",
            fix=f"ask for {longest:,} together or fewer",
        )


def _check_started(config: Config, server: Server) -> None:
    """Refuse a server that cannot be started as asked."""
    words = _filled_in(server)
    if not server.argv or (unknown := words - set(FILLED_IN)) or not {"model", "port"} <= words:
        what = f"{{{min(unknown)}}} stands for nothing" if server.argv and unknown else "no {model} or no {port} in it"
        raise ConfigError(what, where=COMMAND, fix=BRACES)
    if "tp" not in words and (config.parallel.tp or 1) > 1:
        what = f"{server.name.name} is not started with a tensor parallelism"
        raise ConfigError(what, where="parallel.tp", fix="set parallel.tp=1, or choose another server=")
    if config.precision.name not in server.precisions:
        raise ConfigError(
            f"{server.name.name} is not started in {config.precision.name}",
            where="precision",
            fix=f"use one of {', '.join(server.precisions)}, or say how in {SERVER}.precisions",
        )
    if server.port is not None and not 1 <= server.port <= 65535:
        raise ConfigError(f"{server.port} is not a valid port", where=f"{SERVER}.port", fix="use 1 to 65535, or null")
    if model_folder(config) is None and config.model.weights is not Weights.random:
        what = "no folder of the model is named"
        fix = "export MODEL=…, a folder of Hugging Face's format, or set model.weights=random"
        raise ConfigError(what, where=f"{SERVER}.model, cluster.paths.model", fix=fix)


def _filled_in(server: Server) -> set[str]:
    """Return the words of the command line that stand for something; raises ConfigError for a brace that is alone."""
    asked = [*server.argv, *chain(*server.precisions.values()), *server.cpu_options, *server.options]
    try:
        return {field for word in asked for _, field, _, _ in string.Formatter().parse(word) if field}
    except ValueError as error:
        raise ConfigError(f"a brace in the command line: {error}", where=COMMAND, fix=BRACES) from error


def _check_elsewhere(server: Server) -> None:
    """Refuse a server elsewhere of which too little is known."""
    assert server.url is not None
    if not server.url.startswith(("http://", "https://")) or server.url.rstrip("/").endswith("/v1"):
        what = f"{server.url} is not the address of a server"
        raise ConfigError(what, where=f"{SERVER}.url", fix="write it as http://node7:8000, without /v1")
    if server.model is None or server.tokenizer is None:
        raise ConfigError(
            "nothing says what the server at this address calls its model, or where its tokenizer is",
            where=f"{SERVER}.model, {SERVER}.tokenizer",
            fix=f"set {SERVER}.model to its name there, and {SERVER}.tokenizer to a folder with tokenizer.json",
        )


def make(config: Config, base: Config | None) -> ServingPlan:
    """Return the plan of a run that loads a server."""
    return ServingPlan(
        **fields_of_all(config),
        world=replace(split(config, tp=1, pp=1, cp=1, sp=False), tp=config.parallel.tp or 1, dp=1),
        loads=loads(required(config)),
        base_dir=model_folder(config),
    )
