"""Inject faults into a running job: into its processes, sockets, clock, disk and nodes."""

import ctypes
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from user import Run, User, training, until

REQUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_PIDFD_GETFD = 438
"""The number of this system call on every architecture: a file descriptor of another process."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Scene:
    """A run that gets a fault, and its user."""

    user: User
    run: Run

    def wait_for_training(self, trial: int, *, attempts: int = 1) -> None:
        """Wait until an attempt of a trial is in its timed part."""
        begun = lambda: len(self.run.ledger[trial].get("attempts", ())) == attempts  # noqa: E731
        until(lambda: begun() and training(self.run, trial)(), 900, self.run)

    def wait_for_requeue(self, timeout_s: float = 240) -> None:
        self.user.cluster.wait_for_state(self.run.job, REQUEUED, timeout_s)

    def slurm(self, *words: object) -> str:
        """Return the output of a Slurm command."""
        return self.user.cluster.run(words, check=True).stdout


# --- Processes


def of_job(job: str) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Yield process id, command line and environment of every process that a job has started on this machine."""
    mark = f"\0SLURM_JOB_ID={job}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            raw = (folder / "environ").read_bytes()
            if mark not in b"\0" + raw:
                continue
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0"))
            if words:  # a zombie has none
                yield int(folder.name), words, {name: value for name, _, value in pairs}


def ranks(run: Run) -> list[int]:
    """Return the process ids of the ranks that train, in the order of their ranks."""
    pids = {
        int(environment["SLURM_PROCID"]): pid
        for pid, words, environment in of_job(run.job)
        if "python" in words[0] and "jobs.tasks.train" in words
    }
    return [pids[rank] for rank in sorted(pids)]


def batch_script(run: Run) -> int:
    """Return the process id of the bash that runs the batch script."""
    return next(
        pid for pid, words, _ in of_job(run.job) if Path(words[0]).name == "bash" and "slurm_script" in words[1]
    )


def srun_of_trial(run: Run) -> int:
    """Return the process id of the srun that the ranks belong to; its own child of the same name is left out."""
    pids = [pid for pid, words, _ in of_job(run.job) if words[0] == "srun" and "jobs.tasks.train" in words]
    return min(pids)


def send(number: signal.Signals, rank: int = -1) -> Callable[[Scene], None]:
    """Return a fault that sends a signal to a training rank, the last one by default."""
    return lambda scene: os.kill(ranks(scene.run)[rank], number)


# --- Sockets. The descriptor of the rank's own socket is duplicated, so no other process is affected.


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """Yield the open TCP connections of a process; it may open and close others meanwhile."""
    process = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not str(link.readlink()).startswith("socket:"):
                    continue
                if (taken := _libc.syscall(_PIDFD_GETFD, process, int(link.name), 0)) < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                connection = socket.socket(fileno=taken)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EBADF, errno.ENOTSOCK):  # closed, and maybe opened again
                    continue
                raise
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if is_tcp and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01":  # established
                yield connection
            else:
                connection.close()
    finally:
        os.close(process)


def reset_connections(scene: Scene) -> None:
    """Reset every connection of the last rank at both ends: connect() to no address disconnects."""
    for connection in sockets_of(ranks(scene.run)[-1]):
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            _libc.connect(connection.fileno(), bytes(16), 16)


def drop_packets(scene: Scene, *, for_s: float | None = None) -> None:
    """Drop every packet that arrives on a connection between ranks, for a time or permanently."""
    taken = [connection for pid in ranks(scene.run) for connection in sockets_of(pid)]
    assert taken, "the ranks have no connections"
    for connection in taken:
        code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: keep nothing of a packet
        program = struct.pack("HP", 1, ctypes.addressof(code))
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    if for_s is not None:
        time.sleep(for_s)
        for connection in taken:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, struct.pack("i", 0))
    for connection in taken:
        connection.close()


def fill(disk: Path) -> None:
    """Fill a disk."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 20))
