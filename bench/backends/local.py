"""This machine as a backend: start the ranks of a command through submitit's local executor, and know how they end."""

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.backends import run_lock
from bench.backends.local_checks import CHECKS, VISIBLE, names_gpus, visible_gpus
from bench.backends.protocol import Job, JobState
from bench.contract import plan as plans
from bench.contract import run_files
from bench.contract.plan import Command, Plan
from bench.contract.schema import PORTS, Device
from bench.errors import BenchError, ConfigError, SubmitError
from bench.rules.check import Check, Subject, Tier

POLL_S = 0.2
GRACE_S = 10.0
"""How long a rank may take to end once it is told to."""
SIGNAL_DELAY_S = 10
"""What submitit leaves between saying that time is up and killing."""
TIME_IS_UP = 124
"""Exit code of a rank that walltime ended; the same as timeout(1)'s."""
NO_LIMIT_MIN = 60 * 24 * 365
PACKAGES = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class RankCommand:
    """One rank's command; submitit runs it in a process of its own and keeps its output."""

    argv: list[str]
    folder: str
    environment: dict[str, str]
    alive: str
    """A file that bench.launch keeps locked: when the lock is gone, so is the launcher, and the rank ends too."""

    def __call__(self) -> int:
        """Return the exit code, negative for a signal."""
        process = subprocess.Popen(self.argv, cwd=self.folder, env=os.environ | self.environment)
        told: list[int] = []
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(name, lambda signum, frame: told.append(signum))
        while process.poll() is None:
            if told or not run_lock.is_locked(self.alive):
                code = _end(process)
                return TIME_IS_UP if signal.SIGUSR2 in told else code  # USR2 is submitit's word for it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        return process.returncode


class Ranks:
    """The processes of one command."""

    def __init__(self, job: Any, command: Command, folder: Path) -> None:
        self._job, self._command, self._folder = job, command, folder
        self._exit_codes: dict[int, int] = {}

    def are_running(self) -> bool:
        """Return whether all is well and work goes on; False as soon as one rank has failed."""
        self._exit_codes = self._collected()
        return not self._job.done() and not any(self._exit_codes.values())

    def stop(self) -> None:
        """End what still runs, and wait until it has. How ranks end from here on is our doing and says nothing."""
        self._exit_codes = self._collected()
        if not self._job.done():
            os.kill(int(self._job.job_id), signal.SIGTERM)  # submitit's controller passes it on to every task
        deadline = time.monotonic() + GRACE_S + 5
        while not self._job.done() and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        if not self._job.done():
            os.kill(int(self._job.job_id), signal.SIGKILL)  # ranks end with the launcher's lock, which goes next
        for pickled in (self._folder / run_files.RANK_LOGS).glob(f"{self._job.job_id}_*.pkl"):
            pickled.unlink()

    def check(self) -> None:
        """Raise the reason if a rank failed: the signal that killed it, or its own account.

        Raises:
            SubmitError: with the exit code that the rank's error asks for.
        """
        codes, logs = self._exit_codes, self._folder / run_files.RANK_LOGS
        if len(codes) == self._job.num_tasks and not any(codes.values()):
            return
        if TIME_IS_UP in codes.values():
            raise SubmitError(
                f"{self._command.name} took longer than its walltime",
                where="walltime",
                fix="raise walltime (minutes per trial), or set it to null",
                rule="SLU-07",
            )
        signals = {rank: abs(code) % 128 for rank, code in codes.items() if not 0 <= code <= 128}
        if ended := {rank: signal.Signals(number).name for rank, number in signals.items()}:
            raise SubmitError(
                f"{', '.join(f'rank {r} got {name}' for r, name in sorted(ended.items()))} during {self._command.name}",
                where=str(logs / f"{self._job.job_id}_{min(ended)}_log.err"),
                fix="look for what ends processes on this machine: memory, a time limit, a person",
                rule="RUN-02",
            )
        if (first := first_error(self._folder, self._command)) is not None:
            raise first
        raise SubmitError(
            f"{self._command.name} ended without a result; exit codes by rank: {codes}",
            where=str(logs),
            fix="read the *_log.err there",
        )

    def _collected(self) -> dict[int, int]:
        """Return the exit code of each rank that has ended, negative for a signal that killed it."""
        from submitit.core import utils

        codes = {}
        for rank in range(self._job.num_tasks):
            result = self._job.task(rank).paths.result_pickle
            if result.exists():
                outcome, value = utils.pickle_load(result)
                codes[rank] = value if outcome == "success" else 1
        return codes


