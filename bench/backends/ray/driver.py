"""The driver of a Ray job: `python -m bench.backends.ray.driver RUN…`, run by Ray on its head.

It takes the nodes of a run, starts `bench.driver` on each of them, and ends with the exit code of the run. Where a node
is lost it takes nodes anew and starts the run's next attempt there, as Slurm does. Several runs follow each other on
the same nodes.
"""

import argparse
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.backends.nodes.channel import TOKEN
from bench.backends.nodes.interruption import START_AGAIN
from bench.backends.ray import placement_group as groups
from bench.backends.ray.placement_group import Ended, Group, LostError, explained
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import NODE_VARIABLE, PLAN, RAY_OUTPUT, STATUS
from bench.errors import BenchError, Stopped, with_rule
from bench.rules.registry import RULES

POLL_S = 1.0
ANSWER_S = 60.0
OTHERS_S = 120.0
"""How long the lead may take to notice that another node is lost and to write it down, and the others to end too."""


@dataclass(slots=True)
class Runners:
    """The runners of all nodes, by their calls that have not returned."""

    group: Group
    calls: dict[Any, int]
    ended: dict[int, Ended] = field(default_factory=dict)
    lost: dict[int, LostError] = field(default_factory=dict)

    def look(self, wait_s: float = POLL_S) -> None:
        """Take in which of them have ended, and how, after at most so long."""
        import ray

        done, _ = ray.wait(list(self.calls), timeout=wait_s) if self.calls else ([], [])
        for call in done:
            number = self.calls.pop(call)
            try:
                self.ended[number] = ray.get(call)
            except ray.exceptions.RayError as error:
                self.lost[number] = explained(error, f"node {number} ({self.group.names[number]}) is lost")

    def wait(self, within_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end of all of them, or for something else."""
        until_s = time.monotonic() + within_s
        while self.calls and not until() and time.monotonic() < until_s:
            self.look()

    def stop(self) -> None:
        """Tell all that run to end, and wait until they have."""
        for number in self.calls.values():
            self.group.actors[number].stop.remote()
        self.wait(OTHERS_S)


class Driver(Protocol):
    """Who runs attempts: the job."""

    run: Path

    def say(self, text: str) -> None: ...
    def check(self) -> None: ...


def run_attempt(group: Group, words: Sequence[str], driver: Driver) -> int:
    """Return the exit code of the lead's runner; START_AGAIN is one.

    Raises:
        LostError: the run cannot go on on these nodes.
        Stopped: the job was told to end, and all runners have ended.
    """
    folder, say = driver.run, driver.say
    runners = start_runners(group, words, folder)
    try:
        while not (runners.lost or runners.ended):
            driver.check()
            runners.look()
        runners.wait(OTHERS_S, until=lambda: 0 in runners.ended or 0 in runners.lost)
        runners.wait(OTHERS_S if 0 in runners.ended else 0)
    finally:
        runners.stop()
    if runners.lost and not (0 in runners.ended and runners.ended[0].exit_code == 0):
        raise next(iter(runners.lost.values()))
    if 0 not in runners.ended:
        raise LostError("RAY-04", f"node 0 ({group.names[0]}) does not end, though others have")
    if not (folder / STATUS).exists() and runners.ended[0].exit_code != START_AGAIN:
        announce_runners(runners, say)
    return runners.ended[0].exit_code


def announce_runners(runners: Runners, say: Callable[[str], None]) -> None:
    """Say what runners printed last, where they could not write how the run ended."""
    for number, ended in sorted(runners.ended.items()):
        say(f"node {number} ({runners.group.names[number]}): exit code {ended.exit_code}")
        for line in ended.last_lines:
            say(line)


def start_runners(group: Group, words: Sequence[str], folder: Path) -> Runners:
    """Start a runner on every node.

    Raises:
        LostError: the first node does not see the run folder, or does not answer.
    """
    import ray

    lead = group.actors[0]
    try:
        port, sees = ray.get([lead.free_port.remote(), lead.sees.remote(str(folder / PLAN))], timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        raise explained(error, f"node 0 ({group.names[0]}) is lost") from error
    if not sees and "--plan" not in words:
        raise LostError("RAY-09", f"node 0 ({group.names[0]}) does not see {folder / PLAN}")
    token, address = secrets.token_hex(32), f"{group.places[0].address}:{port}"
    calls = {}
    for number, (actor, name) in enumerate(zip(group.actors, group.names, strict=True)):
        own = ["-m", "bench.driver", str(folder), "--node", str(number), "--lead", address, *words]
        calls[actor.run.remote(own, {TOKEN: token, NODE_VARIABLE: name})] = number
    return Runners(group, calls)


JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for a driver: its runtime_env and metadata. Source: ray/_private/runtime_env/constants.py."""
FINAL = ("RAY-02", "RAY-03", "RAY-07", "RAY-09")
"""Rules that other nodes would break as well, or that say that there are none."""


@dataclass(slots=True)
class DriverJob:
    """This job; what it says goes to Ray's log, and into the folder of the run under way."""

    id: str
    plan_file: Path | None
    limit_min: float | None
    walltime_min: int | None
    run: Path
    group: Group | None = None
    signum: int | None = None
    """Of the signal that has told this process to end. Ray's calls swallow what a signal's handler raises."""

    def listen(self) -> None:
        """Take note of signals; Ray's own handlers are set before."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._told)

    def _told(self, signum: int, frame: object) -> None:
        self.signum = signum

    def check(self) -> None:
        """Raise Stopped if this process has been told to end."""
        if self.signum is not None:
            signum, self.signum = self.signum, None  # what ends the run must not be ended itself
            raise Stopped(signum)

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.run.is_dir():
            with suppress(OSError), (self.run / RAY_OUTPUT).open("a") as file:
                file.write(f"{text}\n")


def main() -> None:
    args = _parser().parse_args()
    runs = [path.absolute() for path in args.runs]
    job = DriverJob(args.job or _own_id(), args.plan, args.limit_min, args.walltime, runs[0])
    try:
        sys.exit(_drive(job, runs))
    except BenchError as error:
        job.say(str(error))
        sys.exit(error.exit_code)
    except Stopped as stop:
        sys.exit(stop.exit_code)


def _drive(job: DriverJob, runs: list[Path]) -> int:
    import ray

    all_plans = [_plan(job, run) for run in runs]
    ray.init(address="auto", logging_level=logging.WARNING)
    job.listen()
    codes = []
    for job.run, plan in zip(runs, all_plans, strict=True):
        try:
            codes.append(_run(job, plan))
        except Stopped:
            job.say(f"{time.strftime('%F %T')} the job was told to end")
            if not (job.run / STATUS).exists():
                _close(job, plan, with_rule("SLU-08", "the job was cancelled"))
            raise
    return max(codes)


def _plan(job: DriverJob, run: Path) -> Plan:
    """Return the plan of a run.

    Raises:
        BenchError: this host does not see its folder.
    """
    if job.plan_file is None and not run.is_dir():
        what, fix = "the head does not see the run folder", RULES["RAY-09"].fix
        raise BenchError(what, where=str(run), fix=fix, rule="RAY-09")
    return plan_kinds.load(job.plan_file or run / PLAN)


def _run(job: DriverJob, plan: Plan) -> int:
    """Return the exit code of a run, after as many attempts as lost nodes make necessary."""
    for number in range(plan.config.launch.attempts):
        is_last = number + 1 == plan.config.launch.attempts
        try:
            if job.group is None:
                job.group = groups.take(plan, job.say, check=job.check)
            job.say(f"job {job.id}, attempt {number}, on {', '.join(job.group.names)}")
            code = run_attempt(job.group, _words(job, number, is_last=is_last), job)
        except LostError as lost:
            job.say(f"{time.strftime('%F %T')} {lost}")
            if job.group is not None:
                groups.release(job.group)
            job.group, code = None, START_AGAIN
            if is_last or lost.rule in FINAL:
                return _close(job, plan, str(lost))
        if code != START_AGAIN:
            return code if (job.run / STATUS).exists() else _close(job, plan, f"the run ended with exit code {code}")
    raise AssertionError("the last attempt's runner does not ask for another one")


def _words(job: DriverJob, number: int, *, is_last: bool) -> list[str]:
    """Return what the runner of every node gets besides the run folder, its number and the lead's address."""
    return [
        *("--job", job.id, "--attempt", str(number)),
        *([] if is_last else ["--restarts"]),
        *([] if job.limit_min is None else ["--limit-min", f"{job.limit_min:g}"]),
        *([] if job.walltime_min is None else ["--trial-min", str(job.walltime_min)]),
        *([] if job.plan_file is None else ["--plan", str(job.plan_file)]),
    ]


def _close(job: DriverJob, plan: Plan, what: str) -> int:
    """Write the last word of a run that no runner can write; return its exit code."""
    if not job.run.is_dir():
        return 1
    trials = " ".join(str(trial.index) for trial in plan.trials)
    for words in (["open", "--job", job.id], ["close", "--exit-code", "1", "--what", what, "--trials", trials]):
        argv = [sys.executable, "-m", "bench.driver.between_commands", str(job.run), *words]
        subprocess.run(argv, cwd=job.run, env=_environment(), stdin=subprocess.DEVNULL, check=False)
    return 1


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if Path(path).is_absolute())}


def _own_id() -> str:
    """Return how Ray calls this job where its entrypoint does not say it, as in a manifest."""
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(os.environ.get(JOB_CONFIG, "")).get("metadata", {}).get("job_submission_id") or "ray")
    return "ray"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.backends.ray.driver", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, as every node sees them")
    parser.add_argument("--job", help="the id of this job (default: as Ray calls it)")
    parser.add_argument("--plan", type=Path, help="the plan of a run folder that is still to be made")
    parser.add_argument("--limit-min", type=float, metavar="MIN", help="end each run in order after so long")
    parser.add_argument("--walltime", type=int, metavar="MIN", help="of each trial (default: the plan's)")
    return parser


if __name__ == "__main__":
    main()
