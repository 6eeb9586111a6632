"""Find the GPUs of this machine, for clusters with `device: auto`, and return them as overrides of the config.

NVIDIA's GPUs are found by NVML, AMD's by amdsmi. CUDA_VISIBLE_DEVICES limits both, as it limits the ranks.
"""

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.contract.cluster import GpuVendor
from bench.errors import ConfigError
from bench.texts import hydra_value
from bench.user_folder import user_folder

NAMES = {
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A800-SXM4-80GB": "a800",
    "NVIDIA B200": "b200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 NVL": "h100_nvl",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H20": "h20",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx_pro_6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
}
"""Files of conf/gpu by the name that the driver reports."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Files that exist if a driver of NVIDIA or AMD is loaded."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class DetectedGpu:
    """One GPU of this machine."""

    name: str
    uuid: str
    memory_gib: float
    """What programs can allocate: the total without the driver's reserve."""
    vendor: GpuVendor
    compute_capability: str | None
    has_nvlink: bool


@dataclass(frozen=True, slots=True)
class DetectedGpus:
    """The GPUs that ranks on this machine can use: all of one kind."""

    gpus: tuple[DetectedGpu, ...]
    library: str
    """NVML or amdsmi, with the version of the driver."""

    def __str__(self) -> str:
        gpu = self.gpus[0]
        links = ", NVLink" if gpu.has_nvlink and len(self.gpus) > 1 else ""
        return f"{len(self.gpus)} x {gpu.name}, {gpu.memory_gib:.1f} GiB{links} ({self.library})"


def overrides(*, has_gpu_file: bool) -> list[str]:
    """Return the overrides for the GPUs of this machine; those of the user come after them and win. Empty: no GPU.

    has_gpu_file: the config already describes the GPU.

    Raises:
        ConfigError: GPUs exist, but cannot be queried, or are of different kinds.
    """
    detected = detect(os.environ)
    if detected is None:
        return []
    gpu = [] if has_gpu_file else _gpu_override(detected.gpus[0])
    return [
        "cluster.device=cuda",
        f"cluster.ranks_per_node={len(detected.gpus)}",
        f"cluster.detected_gpus={hydra_value(str(detected))}",
        *gpu,
    ]


def _gpu_override(gpu: DetectedGpu) -> list[str]:
    """Return the override that sets cluster.gpu: a file of the user, one of conf/gpu, or what the driver reports."""
    own = file_name(gpu.name)
    if (user_folder() / "gpu" / f"{own}.yaml").is_file():
        return [f"gpu@cluster.gpu={own}"]
    if (shipped := NAMES.get(gpu.name)) is not None:
        return [f"gpu@cluster.gpu={shipped}"]
    fields: dict[str, object] = {
        "name": hydra_value(gpu.name),
        "vendor": gpu.vendor.name,
        "memory_gib": f"{gpu.memory_gib:.2f}",
        "compute_capability": "null" if gpu.compute_capability is None else hydra_value(gpu.compute_capability),
    }
    return ["gpu@cluster.gpu=unknown", *(f"cluster.gpu.{key}={value}" for key, value in fields.items())]


def file_name(gpu_name: str) -> str:
    """Return the name of the file that `runstop calibrate` writes for a GPU: nvidia_l40s."""
    return re.sub(r"[^a-z0-9]+", "_", gpu_name.lower()).strip("_")


