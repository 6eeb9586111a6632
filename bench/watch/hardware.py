"""What the GPUs of a trial under way do now, from the files that their samplers write beside the log."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.contract import run_files, telemetry
from bench.contract.telemetry import Sample

STALE_MS = 60_000
"""A sample that is older says nothing of now; the clocks of nodes are closer together than this."""


@dataclass(frozen=True, slots=True)
class Hottest:
    """The GPU with the highest temperature, at one moment."""

    gpus: int
    """Of how many."""
    gpu: int
    power_w: float | None
    sm_clock_mhz: float | None
    temperature_c: float
    throttle: tuple[str, ...] | None

    def text(self) -> str:
        """Return it as one line."""
        numbers = ((self.power_w, "W"), (self.sm_clock_mhz, "MHz"))
        known = [f"{value:,.0f} {unit}" for value, unit in numbers if value is not None]
        held = [f"held down by {' and '.join(self.throttle)}"] if self.throttle else []
        return ", ".join([f"{self.temperature_c:.0f} °C", *known, *held]) + f" (hottest of {self.gpus}: GPU {self.gpu})"


@dataclass(slots=True)
class Gpus:
    """The GPUs of a trial; the files are read at most as often as they are written."""

    folder: Path
    trial: int
    _read_s: float = -math.inf
    _hottest: Hottest | None = None

    def hottest(self, now_ms: int) -> Hottest | None:
        """Return the hottest GPU now; None where none is sampled."""
        if time.monotonic() - self._read_s >= telemetry.EVERY_S:
            self._read_s = time.monotonic()
            self._hottest = hottest([sample for sample in self._newest() if sample.time_ms > now_ms - STALE_MS])
        return self._hottest

    def _newest(self) -> Iterator[Sample]:
        for path in sorted(self.folder.glob(run_files.telemetry(self.trial, "*"))):
            with suppress(OSError):
                yield from telemetry.newest(path)


def hottest(samples: list[Sample]) -> Hottest | None:
    """Return the hottest GPU; None where no temperature is known."""
    known = [(sample.temperature_c, sample) for sample in samples if sample.temperature_c is not None]
    if not known:
        return None
    temperature_c, top = max(known, key=lambda pair: pair[0])
    return Hottest(len(samples), top.gpu, top.power_w, top.sm_clock_mhz, temperature_c, top.throttle)
