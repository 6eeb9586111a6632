"""Read a node's CPUs, memory, network, InfiniBand and GPUs from the kernel, nvidia-smi and amdsmi; None if unknown.

It needs only the standard library.
"""

import csv
import fcntl
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from bench.contract import host_memory
from bench.contract.node_facts import NOT_INSTALLED, Disk, GpuFacts, Interface, Machine, NeededPath, Port, Results

TIMEOUT_S = 20
"""Longest wait for nvidia-smi or amdsmi; they hang on a GPU that has fallen off the bus."""
KFD = Path("/dev/kfd")
"""The compute device of AMD's driver. Source: ROCm, "Running ROCm Docker containers"."""
ROOT = Path(__file__).parents[2]
GET_ADDRESS = 0x8915
"""SIOCGIFADDR, netdevice(7): the first IPv4 address of an interface."""
_GPU = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "temperature_c": "temperature.gpu",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
}
"""nvidia-smi's names for the fields of GpuFacts."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ROWS = {"uuid": "gpu_uuid", "rows_pending": "remapped_rows.pending", "rows_failed": "remapped_rows.failure"}
_NUMBERS = {field.name for field in fields(GpuFacts) if field.type == int | None}


def machine(*, results: Results, paths: tuple[NeededPath, ...]) -> Machine:
    """Return all facts of this node."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    gpu_facts, refused, links = gpus()
    return Machine(
        num_cpus=os.cpu_count(),
        memory_gib=round(host_memory.total_bytes() / 2**30, 1),
        memory_limit_gib=memory_limit_gib(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        huge_pages=text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        shm_mib=shm and shm.total // 2**20,
        shm_free_mib=shm and shm.free // 2**20,
        architecture=platform.machine(),
        kernel=platform.release(),
        interfaces=interfaces(),
        infiniband=infiniband(),
        infiniband_devices=Path("/dev/infiniband").is_dir(),
        gpus=gpu_facts,
        gpus_refused=refused,
        gpu_links=links,
        results=results,
        paths=paths,
        **processors(),
        disks=disks(),
    )


def processors() -> dict[str, Any]:
    """Return the model, sockets, cores, clock and caches of this node's CPUs, as far as the kernel knows them."""
    known = _cpuinfo()
    sockets, cores = set(known.get("physical id", ())), known.get("cpu cores")
    khz = text(CPU / "cpufreq/cpuinfo_max_freq") or ""
    return {
        "cpu": _model(known),
        "num_sockets": len(sockets) or None,
        "cores_per_socket": int(cores[0]) if cores and cores[0].isdigit() else None,
        "max_cpu_mhz": int(khz) // 1000 if khz.isdigit() else None,
        "cpu_caches": ", ".join(_caches()) or None,
    }


CPU = Path("/sys/devices/system/cpu/cpu0")
_KINDS = {"Data": "d", "Instruction": "i"}


def _caches() -> Iterator[str]:
    for folder in sorted((CPU / "cache").glob("index*")):
        level, kind, size = (text(folder / name) for name in ("level", "type", "size"))
        if level and size:
            yield f"L{level}{_KINDS.get(kind or '', '')} {size}"


SECTOR_BYTES = 512
"""The unit of /sys/block/*/size, for every disk."""
BLOCK = Path("/sys/block")


def disks() -> tuple[Disk, ...]:
    """Return the disks of this node, without loop devices and memory disks, which have no `device`."""
    listed = []
    for folder in sorted(BLOCK.glob("*")):
        sectors = text(folder / "size") or ""
        if (folder / "device").exists() and sectors.isdigit() and int(sectors):
            usual = "HDD" if text(folder / "queue/rotational") == "1" else "SSD"
            kind = {"nv": "NVMe SSD", "vd": "virtual disk"}.get(folder.name[:2], usual)
            gib = int(sectors) * SECTOR_BYTES // 2**30
            listed.append(Disk(folder.name, kind, gib, text(folder / "device/model")))
    return tuple(listed)


def cpu_model() -> str | None:
    return _model(_cpuinfo())


def _cpuinfo() -> dict[str, list[str]]:
    """Return the values of each field of /proc/cpuinfo, in the order of the CPUs."""
    values: dict[str, list[str]] = {}
    for line in (text(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), []).append(value.strip())
    return values


def _model(known: dict[str, list[str]]) -> str | None:
    return next(iter(known.get("model name", ())), None)


def operating_system() -> str | None:
    """Return the name and the version of the Linux distribution."""
    with suppress(OSError, KeyError):
        release = platform.freedesktop_os_release()
        return f"{release['NAME']} {release.get('VERSION', '')}".strip()
    return None


def interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces, sorted by name."""
    return tuple(
        Interface(
            name=link.name,
            state=text(link / "operstate"),
            speed_mbit=int(speed) if (speed := text(link / "speed") or "").isdigit() else None,
            addresses=addresses(link.name),
        )
        for link in sorted(Path("/sys/class/net").iterdir())
        if (link / "operstate").exists()
    )


def addresses(name: str) -> tuple[str, ...]:
    """Return an interface's first IPv4 address and its IPv6 addresses."""
    listed = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        answer = fcntl.ioctl(datagrams, GET_ADDRESS, struct.pack("256s", name[:15].encode()))
        listed.append(socket.inet_ntoa(answer[20:24]))
    for line in (text(Path("/proc/net/if_inet6")) or "").splitlines():
        address, *_, owner = line.split()
        if owner == name:
            listed.append(str(IPv6Address(int(address, 16))))
    return tuple(listed)


def infiniband() -> tuple[Port, ...]:
    return tuple(
        Port(
            port=f"{port.parent.parent.name}:{port.name}",
            state=text(port / "state"),
            physical=text(port / "phys_state"),
            link=text(port / "link_layer"),
            rate=text(port / "rate"),
        )
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    )


def gpus() -> tuple[tuple[GpuFacts, ...] | None, str | None, str | None]:
    """Return the GPUs, the error if they are unknown, and the topology table of their links."""
    if shutil.which("nvidia-smi") is None and KFD.exists():
        return *amd_gpus(), None
    if shutil.which("nvidia-smi") is None:
        return None, f"nvidia-smi{NOT_INSTALLED}", None
    tables = [f"--query-gpu={','.join(_GPU.values())}", f"--query-remapped-rows={','.join(_ROWS.values())}"]
    reasons = [f"--query-gpu=uuid,clocks_{name}_reasons.active" for name in ("event", "throttle")]  # new and old name
    links_of = ["--query-gpu=uuid,pcie.link.gen.max,pcie.link.width.max"]
    queries = [[query, "--format=csv,noheader,nounits"] for query in tables + reasons + links_of]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(nvidia_smi, [*queries, ["topo", "-m"]]))
    (refused, listed), (_, rows), *throttled, (_, pcie), (_, links) = results
    if listed is None:
        return None, refused, None
    remapped = {row["uuid"]: row for row in _table(rows, list(_ROWS))}
    active = {row["uuid"]: row for _, out in throttled for row in _table(out, ["uuid", "throttle"])}
    buses = {
        row["uuid"]: {"pcie": f"PCIe gen {row['gen']} x{row['width']}"}
        for row in _table(pcie, ["uuid", "gen", "width"])
        if row["gen"] and row["width"]
    }
    merged = (
        gpu | remapped.get(gpu["uuid"], {}) | active.get(gpu["uuid"], {}) | buses.get(gpu["uuid"], {})
        for gpu in _table(listed, list(_GPU))
    )
    return tuple(GpuFacts(**gpu) for gpu in merged), None, links


