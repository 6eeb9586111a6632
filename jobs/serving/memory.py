"""Measure the GPU memory of a server through NVML: on its fullest GPU, before the start and at the peak."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from bench.contract.mllog import NOT_MEASURED
from bench.contract.schema import Config, Device

EVERY_S, GIB = 0.5, 2**30


@contextmanager
def measured(config: Config) -> Iterator[dict[str, Any]]:
    """Yield a record that contains {before, peak} in GiB at the end of the block, or why it was not measured."""
    record: dict[str, Any] = {}
    reason = _why_not(config)
    if reason:
        record[NOT_MEASURED] = reason
        yield record
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = handles_of(pynvml, config.parallel.tp or 1)
        record |= {"before": _used_gib(pynvml, handles), "peak": 0.0}
    except pynvml.NVMLError as error:
        record[NOT_MEASURED] = f"NVML: {error}"
        yield record
        return
    done = threading.Event()

    def sample() -> None:
        while not done.wait(EVERY_S):
            with suppress(pynvml.NVMLError):
                record["peak"] = max(record["peak"], _used_gib(pynvml, handles))

    thread = threading.Thread(target=sample, name="gpu memory", daemon=True)
    thread.start()
    try:
        yield record
    finally:
        done.set()
        thread.join()


def handles_of(nvml: Any, count: int, env: Mapping[str, str] = os.environ) -> list[Any]:
    """Return NVML's handles of the first visible GPUs. NVML itself ignores CUDA_VISIBLE_DEVICES."""
    visible = [gpu.strip() for gpu in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)
        for gpu in (visible or [str(number) for number in range(count)])[:count]
    ]


def _why_not(config: Config) -> str:
    if config.task.serving is not None and config.task.serving.server.url is not None:
        return "the server runs elsewhere"
    if config.cluster.device is not Device.cuda:
        return "the server runs on CPUs"
    try:
        import pynvml  # noqa: F401 - checks that it is installed
    except ImportError:
        return "pip install nvidia-ml-py"
    return ""


def _used_gib(nvml: Any, handles: list[Any]) -> float:
    used: float = max(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / GIB
    return used