def detect(environment: Mapping[str, str]) -> DetectedGpus | None:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide; None if there are none.

    Raises:
        ConfigError: GPUs exist, but cannot be queried, or are of different kinds.
    """
    reasons = []
    for library, read in _LIBRARIES.items():
        try:
            gpus, driver = read()
        except ModuleNotFoundError as error:
            reasons.append(f"the Python package {error.name} is not installed")
        except _UnreadableError as error:
            reasons.append(f"{library}: {error}")
        else:
            visible = _visible(gpus, environment.get(VISIBLE))
            return DetectedGpus(_of_one_kind(visible), f"{library}, driver {driver}") if visible else None
    if any(Path(file).exists() for file in DRIVER_FILES):
        raise ConfigError(
            f"this machine has a GPU driver, but runstop cannot query the GPUs ({'; '.join(reasons)})",
            where="cluster.device=auto",
            fix="install nvidia-ml-py (or amdsmi for AMD) into the environment of runstop; or set cluster.device=cuda, "
            "cluster.ranks_per_node and gpu@cluster.gpu; or set cluster.device=cpu to use no GPU",
            rule="HW-03",
        )
    return None


def _of_one_kind(gpus: Sequence[DetectedGpu]) -> tuple[DetectedGpu, ...]:
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise ConfigError(
            f"this machine has different kinds of GPU, but a run needs GPUs of a single kind: {', '.join(names)}",
            where=f"cluster.device=auto, {VISIBLE}",
            fix=f"export {VISIBLE} with the UUIDs of GPUs of a single kind (`nvidia-smi -L` lists the UUIDs)",
            rule="HW-03",
        )
    return tuple(gpus)


def visible_names(value: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names, by number or UUID.

    Source: CUDA's programming guide, "CUDA environment variables": what comes after an invalid entry is not visible.
    """
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, value.split(","))))


def _visible(gpus: Sequence[DetectedGpu], value: str | None) -> list[DetectedGpu]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names; all of them for None."""
    if value is None:
        return list(gpus)
    chosen: list[DetectedGpu] = []
    for text in visible_names(value):
        if text.isdecimal():
            named = [gpus[int(text)]] if int(text) < len(gpus) else []
        else:
            named = [gpu for gpu in gpus if gpu.uuid.startswith(text)]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen += named
    return chosen


class _UnreadableError(Exception):
    """The library of a vendor is installed, but cannot query the GPUs."""


def _nvidia() -> tuple[list[DetectedGpu], str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _UnreadableError(error) from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        handles = [part for handle in handles for part in _parts(pynvml, handle)]
        return [_nvidia_gpu(pynvml, handle) for handle in handles], _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        raise _UnreadableError(error) from error
    finally:
        pynvml.nvmlShutdown()


def _parts(nvml: ModuleType, handle: Any) -> list[Any]:
    """Return the first MIG slice of a GPU in MIG mode, the only one that a CUDA process sees; else the GPU itself."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return [handle]
        return [nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)]
    except nvml.NVMLError:
        return [handle]


def _nvidia_gpu(nvml: ModuleType, handle: Any) -> DetectedGpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    major, minor = _or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle) or (None, None)
    return DetectedGpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_gib=(memory.total - memory.reserved) / GIB,
        vendor=GpuVendor.nvidia,
        compute_capability=None if major is None else f"{major}.{minor}",
        has_nvlink=_or_none(nvml, nvml.nvmlDeviceGetNvLinkState, handle, 0) == nvml.NVML_FEATURE_ENABLED,
    )


def _or_none(nvml: ModuleType, query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a query; None if this GPU does not support it."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _amd() -> tuple[list[DetectedGpu], str]:
    import amdsmi

    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        raise _UnreadableError(error) from error
    try:
        handles = amdsmi.amdsmi_get_processor_handles()
        driver = amdsmi.amdsmi_get_gpu_driver_info(handles[0])["driver_version"] if handles else ""
        return [_amd_gpu(amdsmi, handle) for handle in handles], str(driver)
    except amdsmi.AmdSmiException as error:
        raise _UnreadableError(error) from error
    finally:
        amdsmi.amdsmi_shut_down()


def _amd_gpu(smi: ModuleType, handle: Any) -> DetectedGpu:
    total = smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM)
    return DetectedGpu(
        name=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
        uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
        memory_gib=total / GIB,
        vendor=GpuVendor.amd,
        compute_capability=None,
        has_nvlink=False,
    )


_LIBRARIES: dict[str, Callable[[], tuple[list[DetectedGpu], str]]] = {"NVML": _nvidia, "amdsmi": _amd}


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
