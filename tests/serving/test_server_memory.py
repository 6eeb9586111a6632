"""The GPU memory of a server: of the fullest of the GPUs that it sees, or why it is not known."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.contract.schema import Device
from helpers import serving
from jobs.serving import memory

GIB = 2**30


class FakeError(Exception):
    pass


def test_the_fullest_gpu_that_the_server_sees_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES shows GPUs 5 and one by its UUID: NVML counts on, as if it were not set."""
    used = {5: 1 * GIB, "GPU-7": 2 * GIB}
    fake = SimpleNamespace(
        NVMLError=FakeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle]),
    )
    config = serving.planned().config  # on this machine, which has no GPU
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7,3")
    monkeypatch.setattr(memory, "EVERY_S", 0.001)
    config = replace(
        config, cluster=replace(config.cluster, device=Device.cuda), parallel=replace(config.parallel, tp=2)
    )
    with memory.measured(config) as record:
        used[5] = 70 * GIB
        while record["peak"] < 70:
            time.sleep(0.001)
        used[5] = 0
    assert record == {"before": 2, "peak": 70}


def test_a_server_on_cpus_has_a_reason_in_its_place() -> None:
    with memory.measured(serving.planned().config) as record:
        pass
    assert record == {"not_measured": "the server runs on CPUs"}
