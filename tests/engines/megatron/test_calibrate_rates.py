"""The rates of a GPU from the times of fakes: copies, steps, kernels by kind, and all-reduces of its links."""

import contextlib
import datetime
import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract import plan_kinds
from bench.planning import compose
from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines import megatron
    from jobs.engines.megatron import calibrate, loop
    from jobs.kernels import timing
    from jobs.node_checks import rates

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the times of a GPU are not known")
GPU = torch.device("cuda", 1)
PLAN: Any = SimpleNamespace(batch=SimpleNamespace(global_batch_size=4))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is called of a fake torch.cuda."""
    names: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name in ("synchronize", "empty_cache", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: names.append(" ".join([name, *map(str, args)])))
    return names


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Callable[[Any], tuple[Any, Any]]:
    def built(plan: Any) -> tuple[Any, Any]:
        calls.append(f"built, cuda_graph {getattr(plan, 'cuda_graph', None)}")
        return lambda: calls.append("step"), object()

    monkeypatch.setattr(calibrate, "_built", built)
    return built


def test_copies_are_timed_on_the_gpu(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """A GiB is read and written in 2 s; 256 MiB come from pinned memory in the same time."""
    allocated, real = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: allocated.append((size, options)) or real(4))

    def times(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
        assert device == GPU
        call()
        calls.append(str(repeats))
        return [9.0, 2.0, 2.0, 1.0] if repeats == 12 else [100.0] * repeats

    monkeypatch.setattr(timing, "time_back_to_back", times)
    assert calibrate.copy_gbs() == 1.073741824
    assert calibrate.host_gbs() == 0.134217728
    assert calls == ["3", "12"] * 2
    on_gpu = {"dtype": torch.uint8, "device": torch.device("cuda", 0)}
    pinned, target = {"dtype": torch.uint8, "pin_memory": True}, {"dtype": torch.uint8, "device": "cuda"}
    assert allocated == [(2**30, on_gpu), (2**30, on_gpu), (2**28, pinned), (2**28, target)]


def test_a_point_has_its_step_and_its_kernels(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], step: Callable[[Any], Any]
) -> None:
    def sustained(call: Callable[[], Any], duration_s: float, device: torch.device) -> list[float]:
        assert (duration_s, device) == (2.2, GPU)
        call()
        return [0.5, 0.1, 0.2]

    @contextlib.contextmanager
    def profile(*, activities: list[Any]) -> Any:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        calls.append("profile")
        times = {"nvjet_tst_256x128": 6e6, "flash_fprop": 3e6, "flash_bprop": 1.5e6, "_norm": 9e6, "_transpose": 1e6}
        events = [SimpleNamespace(key=name, self_device_time_total=us) for name, us in times.items()]
        yield SimpleNamespace(key_averages=lambda: events)

    monkeypatch.setattr(timing, "time_sustained", sustained)
    monkeypatch.setattr(torch.profiler, "profile", profile)
    times = {"gemm_s": 2.0, "attention_forward_s": 1.0, "attention_backward_s": 0.5, "elementwise_s": 3.0}
    assert calibrate.measure(PLAN) == {"step_s": 0.2, "n": 3} | times
    built = "built, cuda_graph None"
    assert calls == [built, "step", "profile", "step", "step", "step", "synchronize", "empty_cache"]


def test_launches_are_timed_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], step: Callable[[Any], Any]
) -> None:
    """The first five of ten steps do not count; step n takes n seconds."""
    replaced = SimpleNamespace(replace=lambda _plan, cuda_graph: SimpleNamespace(cuda_graph=cuda_graph))
    monkeypatch.setattr(calibrate, "dataclasses", replaced)
    clock = itertools.accumulate(itertools.chain.from_iterable((100, n) for n in range(1, 11)))
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert calibrate.measure_launches(PLAN) == {"step_s": 8, "n": 5}
    assert calls == ["built, cuda_graph False", *["step", "synchronize"] * 10, "empty_cache"]


def test_a_step_trains_a_whole_batch_without_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.data import rows

    updates: list[Any] = []
    engine = SimpleNamespace(parts="parts")
    monkeypatch.setattr(megatron, "build", lambda plan, seed: engine if (plan, seed) == (PLAN, 1) else None)
    monkeypatch.setattr(rows, "synthetic", lambda plan: "rows")
    monkeypatch.setattr(loop, "update", lambda *args, lr: updates.append((*args[:2], args[2].tolist(), lr)))
    step, built = calibrate._built(PLAN)
    assert built is engine and updates == [("parts", "rows", [0, 1, 2, 3], 0.0)] * 2, "two steps that are not timed"
    step()
    assert len(updates) == 3


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_the_result_has_all_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local", "cluster.ranks_per_node=1"])
    order: list[Any] = []
    for name in ("copy_gbs", "host_gbs"):
        monkeypatch.setattr(calibrate, name, lambda name=name: {"copy_gbs": 4.0, "host_gbs": 0.5}[name])
    for name in ("measure", "measure_launches"):
        monkeypatch.setattr(calibrate, name, lambda given, name=name: order.append(name) or {"is_plan": given == plan})
    monkeypatch.setattr(calibrate, "link_rates", lambda count: {"busbw_gbs": {"16": count}})
    monkeypatch.setattr(megatron, "start_ranks", lambda given, rank: order.append((given == plan, rank)))
    monkeypatch.setattr(megatron, "end_ranks", lambda: order.append("end"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    clock = iter([10.0, 13.25, 20.0, 20.06])
    points, result = tmp_path / "plans.json", tmp_path / "result.json"
    points.write_text(json.dumps(dict.fromkeys(("bf16 1024", "launch 2"), json.loads(plan_kinds.dumps(plan)))))
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with warnings.catch_warnings():
        calibrate.main([str(points), str(result)])
        assert warnings.filters[0][0] == "ignore"
    assert capsys.readouterr() == ("", "bf16 1024: 3.2 s\nlaunch 2: 0.1 s\n")
    expected = {"torch": torch.__version__, "cuda": torch.version.cuda, "copy_gbs": 4.0, "host_gbs": 0.5}
    expected["points"] = dict.fromkeys(("bf16 1024", "launch 2"), {"is_plan": True})
    if count > 1:
        expected["busbw_gbs"] = {"16": 2}
    text = result.read_text()
    assert json.loads(text) == expected and text.startswith('{\n "torch"')
    (is_plan, rank), *others = order
    assert is_plan and (rank.rank, rank.local_rank, rank.world_size, rank.master_addr) == (0, 0, 1, "127.0.0.1")
    assert 1024 <= rank.master_port <= 65535 and others == ["measure", "measure_launches", "end"]


class Queue(list):
    put, get = list.append, list.pop


@pytest.mark.parametrize(
    ("device", "backend", "sizes"), [("cuda", "nccl", (16, 64, 256, 1024)), ("cpu", "gloo", (16,))]
)
def test_all_reduces_of_each_size(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], device: str, backend: str, sizes: tuple[int, ...]
) -> None:
    """Only rank 0 puts the rates."""
    groups: list[Any] = []
    timeout = datetime.timedelta(seconds=rates.MEETING_S)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **options: groups.append((name, options)))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: groups.append("destroyed"))

    def allreduce(sizes_mib: tuple[int, ...], own: torch.device) -> tuple[rates.AllReduceRate, ...]:
        assert own == (torch.device("cuda", len(groups) // 2) if device == "cuda" else torch.device("cpu"))
        return tuple(rates.AllReduceRate(mib, ms=1.0, busbw_gbs=mib / 2) for mib in sizes_mib)

    monkeypatch.setattr(rates, "allreduce", allreduce)
    result: Any = Queue()
    for rank in range(2):
        calibrate._reduce(rank, 2, 29500, device, result)
    assert result == [{mib: mib / 2 for mib in sizes}]
    shared = {"init_method": "tcp://127.0.0.1:29500", "timeout": timeout, "world_size": 2}
    assert groups == [(backend, shared | {"rank": 0}), "destroyed", (backend, shared | {"rank": 1}), "destroyed"]
    assert calls == (["set_device cuda:0", "set_device cuda:1"] if device == "cuda" else [])


def test_a_failure_of_links_has_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import multiprocessing
    from torch.multiprocessing.spawn import ProcessRaisedException

    def spawned(function: Any, args: tuple[Any, ...], nprocs: int) -> None:
        assert function is calibrate._reduce and (args[0], args[2], nprocs) == (4, "cuda", 4)
        assert 1024 <= args[1] <= 65535
        args[3].put({16: 250.0})

    context = SimpleNamespace(SimpleQueue=Queue)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: {"spawn": context}[method])
    monkeypatch.setattr(multiprocessing, "spawn", spawned)
    assert calibrate.link_rates(4) == {"busbw_gbs": {16: 250.0}}

    def failed(*_: Any, **__: Any) -> None:
        raise ProcessRaisedException("Traceback\n  ...\nncclSystemError: no path\n", 0, 1)

    monkeypatch.setattr(multiprocessing, "spawn", failed)
    assert calibrate.link_rates(4) == {"link_error": "ncclSystemError: no path"}
