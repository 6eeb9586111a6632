"""Prefetched transposes of weights: buffers of linears, and the order of streams and events, with fake streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.engines.megatron.linear_weights import PrefetchedTransposes
from jobs.engines.megatron.quantize import Quantized

SHAPES = {"a": (2, 3), "b": (4, 2), "c": (3, 3)}


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of streams and events in order."""
    noted: list[str] = []
    streams, events, empty = iter(["side"]), iter(["event 0", "event 1"]), torch.empty

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: noted.append(f"{name} waits for {other.name}"))

    def event() -> Any:
        name = next(events)
        return SimpleNamespace(
            record=lambda: noted.append(f"{name} recorded"), wait=lambda: noted.append(f"{name} awaited")
        )

    @contextmanager
    def on(own: Any) -> Iterator[None]:
        noted.append(f"on {own.name}")
        yield
        noted.append(f"off {own.name}")

    main = stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream(next(streams)))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **how: empty(*size, **how).fill_(255))
    return noted


def linears() -> dict[str, Any]:
    """Return linears whose weights are distinct one-byte values."""
    linears_by_name, start = {}, 0
    for name, (rows, columns) in SHAPES.items():
        linear: Any = torch.nn.Module()
        values = torch.arange(start, start + rows * columns, dtype=torch.int8).view(rows, columns)
        linear.weight, linear.quantized = values, Quantized(values, torch.tensor(float(start)))
        linears_by_name[name], start = linear, start + rows * columns
    return linears_by_name


def transposes(noted: list[str]) -> Any:
    def transpose(weight: Quantized, out: Tensor) -> Quantized:
        noted.append(f"transposed {weight.values.numel()}")
        out.copy_(weight.values.T.flatten().view(torch.uint8))
        return weight

    return transpose


START = ["side waits for main", "on side"]


def started(size: int, buffer: int) -> list[str]:
    return [*START, f"transposed {size}", f"event {buffer} recorded", "off side"]


def test_next_weight_is_transposed_while_the_previous_gemm_runs(did: list[str]) -> None:
    """Only the first transpose is waited for; each other one is in the other buffer when it is requested."""
    linears_by_name = linears()
    weights = PrefetchedTransposes([*linears_by_name.values()], transposes(did))
    expected = [
        [*started(6, 0), "event 0 awaited", *started(8, 1)],
        ["event 1 awaited", *started(9, 0)],
        ["event 0 awaited"],
    ]
    for (name, linear), steps in zip(linears_by_name.items(), expected, strict=True):
        did.clear()
        assert weights.forward(linear) is linear.quantized and did == []
        transposed = weights.backward(linear)
        assert torch.equal(transposed.values, linear.weight.T) and transposed.values.dtype is torch.int8, name
        assert transposed.scale is linear.quantized.scale and did == steps
    assert [buffer.numel() for buffer in weights.buffers] == [9, 9] and weights.linear_in_buffer == [None, None]


def test_other_order_gives_right_weights_without_prefetching(did: list[str]) -> None:
    linears_by_name = linears()
    weights = PrefetchedTransposes([*linears_by_name.values()], transposes(did))
    for name in ("b", "a", "c", "b", "c"):
        assert torch.equal(weights.backward(linears_by_name[name]).values, linears_by_name[name].weight.T), name


def test_prefetched_transposes_are_dropped_when_weights_change(did: list[str]) -> None:
    linears_by_name = linears()
    weights = PrefetchedTransposes([*linears_by_name.values()], transposes(did), stored=lambda linear: linear.other)
    for linear in linears_by_name.values():
        linear.other = Quantized(linear.weight + 1, None)
    weights.backward(linears_by_name["a"])
    assert weights.linear_in_buffer == [None, linears_by_name["b"]] and weights.next_buffer == 0
    linears_by_name["b"].other = Quantized(linears_by_name["b"].weight + 2, None)
    did.clear()
    weights.join()
    assert did == ["main waits for side"] and weights.linear_in_buffer == [None, None]
    assert torch.equal(weights.backward(linears_by_name["b"]).values, linears_by_name["b"].weight.T + 2)
