"""Timing of calls with a fake clock; and prepared calls compute the right results."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bench.contract.kernels import Point
from bench.errors import BenchError
from jobs.kernels import attention, gemm, memcpy, timing

CPU = torch.device("cpu")


class Clock:
    """A fake clock that each call advances by the next listed number of seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
        self.now, self.calls, self._seconds = 0.0, 0, seconds
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def call(self) -> None:
        self.calls += 1
        self.now += next(self._seconds)


def test_every_call_is_timed_from_the_end_of_the_previous(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, iter([0.25, 0.5, 1.0]))
    assert timing.time_back_to_back(clock.call, 3, CPU) == [0.25, 0.5, 1.0]


def test_percentiles_are_those_of_numpy() -> None:
    seconds = np.random.default_rng(0).exponential(1e-3, 50).tolist()
    times, expected = timing.summarize(seconds), 1e6 * np.percentile(seconds, [50, 10, 90])
    assert (times.median_us, times.p10_us, times.p90_us) == pytest.approx(expected, abs=1e-3)
    assert times.n == 50


def test_sustained_point_is_timed_in_stretches_after_heating_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of 1/128 s are a stretch; calls get slower after the first second, the heat-up time of 4 s."""
    clock = Clock(monkeypatch, itertools.chain(itertools.repeat(1 / 128, 1 + 3 * 43), itertools.repeat(1 / 64)))
    seconds = timing.time_sustained(clock.call, 4.0, CPU)
    assert seconds == [1 / 64] * 86, "stretches of 3/64 s fill 4 s, and none is of the first second"
    assert clock.calls == 130 + 3 * 86


def test_slow_calls_are_timed_three_times_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, itertools.repeat(10.0))
    assert timing.time_sustained(clock.call, 1.0, CPU) == [10.0] * timing.MIN_RUNS


def point(family: str, operation: str, variant: str, sizes: list[int]) -> Point:
    more = {"name": "p", "kernel": "k", "ranks": 1, "is_sustained": False, "work": 1.0}
    return Point(
        family=family, operation=operation, variant=variant, sizes=sizes, unit="GB/s", peak=None, limit=None, **more
    )


def test_fp8_operand_has_one_scale_per_row() -> None:
    torch.manual_seed(0)
    x_MK, scale_M = gemm._quantized(32, 64, CPU)
    assert x_MK.dtype is torch.float8_e4m3fn and scale_M.shape == (32, 1)
    assert x_MK.float().abs().amax(1).tolist() == [448.0] * 32, "each row fills the range of E4M3"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gemm_has_the_requested_shape(precision: str) -> None:
    out = gemm.prepare(point("gemm", "gemm", precision, [5, 7, 11]), CPU).call()
    assert out.shape == (5, 7) and bool(out.isfinite().all()) and bool(out.any())


def test_a_copy_has_every_byte_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    size = memcpy.BLOCK + 3
    buffer = memcpy._on_host(size, point("memcpy", "host_to_device", "pageable", [size]))
    assert len(buffer) == size and 120 < buffer[-3:].float().mean() + buffer.float().mean() / 2 < 400
    target = memcpy.prepare(point("memcpy", "device", "device", [size]), CPU).call()
    assert len(target) == size and len(target.unique()) == 256


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_attention_backend_is_reported_and_causal(backend: str) -> None:
    """2 rows of 8 tokens, 4 heads over 2 of keys and values, 16 numbers a head."""
    prepared = attention.prepare(point("attention", "forward", backend, [2, 4, 2, 8, 16]), CPU)
    assert backend in prepared.implementation
    torch.manual_seed(1)
    out_BHSD = prepared.call()
    assert out_BHSD.shape == (2, 4, 8, 16)
    first_BHD = out_BHSD[:, :, 0]
    assert torch.equal(first_BHD[:, 0], first_BHD[:, 1]), "the first token sees its own value only: heads share it"
    gradients = attention.prepare(point("attention", "backward", backend, [2, 4, 2, 8, 16]), CPU).call()
    assert [tuple(g.shape) for g in gradients] == [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]


def test_unexpected_attention_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.BACKENDS, attention.AttentionBackend.math, attention.SDPBackend.FLASH_ATTENTION)
    with pytest.raises(
        BenchError,
        match="torch used _scaled_dot_product_flash_attention_for_cpu attention instead of the requested backend math",
    ):
        attention.prepare(point("attention", "forward", "math", [1, 2, 2, 8, 16]), CPU)


def test_unsupported_kernel_is_a_runtime_error() -> None:
    """Its point fails, and the other points are measured."""
    with pytest.raises(RuntimeError):
        attention.prepare(point("attention", "forward", "cudnn", [1, 2, 2, 8, 16]), CPU)
