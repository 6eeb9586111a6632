"""How a running job is broken from outside: its processes, its sockets, its clock, its disk, its nodes."""

import ctypes
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
    """A run that is being broken, and who started it."""

    user: User
    run: Run

    def wait_for_training(self, trial: int, *, attempts: int = 1) -> None:
        """Wait until the clock of an attempt at a trial runs."""
        begun = lambda: len(self.run.ledger[trial].get("attempts", ())) == attempts  # noqa: E731
        until(lambda: begun() and training(self.run, trial)(), 900, self.run)

    def wait_for_requeue(self, timeout_s: float = 240) -> None:
        self.user.cluster.wait_for_state(self.run.job, REQUEUED, timeout_s)

    def slurm(self, *words: object) -> str:
        """Return what a command of Slurm's printed."""
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
            if words:  # else it is a zombie
                yield int(folder.name), words, {name: value for name, _, value in pairs}


def ranks(run: Run) -> list[int]:
    """Return the process ids of the ranks that train, in the order of their ranks."""
    found = {
        int(environment["SLURM_PROCID"]): pid
        for pid, words, environment in of_job(run.job)
        if "python" in words[0] and "jobs.tasks.train" in words
    }
    return [found[rank] for rank in sorted(found)]


def batch_script(run: Run) -> int:
    """Return the process id of the bash that runs the batch script."""
    return next(
        pid for pid, words, _ in of_job(run.job) if Path(words[0]).name == "bash" and "slurm_script" in words[1]
    )


def srun_of_trial(run: Run) -> int:
    """Return the process id of the srun that the ranks belong to; its own child of the same name is left out."""
    found = [pid for pid, words, _ in of_job(run.job) if words[0] == "srun" and "jobs.tasks.train" in words]
    return min(found)


def send(number: signal.Signals, rank: int = -1) -> Callable[[Scene], None]:
    """Return what sends a signal to a rank that trains, the last one by default."""
    return lambda scene: os.kill(ranks(scene.run)[rank], number)


# --- Sockets. A descriptor of the rank's own socket is taken over, so nothing else on this machine is touched.


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """Yield the open TCP connections of a process."""
    process = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if not str(link.readlink()).startswith("socket:"):
                continue
            if (taken := _libc.syscall(_PIDFD_GETFD, process, int(link.name), 0)) < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            found = socket.socket(fileno=taken)
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            if is_tcp and found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01":  # established
                yield found
            else:
                found.close()
    finally:
        os.close(process)


def reset_connections(scene: Scene) -> None:
    """Both ends of every connection of the last rank get a reset: connect() to no address disconnects."""
    for connection in sockets_of(ranks(scene.run)[-1]):
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            _libc.connect(connection.fileno(), bytes(16), 16)


def drop_packets(scene: Scene, *, for_s: float | None = None) -> None:
    """Every packet that arrives on a connection between ranks is dropped: for a while, or for ever."""
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
    """Leave no room on a disk."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 20))
