"""Measure the rates of this machine's first GPU, and of its links to the others, for `runstop calibrate`.

    python -m jobs.engines.megatron.calibrate PLANS RESULT

PLANS is a list of training plans of small synthetic models, one point of the sweep each. All run in this process, one
after the other: each trains until the GPU is hot, then a profile of some steps gives the time of its kernels by kind.
RESULT gets the times of each point, the bandwidth of copies and, with several GPUs, of all-reduces, as JSON.
"""

import dataclasses
import datetime
import gc
import json
import re
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from jobs.ranks.identity import Rank

HEAT_S = 2.2
"""A point is timed for so long, after a quarter of this time untimed: the GPU then runs at its power limit."""
PROFILED_STEPS = 3
COPY_BYTES, COPIES = 2**30, 12
REDUCED_MIB = (16, 64, 256, 1024)
LAUNCH_STEPS = 5
GIB = 2**30

_BACKWARD = re.compile(r"bprop|bwd|backward|dot_do_o|dgrad|convert_dq", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|mha_", re.IGNORECASE)
_ADAPTER = re.compile(r"^_(down|down_backward|add_down_gradient)$")
"""Kernels of adapters: they read activations once, so they are as fast as the memory."""
_OVERLAPPED = re.compile(r"^_transpose$")
"""Transposes of FP8 weights run on another stream at the same time as GEMMs, whose measured rate includes them."""
_COPY = re.compile(r"HtoD|DtoH|PtoP")


def main(argv: list[str]) -> None:
    plans_file, result_file = map(Path, argv)
    points = json.loads(plans_file.read_text())
    import torch

    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gbs": copy_gbs(),
        "host_gbs": host_gbs(),
        "points": {},
    }
    from jobs.engines import megatron

    warnings.simplefilter("ignore")  # megatron-core warns once per model
    plans = {name: plan_kinds.required(plan_kinds.loads(json.dumps(x)), TrainingPlan) for name, x in points.items()}
    megatron.start_ranks(next(iter(plans.values())), Rank(0, 0, 1, "127.0.0.1", free_port()))
    for name, plan in plans.items():
        started_s = time.monotonic()
        result["points"][name] = measure_launches(plan) if name.startswith("launch") else measure(plan)
        print(f"{name}: {time.monotonic() - started_s:.1f} s", file=sys.stderr, flush=True)
    megatron.end_ranks()
    if torch.cuda.device_count() > 1:
        result |= link_rates(torch.cuda.device_count())
    result_file.write_text(json.dumps(result, indent=1))


def measure(plan: TrainingPlan) -> dict[str, Any]:
    """Return the seconds of a step of a point: of the whole step, and of its kernels by kind."""
    import torch
    from torch.profiler import ProfilerActivity

    from jobs.kernels import timing

    step, engine = _built(plan)
    times = timing.time_sustained(step, HEAT_S, torch.device("cuda", torch.cuda.current_device()))
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [(event.key, event.self_device_time_total / 1e6) for event in profiler.key_averages()]
    del step, engine
    _free()
    by_kind = {f"{kind}_s": seconds / PROFILED_STEPS for kind, seconds in seconds_by_kind(kernels).items()}
    return {"step_s": statistics.median(times), "n": len(times), **by_kind}


def seconds_by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of kernels by kind: gemm, attention_forward, attention_backward, elementwise."""
    from jobs.profiles.trace import Kind, kind_of

    seconds = dict.fromkeys(("gemm", "attention_forward", "attention_backward", "elementwise"), 0.0)
    for name, duration_s in kernels:
        kind = kind_of(name)
        if _OVERLAPPED.search(name) or _COPY.search(name) or kind is Kind.communication:
            continue
        if _ATTENTION.search(name):
            seconds["attention_backward" if _BACKWARD.search(name) else "attention_forward"] += duration_s
        elif kind is Kind.gemm and not _ADAPTER.search(name):
            seconds["gemm"] += duration_s
        else:
            seconds["elementwise"] += duration_s
    return seconds


def measure_launches(plan: TrainingPlan) -> dict[str, Any]:
    """Return the seconds of a step whose kernels are shorter than their launches: those of the host."""
    import torch

    step, engine = _built(dataclasses.replace(plan, cuda_graph=False))
    times = []
    for _ in range(2 * LAUNCH_STEPS):
        begun_s = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun_s)
    del step, engine
    _free()
    return {"step_s": statistics.median(times[LAUNCH_STEPS:]), "n": LAUNCH_STEPS}


def _built(plan: TrainingPlan) -> tuple[Any, Any]:
    """Return a function that trains one step on synthetic rows, after two of them, and the engine."""
    import numpy as np

    from jobs.data import rows as rows_of
    from jobs.engines import megatron
    from jobs.engines.megatron import loop

    engine = megatron.build(plan, 1)
    rows, indices = rows_of.synthetic(plan), np.arange(plan.batch.global_batch_size)

    def step() -> None:
        loop.update(engine.parts, rows, indices, lr=0.0)

    for _ in range(2):
        step()
    return step, engine


def _free() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def copy_gbs() -> float:
    """Return the bandwidth of copies inside the GPU's memory: 1e9 bytes/s, read plus written."""
    import torch

    device = torch.device("cuda", 0)
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPY_BYTES / _median_s(lambda: target.copy_(source)) / 1e9


def host_gbs() -> float:
    """Return the bandwidth of copies from pinned host memory to the GPU, in 1e9 bytes/s."""
    import torch

    size = COPY_BYTES // 4
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return size / _median_s(lambda: target.copy_(source, non_blocking=True)) / 1e9


def _median_s(call: Any) -> float:
    import torch

    from jobs.kernels import timing

    device = torch.device("cuda", torch.cuda.current_device())
    timing.time_back_to_back(call, 3, device)
    return statistics.median(timing.time_back_to_back(call, COPIES, device))


def link_rates(count: int, device: str = "cuda") -> dict[str, Any]:
    """Return busbw_gbs, the bus bandwidth in 1e9 bytes/s of all-reduces over all GPUs by size in MiB.

    Its processes may fail, for example because NCCL finds no path between two GPUs: then the result is link_error, and
    the rates of the GPU itself are kept.
    """
    from torch import multiprocessing
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    result = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        multiprocessing.spawn(_reduce, args=(count, free_port(), device, result), nprocs=count)  # type: ignore[attr-defined, no-untyped-call]
    except (ProcessRaisedException, ProcessExitedException) as error:
        return {"link_error": str(error).strip().splitlines()[-1]}
    return {"busbw_gbs": result.get()}


def _reduce(rank: int, count: int, port: int, device: str, result: Any) -> None:
    """Measure all-reduces as one of `count` processes, each with its own GPU, and put the rates of rank 0."""
    import torch
    from torch import distributed

    from jobs.node_checks import rates

    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    distributed.init_process_group(
        "nccl" if own.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        timeout=datetime.timedelta(seconds=rates.MEETING_S),
        rank=rank,
        world_size=count,
    )
    measured = rates.allreduce(REDUCED_MIB if own.type == "cuda" else REDUCED_MIB[:1], own)
    if rank == 0:
        result.put({rate.mib: rate.busbw_gbs for rate in measured})
    distributed.destroy_process_group()


def free_port() -> int:
    """Return a port of this machine that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main(sys.argv[1:])
