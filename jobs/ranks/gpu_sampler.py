"""Sample a node's GPUs until standard input ends: `python -m jobs.ranks.gpu_sampler FILE PARENT UUID … [--amd]`.

NVIDIA's GPUs are read through NVML, AMD's through amdsmi (`amd_gpu.py`). It is a separate process, so that a rank
neither waits for the driver nor shares its interpreter. It writes a line per GPU and second to FILE. When standard
input ends, it prints {driver, gpus, refused} as JSON. Values that the driver does not report are blank, with the reason
in `refused`. Without the library it fails, and the last line of its traceback is the reason.

If the node has a power meter of its own, its readings go to a second file (`bench.contract.telemetry.node_file`), and
the JSON names the meter.
"""

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from bench.contract import mllog, telemetry
from bench.contract.telemetry import Reading, Sample
from jobs.ranks import amd_gpu, node_meter

GIB = 2**30
PR_SET_PDEATHSIG = 1
LOWEST_PRIORITY = 19
AMD = "--amd"
_UNCORRECTED = (1, 0)
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, and NVML_VOLATILE_ECC: since the driver was loaded. Source: nvml.h."""


class Sampled(Protocol):
    """A GPU that is sampled, of any vendor."""

    refused: dict[str, str]

    def sample(self) -> Sample: ...
    def settings(self) -> dict[str, Any]: ...
    def driver(self) -> str: ...


@dataclass
class Gpu:
    """The NVML queries of one GPU, and the reasons for those that its driver refused."""

    nvml: ModuleType
    handle: Any
    index: int
    """The GPU's index in nvidia-smi."""
    refused: dict[str, str] = field(default_factory=dict)

    def sample(self) -> Sample:
        """Return the current values of this GPU."""
        nvml, handle = self.nvml, self.handle
        bits = self._query("throttle", self._reasons, handle)
        memory = self._query("memory_gib", nvml.nvmlDeviceGetMemoryInfo, handle)
        time_ms, monotonic_ms = mllog.clocks_ms()
        return Sample(
            time_ms=time_ms,
            monotonic_ms=monotonic_ms,
            gpu=self.index,
            power_w=_scaled(self._query("power_w", nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            sm_clock_mhz=self._query("sm_clock_mhz", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._query("memory_clock_mhz", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._query(
                "temperature_c", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            memory_gib=None if memory is None else memory.used / GIB,
            energy_j=_scaled(self._query("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1e-3),
            throttle=None if bits is None else telemetry.reasons(bits),
            pcie_lanes=self._query("pcie_lanes", nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            ecc_errors=self._query("ecc_errors", nvml.nvmlDeviceGetTotalEccErrors, handle, *_UNCORRECTED),
        )

    def settings(self) -> dict[str, Any]:
        """Return the constant facts: the GPU's index, power limit and maximum clock."""
        nvml, handle = self.nvml, self.handle
        limit = self._query("power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        highest = self._query("max_sm_clock_mhz", nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        return {"gpu": self.index, "power_limit_w": _scaled(limit, 1e-3), "max_sm_clock_mhz": highest}

    def driver(self) -> str:
        """Return the version of the driver."""
        return _text(self.nvml.nvmlSystemGetDriverVersion())

    @property
    def _reasons(self) -> Callable[[Any], int]:
        """The query for throttle reasons, which has another name in older bindings."""
        newer = getattr(self.nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        query: Callable[[Any], int] = newer or self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return query

    def _query(self, name: str, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query; None if the driver refuses it, with the reason kept in `refused`."""
        try:
            return query(*arguments)
        except self.nvml.NVMLError as error:
            self.refused.setdefault(name, str(error))
            return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.ranks.gpu_sampler", description=__doc__)
    parser.add_argument("file", type=Path, help="a new file for the samples")
    parser.add_argument("parent", type=int, help="process id of the rank; the sampler ends with it")
    parser.add_argument("uuids", nargs="+", metavar="UUID", help="UUID of each GPU, from CUDA")
    parser.add_argument(AMD, action="store_true", help="the GPUs are AMD's: read them through amdsmi")
    args = parser.parse_args()
    end_with(args.parent)
    os.nice(LOWEST_PRIORITY)
    gpus = opened(args.uuids, is_amd=args.amd)
    settings = [gpu.settings() for gpu in gpus]
    meter, node_file = node_meter.find(), telemetry.node_file(args.file)
    if meter is not None:
        node_file.write_text(telemetry.reading_header())
    with args.file.open("x") as file:
        file.write(telemetry.header())
        for _ in moments(args.parent):
            file.write(telemetry.lines([gpu.sample() for gpu in gpus]))
            file.flush()
            if meter is not None:
                read_meter(meter, node_file)
    refused = {name: reason for gpu in gpus for name, reason in gpu.refused.items()}
    account = {"driver": gpus[0].driver(), "gpus": settings, "refused": refused}
    print(json.dumps(account | ({} if meter is None else {"meter": str(meter)})), flush=True)


def read_meter(value: Path, file: Path) -> None:
    """Append a reading of the node's meter; a moment without a value is left out, which shows as a gap."""
    if (power_w := node_meter.watts(value)) is None:
        return
    time_ms, monotonic_ms = mllog.clocks_ms()
    with file.open("a") as out:
        out.write(telemetry.reading_line(Reading(time_ms=time_ms, monotonic_ms=monotonic_ms, power_w=power_w)))


def opened(uuids: list[str], *, is_amd: bool) -> Sequence[Sampled]:
    """Return the GPUs with these UUIDs, through the library of their vendor."""
    if is_amd:
        import amdsmi

        return amd_gpu.opened(amdsmi, uuids)
    import pynvml

    pynvml.nvmlInit()
    handles = [handle(pynvml, uuid) for uuid in uuids]
    return [Gpu(pynvml, each, pynvml.nvmlDeviceGetIndex(each)) for each in handles]


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends."""
    with suppress(OSError, AttributeError):  # not Linux: standard input ends with the parent too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the rank has ended")


def handle(nvml: ModuleType, uuid: str) -> Any:
    """Return NVML's handle of a GPU or a MIG slice, by its CUDA UUID."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def moments(parent: int) -> Iterator[None]:
    """Yield at each sampling time, and a last time after standard input has ended. Missed times are skipped."""
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
