"""Logs of serving tasks as a trial writes them, with made-up times."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.contract import codec, mllog
from bench.contract.plan_kinds import ServingPlan

Seconds = Sequence[float | None]


def write(
    plan: ServingPlan,
    path: Path,
    latency_s: Mapping[str, Seconds],
    *,
    server: str = "transformers",
    started: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    **changed: Any,
) -> Path:
    """Write the plan's first trial: every load with these latencies, None for a request that failed.

    The first token comes after a quarter of the latency. `started` replaces what the log says of the server, `changed`
    what a record says of its load.
    """
    serving = plan.config.task.serving
    assert serving is not None
    with mllog.Writer(path) as log:
        log.start(mllog.INIT_START)
        log.event(mllog.SUBMISSION_PLATFORM, "made up")
        log.event(mllog.SEED, plan.trials[0].seed)
        log.event(mllog.CONFIG_FILENAME, f"task/{plan.config.task.name}.yaml")
        names = [load.name for load in plan.loads]
        bound = serving.max_client_delay
        log.event(mllog.LOADS_REQUESTED, names, limits=codec.plain(serving.limits), max_client_delay=bound)
        about = {"model": "tiny", "weights": "random", "precision": "fp32", "tp": 1, "healthy_s": 9.5}
        log.event(mllog.SERVER, server, **about | dict(started or {}))
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        for load in plan.loads:
            if load.name not in without:
                log.event(mllog.LOAD_MEASURED, load.name, **_record(plan, load, latency_s[load.name]) | changed)
        log.finish(mllog.SUCCESS)
        log.event(mllog.SERVER_MEMORY, {mllog.NOT_MEASURED: "the server runs on CPUs"})
    return path


def _record(plan: ServingPlan, load: Any, latency_s: Seconds) -> dict[str, Any]:
    serving = plan.config.task.serving
    assert serving is not None
    about = codec.plain(load)
    about.pop("name")
    tokens = serving.tokens_out
    return about | {
        "requests": len(latency_s),
        "arrival_s": [n / (load.rate or float("inf")) for n in range(len(latency_s))],
        "latency_s": list(latency_s),
        "ttft_s": [None if one is None else one / 4 for one in latency_s],
        "tpot_s": [None if one is None else 0.75 * one / (tokens - 1) for one in latency_s],
        "tokens_in": [serving.tokens_in] * len(latency_s),
        "tokens_out": [None if one is None else tokens for one in latency_s],
        "status": ["timeout" if one is None else "ok" for one in latency_s],
        "details": [],
        "together": 0.0,
        "chunks_per_token": 1.0,
        "client": {"sent_p50_s": 0.001, "sent_p99_s": 0.001, "loop_p99_s": 0.002, "loadgen_mean_s": 0.0},
        "loadgen": {"result_validity": "VALID"},
    }
