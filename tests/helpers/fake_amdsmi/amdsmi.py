"""amdsmi on a machine without a GPU, with the names and units of amdsmi 7.0.2; by the script in FAKE_AMDSMI.

The script: {serials: [of each GPU, hexadecimal], refused: [names of queries], every_s: between two samples}. A GPU's
handle is its index. Power is 600 W, and the energy counter grows by as much. Every call of the metrics adds to the
counter of the package power limit.
"""

import json
import os
import time
from enum import IntEnum
from itertools import count

from bench.contract import telemetry

SCRIPT = json.loads(os.environ["FAKE_AMDSMI"])
telemetry.EVERY_S = SCRIPT.get("every_s", 0.02)
RESOLUTION_UJ = 15.25
_calls = count(1)


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    """Its text has a line break, as that of the real one."""

    def __str__(self) -> str:
        return "Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"


class AmdSmiClkType(IntEnum):
    SYS = GFX = 0
    MEM = 4


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = JUNCTION = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiMemoryType(IntEnum):
    VRAM = 0
    GTT = 2


def _check(name: str) -> None:
    if name in SCRIPT.get("refused", ()):
        raise AmdSmiLibraryException


def amdsmi_init() -> None:
    _check("amdsmi_init")


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(len(SCRIPT["serials"])))


def amdsmi_get_gpu_asic_info(gpu: int) -> dict[str, object]:
    _check("amdsmi_get_gpu_asic_info")
    serial = f"0x{int(SCRIPT['serials'][gpu], 16):016X}"
    return {"market_name": "AMD Instinct MI300X", "asic_serial": serial, "num_compute_units": 304}


def amdsmi_get_gpu_enumeration_info(gpu: int) -> dict[str, object]:
    return {"hip_id": gpu, "hip_uuid": f"GPU-{SCRIPT['serials'][gpu]}"}


def amdsmi_get_gpu_driver_info(gpu: int) -> dict[str, str]:
    return {"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "N/A"}


def amdsmi_get_power_info(gpu: int) -> dict[str, object]:
    """In W. An MI300X has no average, and other GPUs of AMD no current power."""
    _check("amdsmi_get_power_info")
    return {"socket_power": 600, "current_socket_power": 600, "average_socket_power": "N/A", "power_limit": 750}


def amdsmi_get_power_cap_info(gpu: int) -> dict[str, int]:
    """In µW."""
    return {
        "power_cap": 750_000_000,
        "default_power_cap": 750_000_000,
        "min_power_cap": 0,
        "max_power_cap": 750_000_000,
    }


def amdsmi_get_clock_info(gpu: int, clk_type: AmdSmiClkType) -> dict[str, object]:
    """In MHz."""
    _check("amdsmi_get_clock_info")
    clk, max_clk = {AmdSmiClkType.GFX: (1840, 2100), AmdSmiClkType.MEM: (1300, 1300)}[clk_type]
    return {"clk": clk, "min_clk": 132, "max_clk": max_clk, "clk_locked": False, "clk_deep_sleep": "N/A"}


def amdsmi_get_temp_metric(gpu: int, sensor_type: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric) -> int:
    """In °C. An MI300X has no sensor at its edge."""
    if sensor_type is not AmdSmiTemperatureType.JUNCTION:
        raise AmdSmiLibraryException
    return 70 + gpu


def amdsmi_get_gpu_memory_usage(gpu: int, mem_type: AmdSmiMemoryType) -> int:
    """In bytes."""
    return {AmdSmiMemoryType.VRAM: 150, AmdSmiMemoryType.GTT: 1}[mem_type] * 2**30


def amdsmi_get_gpu_vram_usage(gpu: int) -> dict[str, int]:
    """In MiB."""
    return {"vram_total": 196_592, "vram_used": 150 * 1024}


def amdsmi_get_energy_count(gpu: int) -> dict[str, float]:
    """The resolution is in µJ, the time stamp in ns."""
    joules = time.clock_gettime(time.CLOCK_BOOTTIME) * 600
    return {
        "energy_accumulator": int(joules * 1e6 / RESOLUTION_UJ),
        "counter_resolution": RESOLUTION_UJ,
        "timestamp": 0,
    }


def amdsmi_get_gpu_metrics_info(gpu: int) -> dict[str, object]:
    _check("amdsmi_get_gpu_metrics_info")
    return {
        "ppt_residency_acc": next(_calls),
        "socket_thm_residency_acc": 7,
        "vr_thm_residency_acc": "N/A",
        "hbm_thm_residency_acc": 0,
        "prochot_residency_acc": 0,
    }


def amdsmi_get_gpu_total_ecc_count(gpu: int) -> dict[str, int]:
    return {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0}
