"""Profile the GPU time of a server while it decodes, before the timed loads.

The prompts of one load are sent at once. The profile begins when every request has its first token, or when the first
request is done, and ends a few tokens later, so that it has decode steps only if the server holds all requests at the
same time.
"""

import gzip
import json
import shutil
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

from bench.contract import mllog, run_files, server_times
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Device, ProfileKind
from bench.contract.server_times import ServerTimes
from bench.contract.serving import ServerProfile
from bench.errors import SubmitError
from jobs.profiles import server_trace
from jobs.serving.client import Client, Exchange
from jobs.serving.loadgen import Setting, require_alive
from jobs.serving.recorder import sitecustomize as recorder

NUM_TOKENS = 8
"""The profile ends when a request has received so many more tokens."""
POLL_S, WRITING_S, TRACE_S, STARTED_S = 0.02, 0.5, 600.0, 10.0
"""How often to look at answers and at files, how long to wait for traces, and for a process that records itself."""
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_requested(plan: ServingPlan) -> bool:
    return plan.config.launch.profile is ProfileKind.modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A profile, and the file of its trace."""

    times: ServerTimes
    kernels: list[dict[str, Any]]
    """Of the whole profile, the longest first."""
    trace: Path


def write(recorded: Recorded, log: mllog.Writer, folder: Path, trial: int) -> None:
    """Log the times of a profile, and keep its trace and its list of kernels in the run folder."""
    times, kept = server_times.plain(recorded.times), folder / run_files.trace(trial)
    if recorded.trace.suffix == ".gz":
        recorded.trace.replace(kept)
    else:
        with recorded.trace.open("rb") as plain, gzip.open(kept, "wb") as compressed:
            shutil.copyfileobj(plain, compressed)
    kernels = folder / run_files.module_times(trial)
    kernels.write_text(json.dumps({"times": times, "kernels": recorded.kernels}, indent=1, allow_nan=False) + "\n")
    for path in (kernels, kept):
        log.attach(path)
    log.event(mllog.SERVER_TIMES, times)


def record(plan: ServingPlan, setting: Setting, prompts: Iterable[str], folder: Path) -> Recorded:
    """Profile the server, and return its times.

    Raises:
        SubmitError: a request failed, the server has ended, or it wrote no trace of a GPU.
    """
    profile = setting.serving.server.profile
    assert profile is not None  # else the plan would have been refused
    with Client(setting.server.url, setting.body(), timeout_s=setting.serving.request_timeout_s) as client:
        exchanges = [setting.exchange(number, prompt, time.perf_counter()) for number, prompt in enumerate(prompts)]
        finished: list[Exchange] = []
        for exchange in exchanges:
            client.send(exchange, finished.append)
        while not finished and not all(exchange.parts for exchange in exchanges):
            _wait(setting)
        _start(profile, setting, folder)
        running = sum(bool(one.parts) for one in exchanges) - len(finished)
        before = [len(one.parts) for one in exchanges]
        while len(finished) < len(exchanges) and max(map(_received, exchanges, before)) < NUM_TOKENS:
            _wait(setting)
        _stop(profile, setting, folder)
        while len(finished) < len(exchanges):
            _wait(setting)
    for one in finished:
        if one.failure or one.http != 200:
            raise _error(
                f"a request failed while runstop profiled the server: {one.failure or f'HTTP {one.http}'}",
                setting.server.url,
            )
    chosen = server_trace.read([*folder.rglob("*.json.gz"), *folder.rglob("*.json")])
    if chosen is None:
        raise _error("the server wrote traces, but these traces have no compute kernel", str(folder))
    path, trace = chosen
    if plan.config.cluster.device is Device.cuda and trace.device != "cuda":
        raise _error("the server runs on a GPU, but its traces have no kernel of a GPU", str(folder))
    times = server_trace.server_times(trace, num_layers=plan.config.model.num_layers, running=running)
    return Recorded(times=times, kernels=server_trace.kernel_list(trace), trace=path)


def _received(exchange: Exchange, before: int) -> int:
    return len(exchange.parts) - before


def _wait(setting: Setting, for_s: float = POLL_S) -> None:
    require_alive(setting.server.child, "during the profile")
    time.sleep(for_s)


def _start(profile: ServerProfile, setting: Setting, folder: Path) -> None:
    if profile.has_endpoints:
        _post(f"{setting.server.url}/start_profile", timeout_s=TRACE_S)
        return
    (folder / recorder.START).touch()
    until_s = time.monotonic() + STARTED_S
    while not list(folder.glob(recorder.STARTED.format("*"))):
        _wait(setting)
        if time.monotonic() > until_s:
            raise _error("no process of the server has started torch.profiler", str(folder))


def _stop(profile: ServerProfile, setting: Setting, folder: Path) -> None:
    """End the profile, and wait until its traces are written."""
    if profile.has_endpoints:
        _post(f"{setting.server.url}/stop_profile", timeout_s=TRACE_S)
    else:
        (folder / recorder.STOP).touch()
    until_s, sizes = time.monotonic() + TRACE_S, dict[Path, int]()
    while not _is_written(profile, folder) or sizes != (sizes := _sizes(folder)):
        _wait(setting, WRITING_S)
        if time.monotonic() > until_s:
            raise _error(f"the server wrote no trace within {TRACE_S:g} s", str(folder))


def _is_written(profile: ServerProfile, folder: Path) -> bool:
    if profile.has_endpoints:
        return bool(_sizes(folder))
    started = len(list(folder.glob(recorder.STARTED.format("*"))))
    return len(list(folder.glob(recorder.TRACE.format("*")))) == started


def _sizes(folder: Path) -> dict[Path, int]:
    """Return the sizes of all traces; a server may still write them when it answers."""
    return {path: path.stat().st_size for path in (*folder.rglob("*.json.gz"), *folder.rglob("*.json"))}


def _post(url: str, *, timeout_s: float) -> None:
    try:
        with DIRECTLY.open(urllib.request.Request(url, method="POST"), timeout=timeout_s):
            pass
    except (URLError, OSError) as error:
        raise _error(f"the server refused {url}: {error}", url) from error


def _error(what: str, where: str) -> SubmitError:
    fix = "read the output of the server, rank_logs/trial_K.server.out, or set launch.profile=none"
    return SubmitError(what, where=where, fix=fix)
