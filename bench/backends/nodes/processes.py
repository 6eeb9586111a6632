"""Start and stop the ranks of one command on one node, as children of this process; each writes to its own file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from bench.contract import run_files
from bench.contract.plan import Command, Plan
from bench.errors import exit_code_of

GRACE_S = 10.0
"""How long a rank may take to end after SIGTERM before it is killed."""
POLL_S = 0.05
PACKAGES = Path(__file__).parents[3]
BOUND = Path(__file__).with_name("bound.py")
NOT_INHERITED = ("RUNSTOP_TOKEN", "SUBMITIT_LOCAL_GLOBALID", run_files.ATTEMPT_VARIABLE)
"""RUNSTOP_TOKEN is for the runner only; ranks would read SUBMITIT_LOCAL_GLOBALID as their rank, and the attempt of
another run as their own."""


NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class Ranks:
    """The processes of one command on this node."""

    def __init__(
        self, plan: Plan, command: Command, folder: Path, *, node: int, environment: Mapping[str, str]
    ) -> None:
        (folder / run_files.RANK_LOGS).mkdir(exist_ok=True)
        self._plan, self._command, self._folder, self._environment = plan, command, folder, environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts: dict[int, int] = {}
        count = plan.world.ranks_per_node
        try:
            for rank in range(node * count, (node + 1) * count):
                self._processes[rank] = self._start(rank)
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        world, argv = self._plan.world, self._command.argv
        words = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
        own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % world.ranks_per_node}", "WORLD_SIZE": f"{world.num_ranks}"}
        if rank in self._restarts:
            own[run_files.RESTART_VARIABLE] = f"{self._restarts[rank]}"
        output = self._folder / run_files.rank_output(self._command.name, rank)
        return start(words, self._folder, {**self._environment, **own}, output)

    def restart(self, ranks: Sequence[int]) -> None:
        """Stop these ranks if they still run, and start them again."""
        _end([self._processes[rank] for rank in ranks])
        self._restarts |= {rank: self._restarts.get(rank, 0) + 1 for rank in ranks}
        self._processes |= {rank: self._start(rank) for rank in ranks}

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended, by rank; above 128 for a signal."""
        codes = {rank: _exit_code(process.pid) for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self) -> None:
        """Stop all running ranks with their process groups and wait until they have ended."""
        _end(self._processes.values())
        self._processes.clear()


def _end(processes: Collection["subprocess.Popen[bytes]"]) -> None:
    pids = [process.pid for process in processes]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # no error for an ended process: it is not reaped before the loop below
    until_s = time.monotonic() + GRACE_S
    while time.monotonic() < until_s and any(_exit_code(pid) is None for pid in pids):
        time.sleep(POLL_S)
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit_code(pid: int) -> int | None:
    """Return the exit code of an ended child without reaping it, so that its pid is not reused."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return exit_code_of(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


def start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one, in its own process group, which Ctrl-C in a terminal does not reach."""
    bound = [sys.executable, "-I", "-S", str(BOUND), str(os.getpid())]
    with output.open("ab") as file:
        return subprocess.Popen(
            [*bound, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def run_program(words: Sequence[str], request: str = "", *, environment: Mapping[str, str] = NO_VARIABLES) -> int:
    """Run a Python module of `jobs` on this machine, with a text as its stdin, and return its exit code.

    The module shares this process's output. It has its own process group: Ctrl-C in a terminal ends it through this
    process, so that it prints no traceback while it imports.
    """
    argv, env = [sys.executable, "-m", *words], {**os.environ, **environment, **python_paths()}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, text=True, env=env, process_group=0) as process:
        try:
            process.communicate(request)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return exit_code_of(process.returncode)


def environment(own: Mapping[str, str], master: tuple[str, int], attempt: str | None = None) -> dict[str, str]:
    """Return the environment of this node's ranks: this process's, the plan's, the address of rank 0, their attempt."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    bound = {run_files.ATTEMPT_VARIABLE: attempt} if attempt else {}
    address = {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return inherited | dict(own) | address | bound | python_paths(own.get("PYTHONPATH", ""))


def python_paths(planned: str = "") -> dict[str, str]:
    """Return PYTHONPATH for ranks: this package, the plan's entries, and this process's.

    Empty or relative entries are left out: they would refer to the run folder.
    """
    entries = f"{planned}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".split(os.pathsep)
    paths = dict.fromkeys([str(PACKAGES), *filter(os.path.isabs, entries)])
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def drop_caches(words: Sequence[str], node: str) -> str:
    """Drop this node's page cache; return the report for the trial's log."""
    try:
        subprocess.run(["sync"], check=True, capture_output=True)
        subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return f"{node} kept"
    return f"{node} cleared"
