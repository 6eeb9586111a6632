"""Keep what torch's flight recorder and NCCL's RAS know about a stall, for `why`.

torch records the last collectives of each rank, 2,000 by default (TORCH_FR_BUFFER_SIZE; before torch 2.9 it was called
TORCH_NCCL_TRACE_BUFFER_SIZE, and off). A rank that stalls writes its records to the run folder. If NCCL's own time-out
is first, torch writes them (TORCH_NCCL_DUMP_ON_TIMEOUT) to the same folder as a pickle. RAS is a service in each NCCL
process (2.24 and later) that knows the ranks that do not respond, and how many operations each has launched.

Source: torch 2.13.0, FlightRecorder.hpp; NCCL, src/ras/client.cc.
"""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from bench.contract import run_files

DUMP_ON_TIMEOUT, PREFIX, OLD_PREFIX = (
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
RAS_ADDRESS, RAS_PORT = "NCCL_RAS_ADDR", 28028
RAS_TIMEOUT_S, RAS_BYTES = 15.0, 1 << 20
"""RAS itself waits at least five seconds for processes that do not respond."""


def enable(folder: Path, command: str) -> None:
    """Make torch write its dumps to the run folder; call it before torch creates a process group."""
    prefix = str(folder / run_files.flight_record(command, ""))
    for name, value in ((DUMP_ON_TIMEOUT, "1"), (PREFIX, prefix), (OLD_PREFIX, prefix)):
        os.environ.setdefault(name, value)


def dump(folder: Path, command: str, rank: int) -> None:
    """Write this rank's last collectives as JSON; nothing without a process group, or if the disk is full."""
    if not (backend := _backend()):
        return
    c10d = sys.modules.get("torch._C._distributed_c10d")
    of_nccl = getattr(c10d, "_dump_nccl_trace_json", None) if "nccl" in backend else None
    records = of_nccl or getattr(c10d, "_dump_fr_trace_json", None)
    if records is None:  # an earlier torch
        return
    with suppress(OSError, RuntimeError):
        text: str | bytes = records(includeCollectives=True, onlyActive=False)
        path = folder / run_files.flight_record(command, f"{rank}.json")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def remove(folder: Path, command: str, rank: int) -> None:
    """Remove what this rank wrote, because it continues."""
    (folder / run_files.flight_record(command, f"{rank}.json")).unlink(missing_ok=True)
    (folder / run_files.ras_report(command, rank)).unlink(missing_ok=True)


def _backend() -> str:
    """Return the backends of the process group, such as `cpu:gloo,cuda:nccl`; empty without one, and without torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    return str(distributed.get_backend_config())


def ask_ras(folder: Path, command: str, rank: int, *, timeout_s: float) -> None:
    """Write what NCCL's RAS on this node reports, if it answers in time."""
    if "nccl" not in _backend():
        return
    host, _, port = os.environ.get(RAS_ADDRESS, f"localhost:{RAS_PORT}").rpartition(":")
    with suppress(OSError, ValueError):
        text = ras_status(host, int(port), timeout_s=min(timeout_s, RAS_TIMEOUT_S))
        (folder / run_files.ras_report(command, rank)).write_text(text)


def ras_status(host: str, port: int, *, timeout_s: float = RAS_TIMEOUT_S) -> str:
    """Return the status of all communicators from RAS, as `ncclras -v` prints it.

    Raises:
        OSError: it does not answer.
    """
    answer = b""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(b"VERBOSE STATUS\n")
        while len(answer) < RAS_BYTES and (part := connection.recv(1 << 16)):
            answer += part
    return answer.decode(errors="replace")
