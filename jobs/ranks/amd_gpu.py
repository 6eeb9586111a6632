"""Read AMD GPUs through amdsmi, the Python bindings of ROCm, for `jobs.ranks.gpu_sampler`. It was not run on a GPU.

amdsmi is part of ROCm: `pip install /opt/rocm/share/amd_smi`. Units of amdsmi 6.1 to 7.2: power in W, power caps in µW,
clocks in MHz, temperatures in °C, memory in bytes. A value that a GPU does not have is the text N/A, or the largest
number of its type.

Sources: amdsmi 7.0.2, amdsmi_interface.py; torch 2.13, torch/cuda/__init__.py, reads the same functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from bench.contract import mllog
from bench.contract.telemetry import Sample

GIB = 2**30
NO_POWER_W = 0xFFFF
"""amdsmi's power of a GPU that does not report it."""
LIMITERS = {
    "ppt_residency_acc": "package power limit",
    "socket_thm_residency_acc": "socket thermal limit",
    "vr_thm_residency_acc": "voltage regulator thermal limit",
    "hbm_thm_residency_acc": "HBM thermal limit",
    "prochot_residency_acc": "processor hot",
}
"""Counters in the GPU's metrics that grow while a limiter reduces the clocks, and our names of the limiters."""


class NotFoundError(Exception):
    """amdsmi lists no GPU, or several, with a serial number."""


@dataclass
class AmdGpu:
    """The amdsmi queries of one GPU, and the reasons for those that it refused."""

    amdsmi: ModuleType
    handle: Any
    index: int
    """The GPU's index in amd-smi."""
    refused: dict[str, str] = field(default_factory=dict)
    _counters: dict[str, int] = field(default_factory=dict)
    """The limiters' counters at the previous sample."""

    def sample(self) -> Sample:
        """Return the current values of this GPU."""
        smi = self.amdsmi
        time_ms, monotonic_ms = mllog.clocks_ms()
        return Sample(
            time_ms=time_ms,
            monotonic_ms=monotonic_ms,
            gpu=self.index,
            power_w=self._power_w(),
            sm_clock_mhz=self._clock("sm_clock_mhz", smi.AmdSmiClkType.GFX, "clk"),
            memory_clock_mhz=self._clock("memory_clock_mhz", smi.AmdSmiClkType.MEM, "clk"),
            temperature_c=self._number(
                "temperature_c",
                smi.amdsmi_get_temp_metric,
                smi.AmdSmiTemperatureType.JUNCTION,
                smi.AmdSmiTemperatureMetric.CURRENT,
            ),
            memory_gib=_scaled(
                self._number("memory_gib", smi.amdsmi_get_gpu_memory_usage, smi.AmdSmiMemoryType.VRAM), 1 / GIB
            ),
            energy_j=self._energy_j(),
            throttle=self._throttle(),
        )

    def settings(self) -> dict[str, Any]:
        """Return the constant facts: the GPU's index, power limit and maximum clock."""
        cap_uw = self._number("power_limit_w", lambda gpu: self.amdsmi.amdsmi_get_power_cap_info(gpu)["power_cap"])
        highest = self._clock("max_sm_clock_mhz", self.amdsmi.AmdSmiClkType.GFX, "max_clk")
        return {"gpu": self.index, "power_limit_w": _scaled(cap_uw, 1e-6), "max_sm_clock_mhz": highest}

    def driver(self) -> str:
        """Return the version of the kernel's driver."""
        reported = self._query("driver", self.amdsmi.amdsmi_get_gpu_driver_info)
        return "not reported" if reported is None else str(reported["driver_version"])

    def _power_w(self) -> float | None:
        """Return the socket's current power; GPUs before the MI300 report only the average over a short time."""
        reported = self._query("power_w", self.amdsmi.amdsmi_get_power_info)
        if reported is None:
            return None
        for name in ("current_socket_power", "average_socket_power"):
            value = reported.get(name)
            if _is_number(value) and value < NO_POWER_W:
                return float(value)
        self.refused.setdefault("power_w", "amdsmi reports N/A")
        return None

    def _clock(self, name: str, clock: Any, key: str) -> float | None:
        return self._number(name, lambda gpu: self.amdsmi.amdsmi_get_clock_info(gpu, clock)[key])

    def _energy_j(self) -> float | None:
        """Return the energy since the driver was loaded: a counter, in units of its resolution in µJ."""
        counted = self._query("energy_j", self.amdsmi.amdsmi_get_energy_count)
        if counted is None:
            return None
        return float(counted["energy_accumulator"] * counted["counter_resolution"] * 1e-6)

    def _throttle(self) -> tuple[str, ...] | None:
        """Return the limiters whose counters have grown since the previous sample; None at the first one."""
        metrics = self._query("throttle", self.amdsmi.amdsmi_get_gpu_metrics_info)
        if metrics is None:
            return None
        counters = {name: metrics[name] for name in LIMITERS if _is_number(metrics.get(name))}
        if not counters:
            self.refused.setdefault("throttle", "amdsmi reports no counters of limiters")
        before, self._counters = self._counters, counters
        known = before.keys() & counters.keys()
        return tuple(LIMITERS[name] for name in LIMITERS if name in known and counters[name] > before[name]) or (
            () if known else None
        )

    def _number(self, name: str, query: Callable[..., Any], *arguments: Any) -> float | None:
        value = self._query(name, query, *arguments)
        if _is_number(value):
            return float(value)
        if value is not None:
            self.refused.setdefault(name, f"amdsmi reports {value}")
        return None

    def _query(self, name: str, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query; None if the driver refuses it, with the reason kept in `refused`."""
        try:
            return query(self.handle, *arguments)
        except self.amdsmi.AmdSmiException as error:
            self.refused.setdefault(name, " ".join(str(error).split()))
            return None


def opened(amdsmi: ModuleType, uuids: Sequence[str]) -> list[AmdGpu]:
    """Return the GPUs with these UUIDs, in the same order.

    Raises:
        NotFoundError: amdsmi does not list exactly one GPU for a UUID. A partitioned GPU is listed once per partition.
    """
    amdsmi.amdsmi_init()
    handles = list(amdsmi.amdsmi_get_processor_handles())
    serials = [serial_of(amdsmi, handle) for handle in handles]
    gpus = []
    for uuid in uuids:
        matches = [index for index, serial in enumerate(serials) if serial == serial_in(uuid)]
        if len(matches) != 1:
            raise NotFoundError(f"amdsmi lists {len(matches)} GPUs with the UUID {uuid}, but must list exactly one")
        gpus.append(AmdGpu(amdsmi, handles[matches[0]], matches[0]))
    return gpus


def serial_of(amdsmi: ModuleType, handle: Any) -> int | None:
    """Return the serial number that amdsmi reports; None if the GPU has none."""
    serial = amdsmi.amdsmi_get_gpu_asic_info(handle)["asic_serial"]
    return None if serial == "N/A" else int(serial, 16)


def serial_in(uuid: str) -> int | None:
    """Return the serial number in torch's UUID of an AMD GPU; None if it is not such a UUID.

    HIP's UUID is 16 bytes that spell the serial number as hexadecimal digits. torch prints each byte as two digits.

    Sources: hsa_ext_amd.h, HSA_AMD_AGENT_INFO_UUID; torch/csrc/cuda/Module.cpp, uuid_to_string.
    """
    try:
        return int(bytes.fromhex(uuid.replace("-", "")).decode("ascii"), 16)
    except ValueError:
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
