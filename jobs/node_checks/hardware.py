"""What a node is: CPUs, memory, network, InfiniBand, GPUs, limits. Read from the kernel and nvidia-smi; null where neither says.

Standard library only.
"""

import csv
import fcntl
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

TIMEOUT_S = 20
"""Longest wait for nvidia-smi; it hangs on a GPU that has fallen off the bus."""
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
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ROWS = {"uuid": "gpu_uuid", "rows_pending": "remapped_rows.pending", "rows_failed": "remapped_rows.failure"}
_NUMBERS = {"index", "memory_mib", "temperature_c", "sm_clock_mhz", "max_sm_clock_mhz", "ecc_uncorrected"}


def facts() -> dict[str, Any]:
    """Return everything, in units that the names say."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "cpu": _after(Path("/proc/cpuinfo"), "model name"),
        "num_cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "memory_limit_gib": memory_limit_gib(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "huge_pages": text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "shm_mib": shm and shm.total // 2**20,
        "shm_free_mib": shm and shm.free // 2**20,
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "interfaces": interfaces(),
        "infiniband": infiniband(),
        "infiniband_devices": Path("/dev/infiniband").is_dir(),
    } | gpus()


def interfaces() -> list[dict[str, Any]]:
    """Return the network interfaces by name, with their state (up, down, unknown) and addresses."""
    return [
        {
            "name": link.name,
            "state": text(link / "operstate"),
            "speed_mbit": int(speed) if (speed := text(link / "speed") or "").isdigit() else None,
            "addresses": addresses(link.name),
        }
        for link in sorted(Path("/sys/class/net").iterdir())
        if (link / "operstate").exists()
    ]


def addresses(name: str) -> list[str]:
    """Return an interface's first IPv4 address and its IPv6 ones."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, GET_ADDRESS, struct.pack("256s", name[:15].encode()))
        found.append(socket.inet_ntoa(answer[20:24]))
    for line in (text(Path("/proc/net/if_inet6")) or "").splitlines():
        address, *_, owner = line.split()
        if owner == name:
            found.append(str(IPv6Address(int(address, 16))))
    return found


def infiniband() -> list[dict[str, Any]]:
    """Return the InfiniBand and RoCE ports as NCCL_IB_HCA names them (mlx5_0:1), with state and rate."""
    return [
        {
            "port": f"{port.parent.parent.name}:{port.name}",
            "state": text(port / "state"),
            "physical": text(port / "phys_state"),
            "link": text(port / "link_layer"),
            "rate": text(port / "rate"),
        }
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    ]


def gpus() -> dict[str, Any]:
    """Return the GPUs, their links, and why they are not known: null, null and a reason where nvidia-smi cannot say."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": None, "gpus_refused": "there is no nvidia-smi", "gpu_links": None}
    questions = [f"--query-gpu={','.join(_GPU.values())}", f"--query-remapped-rows={','.join(_ROWS.values())}"]
    reasons = [f"--query-gpu=uuid,clocks_{name}_reasons.active" for name in ("event", "throttle")]  # new and old name
    asked = [[question, "--format=csv,noheader,nounits"] for question in questions + reasons]
    with ThreadPoolExecutor() as pool:
        (refused, listed), (_, rows), *throttled, (_, links) = pool.map(nvidia_smi, [*asked, ["topo", "-m"]])
    if listed is None:
        return {"gpus": None, "gpus_refused": refused, "gpu_links": None}
    pending = {row["uuid"]: row for row in _table(rows, list(_ROWS))}
    active = {row["uuid"]: row for _, out in throttled for row in _table(out, ["uuid", "throttle"])}
    none = {"rows_pending": None, "rows_failed": None, "throttle": None}
    found = [
        none | gpu | pending.get(gpu["uuid"], {}) | active.get(gpu["uuid"], {}) for gpu in _table(listed, list(_GPU))
    ]
    return {"gpus": found, "gpus_refused": None, "gpu_links": links}


def nvidia_smi(arguments: list[str]) -> tuple[str | None, str | None]:
    """Return (None, what it prints), or (why it prints nothing, None)."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    if done.returncode:
        return (done.stdout + done.stderr).strip() or f"exit code {done.returncode}", None
    return None, _COLOURS.sub("", done.stdout)


def memory_limit_gib() -> float | None:
    """Return the smallest limit of this process's control groups; None where there is none."""
    limits = []
    for line in (text(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, inside = line.split(":", 2)
        root, name = Path("/sys/fs/cgroup"), "memory.max"
        if controllers:  # version 1
            root, name = root / controllers, "memory.limit_in_bytes"
        group = root / inside.strip("/")
        while group.is_relative_to(root):
            limits.append(text(group / name))
            group = group.parent
    sizes = [int(limit) for limit in limits if limit and limit.isdigit()]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(min(sizes) / 2**30, 1) if sizes and min(sizes) < total else None


def text(path: Path) -> str | None:
    """Return a file's text without the white space around it; None where it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def _after(path: Path, key: str) -> str | None:
    """Return what stands behind the first `key:` of a file."""
    lines = (line.partition(":") for line in (text(path) or "").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def _table(out: str | None, names: list[str]) -> list[dict[str, Any]]:
    """Return nvidia-smi's CSV as rows; what it says is not available or supported is None."""
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
