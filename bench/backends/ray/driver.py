"""The driver of a Ray job: `python -m bench.backends.ray.driver RUN…`, started by Ray on the head node.

It reserves the nodes of a run, starts `bench.driver` on each of them, and exits with the exit code of the run. If a
node is lost, it reserves new nodes and starts the run's next attempt there, as Slurm does. Several runs run one after
another on the same nodes.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bench import masked_json
from bench.backends.nodes.channel import TOKEN
from bench.backends.nodes.interruption import RESTART_EXIT_CODE
from bench.backends.ray import placement_group as groups
from bench.backends.ray.placement_group import Ended, Group, LostError, lost_error
from bench.contract import atomic_files, node_lists, plan_kinds, regular_files
from bench.contract.plan import Plan
from bench.contract.run_files import (
    CANCELLED,
    JOB,
    NODE_VARIABLE,
    PLAN,
    RAY_OUTPUT,
    SPARE_NODES,
    STATUS,
)
from bench.errors import BenchError, Stopped, with_rule
from bench.rules.registry import RULES

POLL_S = 1.0
ANSWER_S = 60.0
OTHERS_S = 120.0
"""How long the lead node may take to detect and record the loss of another node, and the other nodes to end."""


@dataclass(slots=True)
class Runners:
    """The runners of all nodes; `calls` are the actor calls that have not returned."""

    group: Group
    calls: dict[Any, int]
    ended: dict[int, Ended] = field(default_factory=dict)
    lost: dict[int, LostError] = field(default_factory=dict)

    def look(self, wait_s: float = POLL_S) -> None:
        """Wait at most `wait_s`, and record the runners that have ended."""
        import ray

        done, _ = ray.wait(list(self.calls), timeout=wait_s) if self.calls else ([], [])
        for call in done:
            number = self.calls.pop(call)
            try:
                self.ended[number] = ray.get(call)
            except ray.exceptions.RayError as error:
                self.lost[number] = lost_error(error, f"node {number} ({self.group.names[number]}) is lost")

    def wait(self, within_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until all runners have ended or `until` returns True."""
        until_s = time.monotonic() + within_s
        while self.calls and not until() and time.monotonic() < until_s:
            self.look()

    def stop(self) -> None:
        """Stop all running runners and wait until they have ended."""
        for number in self.calls.values():
            self.group.actors[number].stop.remote()
        self.wait(OTHERS_S)


class Driver(Protocol):
    """The job, as `run_attempt` needs it."""

    run: Path

    def say(self, text: str) -> None: ...
    def check(self) -> None: ...


def run_attempt(group: Group, words: Sequence[str], driver: Driver) -> int:
    """Run one attempt and return the exit code of the lead node's runner, which may be RESTART_EXIT_CODE.

    Raises:
        LostError: the run cannot continue on these nodes.
        Stopped: the job was stopped, and all runners have ended.
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
        raise LostError("RAY-04", f"all other nodes have ended, but node 0 ({group.names[0]}) has not ended")
    if not (folder / STATUS).exists() and runners.ended[0].exit_code != RESTART_EXIT_CODE:
        announce_runners(runners, say)
    return runners.ended[0].exit_code


def announce_runners(runners: Runners, say: Callable[[str], None]) -> None:
    """Print the last lines of all runners, if they could not write the run's status."""
    for number, ended in sorted(runners.ended.items()):
        say(f"node {number} ({runners.group.names[number]}): exit code {ended.exit_code}")
        for line in ended.last_lines:
            say(line)


