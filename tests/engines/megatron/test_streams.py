"""What copies and kernels of other streams wait for: on a GPU a missing wait reads memory too early."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers import ranks, without_cuda

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import cpu_patch
    from jobs.engines.megatron.adam import offload as adam_offload
    from jobs.engines.megatron.adam.update import Moments
    from jobs.engines.megatron.linear_weights import DequantizedWeights, PrefetchedTransposes
    from jobs.engines.megatron.offload import HostActivations
    from jobs.engines.megatron.quantize import Quantized

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the streams are fakes")


class Streams(TorchFunctionMode):
    """A fake of torch.cuda and torch.cpu. `log` has what streams do: wait for a stream or an event, record, copy."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.current = self._stream("main")
        self.num_streams = self.num_events = 0

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def Stream(self) -> SimpleNamespace:
        self.num_streams += 1
        return self._stream(f"stream {self.num_streams}")

    def Event(self) -> SimpleNamespace:
        self.num_events += 1
        name = f"event {self.num_events}"
        record, wait = (lambda verb=verb: self.does(f"{verb} {name}") for verb in ("records", "waits for"))
        return SimpleNamespace(record=record, wait=wait)

    def does(self, what: str) -> None:
        self.log.append(f"{self.current.name} {what}")

    def current_stream(self) -> SimpleNamespace:
        return self.current

    @contextmanager
    def stream(self, one: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, one
        yield
        self.current = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.does("copies")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    fake = Streams()
    for name in ("Stream", "Event", "current_stream", "stream"):
        for library in (torch.cuda, torch.cpu):
            monkeypatch.setattr(library, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with fake:
        yield fake


def test_moments_of_the_next_piece_do_not_overtake_a_buffers_last_copy(streams: Streams) -> None:
    """Stream 1 copies in, stream 2 copies out; events 1 and 2 are the ends of the copies out of each buffer."""
    pieces = []
    for index, length in enumerate((3, 5, 4)):
        moments = Moments(torch.full((length,), 1.0 * index), torch.full((length,), 10.0 * index))
        pieces.append(adam_offload.Piece(SimpleNamespace(grad=torch.zeros(length)), moments))

    def update(shard: Any, moments: Moments) -> None:
        assert len(moments.exp_avg) == len(moments.exp_avg_sq) == len(shard.grad)
        streams.does(f"updates {len(shard.grad)}")
        moments.exp_avg.add_(1)
        moments.exp_avg_sq.mul_(2)

    adam_offload.MomentStreamer(pieces).update(pieces, update)
    expected = [
        [
            *(f"stream 1 waits for event {buffer}", "stream 1 copies", "stream 1 copies", "main waits for stream 1"),
            *(f"main updates {length}", "stream 2 waits for main", "stream 2 copies", "stream 2 copies"),
            f"stream 2 records event {buffer}",
        ]
        for buffer, length in ((1, 3), (2, 5), (1, 4))
    ]
    assert streams.log == sum(expected, [])
    for index, piece in enumerate(pieces):
        assert (piece.moments.exp_avg == index + 1).all() and (piece.moments.exp_avg_sq == 20 * index).all()


def test_activations_are_copied_when_they_are_complete(streams: Streams) -> None:
    """Stream 1 copies to the host, stream 2 back; device memory is freed after the copy that reads it."""
    host = HostActivations(torch.device("cpu"))
    first = host.offload((torch.ones(2), torch.zeros(3)))
    second = host.offload((torch.ones(4),))
    assert host.latest is second
    host.prefetch(first)
    host.prefetch(first)
    host.prefetch(None)
    assert host.pop(first)[0].tolist() == [1, 1] and first.on_host is first.on_device is None
    host.prefetch(first)
    assert host.pop(second)[0].tolist() == [1] * 4
    assert streams.log == [
        *("stream 1 waits for main", "stream 1 copies", "stream 1 copies", "stream 1 records event 1"),
        *("main waits for event 1", "stream 1 waits for main", "stream 1 copies", "stream 1 records event 2"),
        *("main waits for event 2", "stream 2 waits for main", "stream 2 waits for event 1"),
        *("stream 2 copies", "stream 2 copies", "stream 2 records event 3", "main waits for event 3"),
        *("stream 2 waits for main", "stream 2 waits for event 2", "stream 2 copies", "stream 2 records event 4"),
        "main waits for event 4",
    ]


class Frozen(torch.nn.Module):
    """A linear with two outputs and three inputs in 4 bits, as `DequantizedWeights` reads it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.shape, self.nf4 = (2, 3), SimpleNamespace(absmax=torch.tensor(value))


def test_the_weight_that_followed_the_last_time_is_dequantised_early(streams: Streams) -> None:
    a, b, c = (Frozen(value) for value in (1.0, 2.0, 3.0))

    def dequantize(weight: Any, out: Tensor) -> Tensor:
        streams.does(f"dequantises {int(weight.absmax)}")
        return out.fill_(weight.absmax)

    weights = DequantizedWeights([a, b, c], dequantize)  # type: ignore[list-item,arg-type]
    for expected in (
        ["dequantises 1", 1, "dequantises 2", 2, "dequantises 3", 3, 2, "dequantises 1", 1],
        [1, "dequantises 3", 2, 3, "dequantises 1", 2, 1],
    ):
        streams.log.clear()
        got: list[Any] = []
        for linear, is_forward in ((a, True), (b, True), (c, True), (b, False), (a, False)):
            begin = len(streams.log)
            values = (weights.forward if is_forward else weights.backward)(linear).values
            assert tuple(values.shape) == ((2, 3) if is_forward else (3, 2)) and values.unique().numel() == 1
            got += [x.removeprefix("stream 1 ") for x in streams.log[begin:] if "dequantises" in x]
            got.append(int(values[0, 0]))
        assert got == expected
    into_other = ("stream 1 waits for main", "stream 1 dequantises {}", "stream 1 records event 2")
    assert streams.log == [
        *("main waits for event 2", "main waits for event 1", *(x.format(3) for x in into_other)),
        *("main waits for event 2", "main waits for event 1", *(x.format(1) for x in into_other)),
        "main waits for event 2",
    ]
    streams.log.clear()
    weights.join()
    assert streams.log == ["main waits for stream 1"] and weights.absmax_of_buffer == [None, None]


class Stored(torch.nn.Module):
    """A linear whose weight is in FP8, as `PrefetchedTransposes` reads it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.full((2, 3), number, dtype=torch.uint8)
        self.quantized = Quantized(self.weight, torch.tensor([float(number)]))


def test_the_weight_of_the_next_linear_is_transposed_early(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers alternate; another order costs a transpose that is waited for."""
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: real(size, dtype=dtype))
    linears = [Stored(number) for number in (1, 2, 3)]

    def transpose(weight: Quantized, out: Tensor) -> None:
        streams.does(f"transposes {int(weight.scale)}")
        out.copy_(weight.values.T.flatten())

    weights = PrefetchedTransposes(linears, transpose)  # type: ignore[arg-type]
    assert weights.forward(linears[0]) is linears[0].quantized
    for linear in (*linears, linears[1]):
        got = weights.backward(linear)
        assert torch.equal(got.values, linear.weight.T) and got.scale is linear.quantized.scale

    def start(number: int, event: int) -> list[str]:
        what = ("waits for main", f"transposes {number}", "copies", f"records event {event}")
        return [f"stream 1 {one}" for one in what]

    assert streams.log == [
        *(*start(1, 1), "main waits for event 1", *start(2, 2), "main waits for event 2", *start(3, 1)),
        *("main waits for event 1", *start(2, 2), "main waits for event 2", *start(3, 1)),
    ]
    streams.log.clear()
    weights.join()
    assert streams.log == ["main waits for stream 1"] and weights.linear_in_buffer == [None, None]


def test_without_cuda_its_devices_are_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core asks for "cuda", its number and pinned memory; its random states are those of the CPU."""
    without_cuda.prepare(monkeypatch)
    cpu_patch.install()
    for created in (
        *(torch.zeros(2, device="cuda", pin_memory=True), torch.ones(2, device=torch.device("cuda", 0))),
        *(torch.tensor([1, 2], device=torch.cuda.current_device()), torch.full((2,), 3, device="cuda:1")),
        *(torch.arange(2, device="cuda"), torch.empty(2, pin_memory=True).cuda(0)),
    ):
        assert created.device.type == "cpu" and created.shape == (2,)
    assert torch.zeros(2, device="meta").is_meta
    assert torch.cuda.synchronize() is None
    before = torch.cuda.get_rng_state("cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.cuda.get_rng_state(), torch.Generator().manual_seed(5).get_state())
    torch.set_rng_state(before)

    def function(x: int) -> int:
        return x + 1

    assert torch.compile(function) is function and torch.compile(dynamic=True)(function) is function
