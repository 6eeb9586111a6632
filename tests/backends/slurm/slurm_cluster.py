"""A Slurm cluster that cluster.sh boots; the fixture `cluster` yields it."""

import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "cluster.sh"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two or more nodes, dgx-0, dgx-1, …, of 8 GPUs each; partitions batch and low, account test.

    `env` is the environment of the login node; `folder` has Slurm's configuration and logs.
    """

    folder: Path
    env: dict[str, str]

    def run(
        self, argv: Sequence[object], *, timeout_s: float = 60, check: bool = False, env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the login node, for example `["srun", "hostname"]`."""
        return subprocess.run(
            [str(argument) for argument in argv],
            env=env or self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def kill_node(self, name: str) -> None:
        """Cut a node's power: every process on it dies at once. Slurm detects that after 16 s or more."""
        self._manage("kill-node", name)

    def start_node(self, name: str) -> None:
        """Boot a node unless it is up; jobs that were running on it have failed."""
        self._manage("start-node", name)

    def wait_for_state(self, job_id: str | int, states: str | Collection[str], timeout_s: float = 60) -> str:
        """Return the state of a job as soon as it is one of `states`."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout_s
        while (state := self._state(job_id)) not in wanted:
            if time.monotonic() > deadline:
                shown = self.run(["scontrol", "show", "job", job_id])
                raise TimeoutError(f"job {job_id}: {state}, not one of {wanted}, after {timeout_s} s\n{shown.stdout}")
            time.sleep(0.2)
        return state

    def clear(self, *, spare: Path | None = None) -> None:
        """Boot the nodes and end all jobs except those that were submitted below a folder."""
        self._manage("up")
        deadline = time.monotonic() + 60
        while jobs := [job for job, where in self._jobs() if spare is None or not where.is_relative_to(spare)]:
            assert time.monotonic() < deadline, f"jobs {jobs} do not end"
            self.run(["scancel", *jobs])
            time.sleep(0.2)
        self._manage("up")  # nodes on which a dead job was still completing

    def _jobs(self) -> list[tuple[str, Path]]:
        """Return the jobs that have not ended, and where each was submitted."""
        lines = self.run(["squeue", "-h", "-o", "%A %Z"], check=True).stdout.splitlines()
        return [(job, Path(where)) for job, _, where in (line.partition(" ") for line in lines)]

    def boot(self) -> None:
        """Start the cluster; install Slurm's packages if they are missing."""
        self._manage("up")

    def remove(self) -> None:
        """Stop the cluster and delete its folder."""
        self._manage("down")

    def _state(self, job_id: str | int) -> str:
        shown = self.run(["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"])
        return shown.stdout.strip() or shown.stderr.strip()

    def _manage(self, *verb: str) -> None:
        done = self.run([SCRIPT, *verb], timeout_s=600)
        assert done.returncode == 0, f"{SCRIPT.name} {' '.join(verb)}: exit code {done.returncode}\n{done.stderr}"


@contextmanager
def running(*, num_nodes: int = 2, loses_nodes: bool = True) -> Iterator[Cluster]:
    """Boot a cluster in a separate folder for the duration of the block.

    loses_nodes: whether it is used to kill nodes. If not, it waits for nodes that answer late on a busy machine.
    """
    folder = Path(tempfile.mkdtemp(prefix="runstop-slurm-", dir="/tmp"))  # not tmp_path: Unix sockets need a short path
    booted = describe(folder, num_nodes=num_nodes)
    if not loses_nodes:
        booted.env["RUNSTOP_SLURM_EXTRA"] = "MessageTimeout=30\nSlurmdTimeout=120"
    try:
        booted.boot()
        yield booted
    finally:
        booted.remove()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small file system; None where mounting is not allowed.

    Mount it before the nodes boot, since they see the mounts of that time.
    """
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield folder if is_mounted else None
    if is_mounted:
        subprocess.run(["umount", folder], check=True)


def describe(folder: Path, *, num_nodes: int = 2) -> Cluster:
    """Return a cluster that `boot` starts in `folder`, on ports that are free now."""
    removed = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "RUNSTOP_SLURM_DIR", "RUNSTOP_SLURM_PORTS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    env |= {"RUNSTOP_SLURM_DIR": str(folder), "RUNSTOP_SLURM_PORTS": str(free_ports(2 + num_nodes))}
    env["RUNSTOP_SLURM_NODES"] = str(num_nodes)
    return Cluster(folder=folder, env=env | {"SLURM_CONF": f"{folder}/slurm.conf"})


def free_ports(count: int) -> int:
    """Return the first of `count` adjacent free ports below the ephemeral port range."""
    while True:
        first = random.randrange(18000, 32000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