def start_runners(group: Group, words: Sequence[str], folder: Path) -> Runners:
    """Start a runner on every node.

    Raises:
        LostError: the first node cannot read the run folder, or does not answer.
    """
    import ray

    lead = group.actors[0]
    try:
        port, exists = ray.get([lead.free_port.remote(), lead.exists.remote(str(folder / PLAN))], timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        raise lost_error(error, f"node 0 ({group.names[0]}) is lost") from error
    if not exists and "--plan" not in words:
        raise LostError("RAY-09", f"node 0 ({group.names[0]}) cannot read {folder / PLAN}")
    token, address = secrets.token_hex(32), f"{group.places[0].address}:{port}"
    calls = {}
    for number, (actor, name) in enumerate(zip(group.actors, group.names, strict=True)):
        own = ["-m", "bench.driver", str(folder), "--node", str(number), "--lead", address, *words]
        calls[actor.run.remote(own, {TOKEN: token, NODE_VARIABLE: name})] = number
    return Runners(group, calls)


JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""A variable that Ray sets for a driver: its runtime_env and metadata.

Source: ray/_private/runtime_env/constants.py.
"""
FINAL = ("RAY-02", "RAY-03", "RAY-07", "RAY-09")
"""Rules after which another attempt is useless: other nodes would break them too, or there are no other nodes."""


@dataclass(slots=True)
class DriverJob:
    """This job. `say` prints to Ray's log and appends to the output file of the current run."""

    id: str
    plan_file: Path | None
    limit_min: float | None
    walltime_min: int | None
    run: Path
    group: Group | None = None
    signum: int | None = None
    """The signal that this process has received. Handlers only record it: Ray's calls swallow their exceptions."""

    def listen(self) -> None:
        """Install signal handlers; must run after `ray.init`, which installs its own."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._record)

    def _record(self, signum: int, frame: object) -> None:
        self.signum = signum

    def check(self) -> None:
        """Raise Stopped if this process has received a signal."""
        if self.signum is not None:
            self._note()
            signum, self.signum = self.signum, None  # the shutdown itself must not be interrupted
            raise Stopped(signum)

    def _note(self) -> None:
        """Note in job.json that the job is cancelled, before runners get their signals; Ray's own page may do that."""
        file = self.run / JOB
        with suppress(OSError):
            if content := atomic_files.read_object(file):
                masked_json.write(file, content | {CANCELLED: self.id})

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.run.is_dir():
            with suppress(OSError), (self.run / RAY_OUTPUT).open("a") as file:
                file.write(f"{text}\n")


def main() -> None:
    regular_files.keep_others_from_writing()
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
            job.say(f"{time.strftime('%F %T')} the job was cancelled")
            if not (job.run / STATUS).exists():
                _close(job, plan, with_rule("SLU-08", "the job was cancelled"))
            raise
    return max(codes)


def _plan(job: DriverJob, run: Path) -> Plan:
    """Return the plan of a run.

    Raises:
        BenchError: this host cannot read the run folder.
    """
    if job.plan_file is None and not run.is_dir():
        what, fix = "the Ray head node cannot read the run folder", RULES["RAY-09"].fix
        raise BenchError(what, where=str(run), fix=fix, rule="RAY-09")
    return plan_kinds.load(job.plan_file or run / PLAN)


def _run(job: DriverJob, plan: Plan) -> int:
    """Run attempts until one ends without a lost node, and return the exit code of the run."""
    num_lost = 0
    for number in range(plan.config.launch.attempts):
        is_last = number + 1 == plan.config.launch.attempts
        try:
            if job.group is None:
                job.group = groups.reserve(_still_needed(job, plan, num_lost), job.say, check=job.check)
            used, spare = _used(job, plan, job.group, is_last=is_last)
            job.say(f"job {job.id}, attempt {number}, on {', '.join(used.names)}")
            if spare:
                job.say(f"spare: {', '.join(spare)}")
            code = run_attempt(used, _arguments(job, number, is_last=is_last), job)
        except LostError as lost:
            job.say(f"{time.strftime('%F %T')} {lost}")
            if job.group is not None:
                groups.release(job.group)
            job.group, code, num_lost = None, RESTART_EXIT_CODE, num_lost + 1
            if is_last or lost.rule in FINAL:
                return _close(job, plan, str(lost))
        if code != RESTART_EXIT_CODE:
            return code if (job.run / STATUS).exists() else _close(job, plan, f"the run ended with exit code {code}")
    raise AssertionError(f"the last of {plan.config.launch.attempts} allowed attempts requested one more attempt")


def _still_needed(job: DriverJob, plan: Plan, num_lost: int) -> Plan:
    """Return the plan without the nodes that were left out, and with one spare node less for each of them or lost."""
    cluster, left_out = plan.config.cluster, node_lists.left_out(job.run, job.id)
    spares = max(0, cluster.spare_nodes - len(left_out) - num_lost)
    cluster = replace(cluster, avoided=cluster.avoided | left_out, spare_nodes=spares)
    return replace(plan, config=replace(plan.config, cluster=cluster))


def _used(job: DriverJob, plan: Plan, group: Group, *, is_last: bool) -> tuple[Group, list[str]]:
    """Return the nodes of the next attempt, and the names of the spare ones, which the ranks then know.

    Those that this job has left out are not used. The last attempt has no spare nodes: no further one could use them.

    Raises:
        LostError: too few nodes are left.
    """
    left_out = node_lists.left_out(job.run, job.id)
    used, spare = group.without(left_out, plan.world.num_nodes)
    if len(used.places) < plan.world.num_nodes:
        num_left, num_nodes = len(used.places), plan.world.num_nodes
        what = f"the run needs {num_nodes} nodes, but has only {num_left} without {', '.join(left_out)}"
        raise LostError("RAY-03", what)
    spare = [] if is_last else spare
    if plan.config.cluster.spare_nodes and job.run.is_dir():
        node_lists.write(job.run / SPARE_NODES, spare)
    return used, spare


def _arguments(job: DriverJob, number: int, *, is_last: bool) -> list[str]:
    """Return the arguments of every runner, except the run folder, its node number and the lead's address."""
    return [
        *("--job", job.id, "--attempt", str(number)),
        *([] if is_last else ["--restarts"]),
        *([] if job.limit_min is None else ["--limit-min", f"{job.limit_min:g}"]),
        *([] if job.walltime_min is None else ["--trial-min", str(job.walltime_min)]),
        *([] if job.plan_file is None else ["--plan", str(job.plan_file)]),
    ]


def _close(job: DriverJob, plan: Plan, what: str) -> int:
    """Write the final status of a run whose runner could not write it; return the exit code."""
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
    """Return Ray's id of this job, if the entrypoint does not contain it, as in a manifest."""
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(os.environ.get(JOB_CONFIG, "")).get("metadata", {}).get("job_submission_id") or "ray")
    return "ray"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.backends.ray.driver", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, as every node sees them")
    parser.add_argument("--job", help="the id of this job (default: Ray's submission id)")
    parser.add_argument("--plan", type=Path, help="the plan file, if the run folder does not exist yet")
    parser.add_argument("--limit-min", type=float, metavar="MIN", help="shut each run down after this time")
    parser.add_argument("--walltime", type=int, metavar="MIN", help="time limit per trial (default: the plan's)")
    return parser


if __name__ == "__main__":
    main()
