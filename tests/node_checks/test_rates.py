"""Rates follow from measured seconds by hand arithmetic: torch's fake process group, and tensors without memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.contract.node_facts import AllReduceRate
from jobs.node_checks import rates

NUM_RANKS = 4


@pytest.fixture
def world() -> Iterator[None]:
    """Make this process rank 0 of 4, whose collectives return at once."""
    distributed.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


def every_call_takes(patch: pytest.MonkeyPatch, seconds: float) -> None:
    def median_s(call: Any, device: torch.device, *agree: Any) -> float:
        call()
        return seconds

    patch.setattr(rates, "_median_s", median_s)


@pytest.mark.long
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("ranks", "busbw_gbs"), [(None, 0.403), ([0, 1], 0.268)])
def test_bus_bandwidth_is_that_of_nccl_tests(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int] | None, busbw_gbs: float
) -> None:
    """64 MiB in 0.25 s are 0.2684 GB/s, times 2 (n - 1) / n: 1.5 for four ranks, and 1 for two."""
    every_call_takes(monkeypatch, 0.25)
    (rate,) = rates.allreduce([64], torch.device("cpu"), ranks)
    assert rate == AllReduceRate(64, ms=250.0, busbw_gbs=busbw_gbs)


@pytest.mark.usefixtures("world")
def test_messages_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds a message are 2 * 2 s * (3 + 2) repeats for one of twice the size, and 8 s are allowed for all."""
    every_call_takes(monkeypatch, 2.0)
    assert [rate.mib for rate in rates.allreduce([1, 2, 4], torch.device("cpu"))] == [1]
    every_call_takes(monkeypatch, 0.5)
    assert [rate.mib for rate in rates.allreduce([1, 2, 4], torch.device("cpu"))] == [1, 2, 4]


@pytest.mark.parametrize(
    ("device", "tflops", "copy_gbs"),
    [("cuda", 2 * 8192**3 * 20 / 4e12, 2 * 2**30 * 20 / 4e9), ("cpu", 2 * 1024**3 / 4e12, 2 * 2**26 / 4e9)],
)
def test_own_rates_count_the_operations_and_bytes_of_all_calls(
    monkeypatch: pytest.MonkeyPatch, device: str, tflops: float, copy_gbs: float
) -> None:
    """On a GPU 20 GEMMs of 8192, for which the floors of conf/cluster hold, and 20 copies of 1 GiB, in 4 s each."""
    monkeypatch.setattr(rates, "_median_s", lambda *_: 4.0)  # nothing runs on a GPU that is not there
    monkeypatch.setattr(rates, "slowest", lambda seconds, *_: seconds)
    with FakeTensorMode():
        assert rates.own_rates(torch.device(device)) == (round(tflops, 4), round(copy_gbs, 3))