def amd_gpus() -> tuple[tuple[GpuFacts, ...] | None, str | None]:
    """Return AMD's GPUs, and the error if they are unknown."""
    if importlib.util.find_spec("amdsmi") is None:
        return None, f"amdsmi{NOT_INSTALLED}"
    refused, printed = printed_by([sys.executable, "-m", "jobs.node_checks.amd_gpus"])
    if printed is None:
        return None, (refused or "").splitlines()[-1].strip()  # of the traceback
    return tuple(GpuFacts(**gpu) for gpu in json.loads(printed)), None


def nvidia_smi(arguments: list[str]) -> tuple[str | None, str | None]:
    """Return (None, output), or (error, None)."""
    return printed_by(["nvidia-smi", *arguments])


def printed_by(command: list[str]) -> tuple[str | None, str | None]:
    """Return (None, output), or (error, None)."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    if done.returncode:
        return (done.stdout + done.stderr).strip() or f"exit code {done.returncode}", None
    return None, _COLOURS.sub("", done.stdout)


def memory_limit_gib() -> float | None:
    """Return the smallest memory limit of this process's control groups; None without a limit."""
    limit = host_memory.limit_bytes()
    return None if limit is None else round(limit / 2**30, 1)


def text(path: Path) -> str | None:
    """Return a file's stripped text; None if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def _table(out: str | None, names: list[str]) -> list[dict[str, Any]]:
    """Return nvidia-smi's CSV as rows; a value that is not available or not supported is None."""
    rows = csv.reader((out or "").splitlines(), skipinitialspace=True)
    return [
        {name: _value(name, cell) for name, cell in zip(names, row, strict=True)}
        for row in rows
        if len(row) == len(names)
    ]


def _value(name: str, cell: str) -> str | int | None:
    if name in _NUMBERS:
        return int(cell) if cell.isdigit() else None
    return None if cell.startswith("[") else cell
