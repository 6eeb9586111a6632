"""Timing of calls on a GPU by events on its stream, with a fake device that records the order."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.kernels import timing

GPU = torch.device("cuda", 1)
MIB = 2**20


class Device:
    """A fake stream whose clock advances with its calls, while the host does not wait; it records all actions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
        self.now_s, self.seconds, self.events = 0.0, seconds, 0
        self.did: list[Any] = []
        cuda = {
            "Event": self.event,
            "synchronize": lambda device: self.did.append(("finished", device)),
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=50 * MIB),
            "_sleep": lambda cycles: self.spends(1.0, ("slept", cycles)),
        }
        for name, stand_in in cuda.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch, "empty", self.empty)
        host = SimpleNamespace(perf_counter=lambda: self.now_s, sleep=lambda s: self.did.append(("paused", s)))
        monkeypatch.setattr(timing, "time", host)

    def call(self) -> None:
        self.spends(next(self.seconds), "called")

    def spends(self, seconds: float, what: Any) -> None:
        self.now_s += seconds
        self.did.append(what)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        assert (dtype, device) == (torch.uint8, GPU)
        return SimpleNamespace(zero_=lambda: self.spends(1.0, ("zeroed", size)))

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        self.events += 1
        return Event(self, self.events - 1)


class Event:
    """The time of the stream when the event was recorded; times between two events are in milliseconds, as in torch."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def record(self) -> None:
        self.at_s = self.device.now_s

    def synchronize(self) -> None:
        self.device.did.append(("waited for", self.number))

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at_s - self.at_s)


def test_back_to_back_calls_are_timed_by_events_with_one_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, iter([0.25, 0.5, 1.0]))
    assert timing.time_back_to_back(device.call, 3, GPU) == [0.25, 0.5, 1.0]
    assert device.did == ["called"] * 3 + [("finished", GPU)] and device.events == 4


def test_cool_run_starts_on_an_idle_device_with_a_flushed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither flushing the cache nor the head start of the host is timed."""
    device = Device(monkeypatch, iter([0.25, 0.5]))
    assert timing.time_cool(device.call, 2, GPU) == [0.25, 0.5]
    before = [("finished", GPU), ("paused", 0.005), ("zeroed", 100 * MIB), ("slept", 400_000), "called"]
    assert device.did == [*before, ("waited for", 1), *before, ("waited for", 3)]


def test_host_is_at_most_two_stretches_ahead_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 1/64 s is one stretch; half a second has 8 stretches to heat up, and 16 that are timed."""
    device = Device(monkeypatch, iter([1 / 64] * (1 + 8) + [1 / 32] * 16))
    assert timing.time_sustained(device.call, 0.5, GPU) == [1 / 32] * 16
    waited = [step[1] for step in device.did if step[0] == "waited for"]
    hot, timed = 2, 2 + 9
    assert waited == [hot, *range(hot, hot + 7), timed, *range(timed, timed + 15)]
    assert device.did.count(("finished", GPU)) == 3 and device.did[-1] == ("finished", GPU)


def test_three_stretches_are_timed_on_a_device_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, iter([10.0] * 7))
    assert timing.time_sustained(device.call, 1.0, GPU) == [10.0] * 3


def test_a_stretch_has_as_many_short_calls_as_fill_a_fiftieth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a measured time of 0 counts as one microsecond."""
    device = Device(monkeypatch, iter([0.004, *[1.0] * (2 * 3 * 5)]))
    assert timing.time_sustained(device.call, 1.0, GPU) == pytest.approx([1.0] * 3)
    device = Device(monkeypatch, iter([0.0, *[1.0] * (2 * 3 * 20_000)]))
    assert timing.time_sustained(device.call, 1.0, GPU) == pytest.approx([1.0] * 3)
