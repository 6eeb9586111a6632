"""Profile some steps on rank 0, and write the results."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from bench.contract import modules as names
from bench.contract.modules import Part
from bench.errors import ConfigError
from jobs.profiles import Profile, ranges, table, trace

NUM_STEPS = 3
"""Number of profiled steps. The first one only defines the start of the second."""


def record(
    step: Callable[[], object],
    profile: Profile,
    *,
    modules: Iterable[tuple[torch.nn.Module, Part]] = (),
    is_eager: bool = False,
) -> None:
    """Run some steps without synchronization in between; rank 0 profiles them and writes their table and trace.

    modules: the modules whose forward pass does not open ranges itself.
    """
    if torch.distributed.get_rank() == 0:
        _record(step, profile, modules=modules, is_eager=is_eager)
    else:
        for _ in range(NUM_STEPS):
            step()
    torch.distributed.barrier()  # the other ranks wait for rank 0 here, not in the first timed step


def _record(
    step: Callable[[], object],
    profile: Profile,
    *,
    modules: Iterable[tuple[torch.nn.Module, Part]],
    is_eager: bool,
) -> None:
    on_gpu, modules = torch.cuda.is_available(), list(modules)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler, ranges.enabled(modules):
        for _ in range(NUM_STEPS):
            with ranges.step():
                step()
        if on_gpu:
            torch.cuda.synchronize()
    num_layers = sum(part is Part.residual for _, part in modules) or None  # this is the part of a layer itself
    profile.trace.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(profile.trace))
    profiled = trace.read(profile.trace)
    require_kernels(profiled, on_gpu=on_gpu)
    times, kernels = table.module_times(profiled, is_eager=is_eager, num_layers=num_layers)
    content = {"times": names.plain(times), "kernels": kernels}
    profile.modules.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def require_kernels(profiled: trace.Trace, *, on_gpu: bool) -> None:
    """Check that the profile of a GPU contains kernels.

    Raises:
        ConfigError: CUPTI recorded no kernel; the table would show times of the host as times of the GPU.
    """
    if on_gpu and profiled.device == "cpu":
        raise ConfigError(
            "torch.profiler recorded no kernel of this GPU, so the time of each module is not known",
            where="launch.profile=modules; CUPTI",
            fix="end other profilers on this GPU (dcgm, nsys), permit profiling (driver option "
            "NVreg_RestrictProfilingToAdminUsers=0, CAP_SYS_ADMIN in a container), or remove launch.profile",
        )


@contextmanager
def profile_kernels(path: Path | None) -> Iterator[None]:
    """Profile the block on rank 0, and write its kernels to the path, longest first; None: nothing is profiled."""
    if path is None or torch.distributed.get_rank() != 0:
        yield
        return
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    path.write_text(profiler.key_averages().table(sort_by=sort_by, row_limit=-1, max_name_column_width=120) + "\n")