class LocalBackend:
    """Ranks are children of the process that asks for the run; it drives the commands, and they end with it."""

    tiers: tuple[Tier, ...] = ("laptop",)
    files_tier: Tier = "laptop"

    def is_here(self) -> bool:
        return True

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": CHECKS}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        return Subject(plan, "")

    def render(self, plan: Plan) -> str:
        raise ConfigError(
            "a run on this machine has no script: bench.launch starts its ranks itself",
            where=f"cluster={plan.config.cluster.name}",
            fix="choose a cluster with a queue, such as cluster=dgx1; `python -m bench plan --json` prints the plan",
        )

    def differences(self, rendered: str, plan_json: str) -> Iterator[str]:
        yield "a run on this machine has no script"

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        """Return what ranks get beside this process's environment: submitit would show them GPUs 0, 1, … otherwise."""
        gpus = {VISIBLE: ",".join(visible_gpus(plan) or [])} if names_gpus(plan) else {}
        python = {"PYTHONPATH": _python_path(), "PYTHONSAFEPATH": "1"}
        return plan.environment | gpus | rendezvous(plan) | python

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return where runs stand; the id of a run on this machine is its folder."""
        return {folder: _state(folder) for folder in ids}

    def cancel(self, job: str) -> None:
        host, pid = run_lock.driver(Path(job)) or ("", 0)
        if host != socket.gethostname():
            what = f"the run is driven on {host}" if host else "no process drives the run"
            raise SubmitError(what, where=job, fix="end it on the machine where it was started")
        os.kill(pid, signal.SIGTERM)


def _state(folder: str) -> Job:
    if run_lock.driver(Path(folder)) is not None:
        return Job(id=folder, state=JobState.running, word="running")
    return Job(id=folder, state=JobState.failed, word="ended")


@contextlib.contextmanager
def started(plan: Plan, command: Command, folder: Path) -> Iterator[Ranks]:
    """Start a command's ranks; when the block is left, for whatever reason, none of them runs any more."""
    os.environ["SUBMITIT_LOG_LEVEL"] = "NOCONFIG"
    import submitit

    for old in folder.glob(run_files.rank_error(command.name, "*")):
        old.unlink()
    num_gpus = plan.world.ranks_per_node * plans.gpus_per_rank(plan.config)
    executor = submitit.LocalExecutor(folder=folder / run_files.RANK_LOGS)
    executor.update_parameters(
        tasks_per_node=plan.world.num_ranks,
        gpus_per_node=num_gpus if plan.config.cluster.device is Device.cuda else 0,
        timeout_min=(command.limit_min or NO_LIMIT_MIN) + SIGNAL_DELAY_S / 60,
        signal_delay_s=SIGNAL_DELAY_S,
    )
    lock = folder / run_files.COMMAND_LOCK
    rank_command = RankCommand(
        argv=[sys.executable if command.argv[0] == "python" else command.argv[0], *command.argv[1:]],
        folder=str(folder),
        environment=LocalBackend().rank_environment(plan),
        alive=str(lock),
    )
    with lock.open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        with _deaf_to_interrupts():
            running = Ranks(executor.submit(rank_command), command, folder)
        try:
            yield running
        finally:
            running.stop()


def rendezvous(plan: Plan) -> dict[str, str]:
    """Return where the ranks of this machine meet: the cluster's port, or a free one."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.config.cluster.master_port or free_port())}


def free_port() -> int:
    """Return a port that nobody listens on; of PORTS, or another program may have it before the ranks do."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise SubmitError(
        f"no port from {PORTS.start} to {PORTS.stop - 1} is free", where="127.0.0.1", fix="set cluster.master_port"
    )


def first_error(folder: Path, command: Command) -> BenchError | None:
    """Return what the rank that failed first said; the others mostly say that it is gone."""
    accounts = []
    for path in folder.glob(run_files.rank_error(command.name, "*")):
        with contextlib.suppress(OSError, ValueError):
            accounts.append(json.loads(path.read_text()))
    if not accounts:
        return None
    first = min(accounts, key=lambda account: account["time"])
    error = SubmitError(first["what"], where=first["where"], fix=first["fix"], rule=first.get("rule"))
    error.exit_code = first["exit_code"]
    return error


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started here ignores Ctrl-C, which a terminal sends to every process: only `stop` ends it, in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _python_path() -> str:
    """Return where ranks import from; an empty or relative entry would be the run folder, in which they start."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(PACKAGES), *filter(os.path.isabs, entries)])
