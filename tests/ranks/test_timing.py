"""GPU memory: allocations counted by torch, and memory pools of CUDA graphs."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.ranks import timing

GIB = 2**30


def segment(total_gib: float, allocated_gib: float, pool: tuple[int, int]) -> dict[str, object]:
    """As torch.cuda.memory_snapshot() describes it; the default pool, outside of graphs, is (0, 0)."""
    return {
        "total_size": int(total_gib * GIB),
        "allocated_size": int(allocated_gib * GIB),
        "segment_pool_id": pool,
        "blocks": [],
    }


@pytest.mark.parametrize(("reserved_gib", "peak_gib"), [(14.75, 14.5), (14.25, 14.25)])
def test_graph_pools_count_as_allocated(monkeypatch: pytest.MonkeyPatch, reserved_gib: float, peak_gib: float) -> None:
    """13.5 GiB of tensors, and 1 GiB of a graph's memory without tensors; but never more than what is reserved."""
    segments = [segment(13.5, 13.0, (0, 0)), segment(0.75, 0.0, (0, 1)), segment(0.5, 0.25, (0, 1))]
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: segments)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda gpu: int(13.5 * GIB))
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda gpu: int(reserved_gib * GIB))
    assert timing.peaks_gib() == (peak_gib, reserved_gib)


def test_the_fullest_of_several_gpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.memory_snapshot", list)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda gpu: [3, 7, 90][gpu] * GIB)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda gpu: [9, 8, 95][gpu] * GIB)
    assert timing.peaks_gib(2) == (7, 9)


def test_a_step_on_a_gpu_takes_the_time_between_two_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has it in milliseconds. What the host waits for, and where peaks begin, follow the GPUs of the rank."""
    done: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            done.append(enable_timing)

        def record(self) -> None:
            done.append("recorded")

        def elapsed_time(self, end: "Event") -> float:
            return 250.0

    assert isinstance(timing.now(), float) and timing.seconds(1.0, 1.5) == 0.5
    timing.forget_memory()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: done.append("finished"))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", done.append)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: done.append("read") or 7.0))
    start = timing.now()
    assert timing.seconds(start, timing.now()) == 0.25 and done == [True, "recorded"] * 2
    assert timing.device_time_s() == 7.0 and done[4:] == ["finished", "read"]
    timing.forget_memory()
    timing.forget_memory(3)
    assert done[6:] == [None, 0, 1, 2]


def test_the_largest_peak_of_all_ranks_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(config=None, memory=SimpleNamespace(total_gib=12.5))
    logged: list[Any] = []
    log: Any = SimpleNamespace(event=lambda key, value: logged.append((key, value)))
    timing.log_memory(plan, log)
    assert logged == [], "there is no GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: "cpu")
    monkeypatch.setattr(timing.plans, "gpus_per_rank", lambda config: 2)
    monkeypatch.setattr(timing, "peaks_gib", lambda num_gpus: (float(num_gpus), 9.0))

    def all_reduce(peaks: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX and peaks.tolist() == [2.0, 9.0] and peaks.dtype is torch.float64
        peaks[0] = 8.0

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    timing.log_memory(plan, log)
    assert logged == [("peak_memory_gib", {"allocated": 8.0, "reserved": 9.0, "estimated": 12.5})]


@pytest.mark.long
def test_settle_freezes_existing_objects() -> None:
    gc.unfreeze()
    timing.settle()
    assert gc.get_freeze_count() > 1000 and gc.isenabled()
    gc.unfreeze()
