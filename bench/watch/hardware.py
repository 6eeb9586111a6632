"""Current state of a running trial's GPUs, from the telemetry files in its run folder."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.contract import run_files, telemetry
from bench.contract.telemetry import Sample

STALE_MS = 60_000
"""Older samples are ignored; the clock difference between nodes is smaller than this."""


@dataclass(frozen=True, slots=True)
class Hottest:
    """The GPU with the highest temperature."""

    gpus: int
    """The number of GPUs with samples."""
    gpu: int
    power_w: float | None
    sm_clock_mhz: float | None
    temperature_c: float
    throttle: tuple[str, ...] | None

    def text(self) -> str:
        """Return the state of the GPU in one line."""
        numbers = ((self.power_w, "W"), (self.sm_clock_mhz, "MHz"))
        known = [f"{value:,.0f} {unit}" for value, unit in numbers if value is not None]
        throttled = [f"throttled: {', '.join(self.throttle)}"] if self.throttle else []
        return (
            ", ".join([f"{self.temperature_c:.0f} °C", *known, *throttled])
            + f" (hottest of {self.gpus}: GPU {self.gpu})"
        )


@dataclass(slots=True)
class Gpus:
    """Reads the GPU samples of a trial, at most once per sampling interval."""

    folder: Path
    trial: int
    _read_s: float = -math.inf
    _hottest: Hottest | None = None

    def hottest(self, now_ms: int) -> Hottest | None:
        """Return the hottest GPU; None without recent samples."""
        if time.monotonic() - self._read_s >= telemetry.EVERY_S:
            self._read_s = time.monotonic()
            self._hottest = hottest([sample for sample in self._newest() if sample.time_ms > now_ms - STALE_MS])
        return self._hottest

    def _newest(self) -> Iterator[Sample]:
        for path in sorted(self.folder.glob(run_files.telemetry(self.trial, "*"))):
            with suppress(OSError):
                yield from telemetry.newest(path)


def hottest(samples: list[Sample]) -> Hottest | None:
    """Return the hottest GPU; None if no temperature is known."""
    known = [(sample.temperature_c, sample) for sample in samples if sample.temperature_c is not None]
    if not known:
        return None
    temperature_c, top = max(known, key=lambda pair: pair[0])
    return Hottest(len(samples), top.gpu, top.power_w, top.sm_clock_mhz, temperature_c, top.throttle)
