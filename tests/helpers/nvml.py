"""A substitute for NVML's Python bindings, of a machine with chosen GPUs."""

from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 2**30
H200 = ("NVIDIA H200", 140.4, (9, 0))
L40S = ("NVIDIA L40S", 45.0, (8, 9))


class _Refused(Exception):
    """NVML's error."""


def nvml(*gpus: tuple[str, float, tuple[int, int]], fails: str | None = None) -> ModuleType:
    """Return NVML's bindings of a machine with these GPUs: name, memory in GiB, compute capability."""
    module = ModuleType("pynvml")

    def init() -> None:
        if fails:
            raise _Refused(fails)

    def refuse(*_: Any) -> None:
        raise _Refused("Not Supported")

    functions: dict[str, Any] = {
        "NVMLError": _Refused,
        "NVML_FEATURE_ENABLED": 1,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlMemory_v2": 2,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.86.15",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMigMode": refuse,
        "nvmlDeviceGetName": lambda index: gpus[index][0],
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}{index}{index}-abc",
        "nvmlDeviceGetMemoryInfo": lambda index, version: SimpleNamespace(
            total=gpus[index][1] * GIB, reserved=0.6 * GIB
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda index: gpus[index][2],
        "nvmlDeviceGetNvLinkState": lambda index, link: 1,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
