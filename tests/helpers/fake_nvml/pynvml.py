"""NVML on a machine without a GPU: answers by the script in FAKE_NVML. Put this folder on the sampler's PYTHONPATH.

The script: {gpus: {UUID: NVML index}, refused: [names of queries], ends: {name of a query: after how many calls}, how:
"crash", "error" or "hang", no_driver: true, every_s: between two samples}. Power is 400 W, energy grows by as much.
"""

import json
import os
import signal
import time
from collections import Counter
from types import SimpleNamespace

from bench.contract import telemetry

SCRIPT = json.loads(os.environ["FAKE_NVML"])
telemetry.EVERY_S = SCRIPT.get("every_s", 0.02)
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
CALLS: Counter[str] = Counter()


class NVMLError(Exception):
    """As the real one: its text is the reason."""


def _count_call(name: str) -> None:
    CALLS[name] += 1
    if name in SCRIPT.get("refused", ()):
        raise NVMLError("Not Supported")
    if CALLS[name] == SCRIPT.get("ends", {}).get(name):
        if SCRIPT["how"] == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if SCRIPT["how"] == "error":
            raise RuntimeError("the bindings are broken")
        time.sleep(600)


def nvmlInit() -> None:
    if SCRIPT.get("no_driver"):
        raise NVMLError("NVML Shared Library Not Found")


def nvmlSystemGetDriverVersion() -> bytes:
    return b"999.1"


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    if uuid not in SCRIPT["gpus"]:
        raise NVMLError("Not Found")
    return SCRIPT["gpus"][uuid]


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    return 700_000


def nvmlDeviceGetMaxClockInfo(handle: int, clock: int) -> int:
    return 1980


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    _count_call("nvmlDeviceGetPowerUsage")
    return 400_000


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:
    return {NVML_CLOCK_SM: 1755, NVML_CLOCK_MEM: 3201}[clock]


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return 60 + handle


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=100 * 2**30)


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    _count_call("nvmlDeviceGetTotalEnergyConsumption")
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * 400_000)


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    """Only this older name: the sampler must find it."""
    _count_call("nvmlDeviceGetCurrentClocksThrottleReasons")
    return 0x4 | 0x20


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
    return 16


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    return 0
