"""Profile some steps on rank 0, and write what they show."""

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
"""The first one only says where the second begins."""


def record(
    step: Callable[[], object],
    profile: Profile,
    *,
    modules: Iterable[tuple[torch.nn.Module, Part]] = (),
    is_eager: bool = False,
) -> None:
    """Make some steps without waiting in between, and let rank 0 write their table and their trace.

    modules: those whose forward pass has no ranges of its own.
    """
    if torch.distributed.get_rank() == 0:
        _record(step, profile, modules=modules, is_eager=is_eager)
    else:
        for _ in range(NUM_STEPS):
            step()
    torch.distributed.barrier()  # the others wait here while rank 0 writes, and not in the first timed step


def _record(
    step: Callable[[], object],
    profile: Profile,
    *,
    modules: Iterable[tuple[torch.nn.Module, Part]],
    is_eager: bool,
) -> None:
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler, ranges.switched_on(modules):
        for _ in range(NUM_STEPS):
            with ranges.step():
                step()
        if on_gpu:
            torch.cuda.synchronize()
    profile.trace.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(profile.trace))
    found = trace.read(profile.trace)
    require_kernels(found, on_gpu=on_gpu)
    times, kernels = table.module_times(found, is_eager=is_eager)
    content = {"times": names.plain(times), "kernels": kernels}
    profile.modules.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def require_kernels(found: trace.Trace, *, on_gpu: bool) -> None:
    """Do nothing if the profile of a GPU has its kernels, or if there is no GPU.

    Raises:
        ConfigError: CUPTI recorded none, so that operations of the host would be taken for the GPU's time.
    """
    if on_gpu and found.device == "cpu":
        raise ConfigError(
            "torch.profiler recorded no kernel of this GPU, so that nothing says where its time goes",
            where="launch.profile=modules; CUPTI",
            fix="end other profilers on this GPU (dcgm, nsys); let users profile (the driver's option "
            "NVreg_RestrictProfilingToAdminUsers=0, CAP_SYS_ADMIN in a container); or leave out launch.profile",
        )


@contextmanager
def kernels_to(path: Path | None) -> Iterator[None]:
    """Let rank 0 profile the block, and write its kernels to the path, longest first; None: nothing is profiled."""
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
