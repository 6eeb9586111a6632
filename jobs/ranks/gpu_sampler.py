"""Sample a node's GPUs through NVML until standard input ends: `python -m jobs.ranks.gpu_sampler FILE PARENT UUID …`.

It is a process of its own, so that a rank neither waits for the driver nor shares its interpreter with this work. It
writes a line for each GPU and second to FILE. When it is told to end it prints {driver, gpus, refused} as JSON. What a
driver does not give is left blank, and `refused` says why. Without NVML it fails, and the last line of its traceback is
the reason.
"""

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.contract import mllog, telemetry
from bench.contract.telemetry import Sample

GIB = 2**30
PR_SET_PDEATHSIG = 1
LOWEST_PRIORITY = 19


@dataclass
class Gpu:
    """One GPU, what is asked about it, and what its driver refused to say, with the reason."""

    nvml: ModuleType
    handle: Any
    index: int
    """As nvidia-smi counts the GPUs of the node."""
    refused: dict[str, str] = field(default_factory=dict)

    def sample(self) -> Sample:
        """Return what NVML says of this GPU now."""
        nvml, handle = self.nvml, self.handle
        bits = self._ask("throttle", self._reasons, handle)
        memory = self._ask("memory_gib", nvml.nvmlDeviceGetMemoryInfo, handle)
        time_ms, monotonic_ms = mllog.clocks_ms()
        return Sample(
            time_ms=time_ms,
            monotonic_ms=monotonic_ms,
            gpu=self.index,
            power_w=_scaled(self._ask("power_w", nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            sm_clock_mhz=self._ask("sm_clock_mhz", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("memory_clock_mhz", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask("temperature_c", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            memory_gib=None if memory is None else memory.used / GIB,
            energy_j=_scaled(self._ask("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1e-3),
            throttle=None if bits is None else telemetry.reasons(bits),
        )

    def settings(self) -> dict[str, Any]:
        """Return what does not change: which GPU it is, and the limits that somebody has set."""
        nvml, handle = self.nvml, self.handle
        limit = self._ask("power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        highest = self._ask("max_sm_clock_mhz", nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        return {"gpu": self.index, "power_limit_w": _scaled(limit, 1e-3), "max_sm_clock_mhz": highest}

    @property
    def _reasons(self) -> Callable[[Any], int]:
        """The query for throttle reasons, which older bindings know by its older name only."""
        newer = getattr(self.nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        query: Callable[[Any], int] = newer or self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return query

    def _ask(self, name: str, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer to a query; None, and the reason kept, if the driver has none."""
        try:
            return query(*arguments)
        except self.nvml.NVMLError as error:
            self.refused.setdefault(name, str(error))
            return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.ranks.gpu_sampler", description=__doc__)
    parser.add_argument("file", type=Path, help="a new file for the samples")
    parser.add_argument("parent", type=int, help="the process with which this one ends")
    parser.add_argument("uuids", nargs="+", metavar="UUID", help="of each GPU, as CUDA gives it")
    args = parser.parse_args()
    end_with(args.parent)
    os.nice(LOWEST_PRIORITY)
    import pynvml

    pynvml.nvmlInit()
    handles = [handle(pynvml, uuid) for uuid in args.uuids]
    gpus = [Gpu(pynvml, found, pynvml.nvmlDeviceGetIndex(found)) for found in handles]
    settings = [gpu.settings() for gpu in gpus]
    with args.file.open("x") as file:
        file.write(telemetry.header())
        for _ in moments(args.parent):
            file.write(telemetry.lines([gpu.sample() for gpu in gpus]))
            file.flush()
    refused = {name: reason for gpu in gpus for name, reason in gpu.refused.items()}
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    print(json.dumps({"driver": driver, "gpus": settings, "refused": refused}), flush=True)


def end_with(parent: int) -> None:
    """Have the kernel end this process when the parent ends, however that happens."""
    with suppress(OSError, AttributeError):  # no Linux: standard input ends with the parent too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the rank has ended")


def handle(nvml: ModuleType, uuid: str) -> Any:
    """Return NVML's handle of a GPU, or of a part of one (MIG), by the UUID that CUDA gives it."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def moments(parent: int) -> Iterator[None]:
    """Yield at each moment to sample, the last time when standard input has ended. What was missed is not made up."""
    due_s, is_over = time.monotonic(), False
    while not is_over and os.getppid() == parent:
        yield
        now_s = time.monotonic()
        due_s = max(due_s + telemetry.EVERY_S, now_s)
        is_over = bool(select.select([sys.stdin], [], [], due_s - now_s)[0])
    yield


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
