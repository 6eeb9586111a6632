"""Kill a run at each event that changes something outside its process, resume it, and look at what is left.

    python tests/launch/kills.py                       every event of every scene
    python tests/launch/kills.py --draw 30 --seed 7    some of them, as test_kills.py does

An audit hook counts the events of a process (mkdir, rename, link, unlink, open for writing, fork, exec, kill, connect
and the like) and kills it just before the N-th: what is then on the disk is the state after the event before. Each case
is a forked process with real ranks, whose program writes the log of a kernels task in an instant.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1]))  # for helpers, when not run by pytest

from bench.backends.slurm.backend import SlurmBackend
from bench.contract.plan import Plan
from bench.contract.run_files import ATTEMPT_VARIABLE, LEDGER, STATUS
from bench.driver import between_commands
from bench.errors import BenchError, ConfigError
from bench.launch import resume, run_here, start
from bench.planning import compose
from bench.runs import folder as folders
from bench.runs import ledger, verification
from bench.runs import run as runs
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending
from helpers.paths import ROOT
from helpers.slurm_stubs import Slurm

CHANGES = {
    *("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.chmod"),
    *("os.fork", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.kill", "os.killpg"),
    *("socket.connect", "socket.bind"),
}
TASK = ("task=kernels_tiny", "trials=2", "launch.force=true", "launch.trackers=[]")
REFUSALS = (
    "this folder is not a run folder",
    "there is no such run folder",
    "the launch was killed before it wrote plan.json",
    "there is nothing to resume, because the launch was killed before it submitted a job",
    "all trials have finished; there is nothing to resume",
    "a run can be resumed only after its job has ended, but job 100 is PENDING",
)
"""Why a run is not resumed: nothing was started, or nothing is missing."""
AT_ONCE = 6
ENDS_S = 10.0
"""How long a rank of a killed launcher may take to end."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A process that is killed, and what its user does next. Both get a folder of their own."""

    name: str
    killed: Callable[[Path], object]
    resumes: Callable[[Path], int]
    """Returns an exit code, or raises the refusal."""
    before: Callable[[Path], object] = lambda root: None
    must_finish: bool = True
    """Whether the run then has its result; else it is only queued."""


def changes(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether an audit event is about to change something outside the process."""
    if event != "open":
        return event in CHANGES
    path, _, flags = args
    is_written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    return bool(is_written) and not str(path).startswith("/dev/") and ".pyc" not in str(path)


def forked(act: Callable[[], object], output: Path, *, kill_at: int = 0, events: Path | None = None) -> int:
    """Run a function in a forked process; return its exit code, or minus the signal that ended it.

    kill_at: kill it before this event, counted from 1. events: write the events to this file.
    """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        numbers, seen = itertools.count(1), list[str]()

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if changes(event, args):
                seen.append(f"{event} {args[:1]}")
                if next(numbers) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        ended = act()
        if events is not None:
            kept = list(seen)
            events.write_text(json.dumps(kept))
        code = ended if isinstance(ended, int) else 0
    except BenchError as error:
        print(error, flush=True)
        code = 100 if isinstance(error, ConfigError) else 101
    except BaseException:  # noqa: BLE001 - the process ends here
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --- The runs


def plan_of(root: Path, *overrides: str) -> Plan:
    """Return the plan of a run in the folder `run`, whose ranks end in an instant."""
    plan = PLANS[overrides]
    config = replace(plan.config, launch=replace(plan.config.launch, folder=str(root / "run")))
    return replace(plan, config=config)


def _quick(*overrides: str) -> Plan:
    plan = compose.compose([*TASK, *overrides])
    rank = [sys.executable, str(ROOT / "tests/helpers/quick_rank.py")]
    commands = [
        replace(command, argv=[*rank, *command.argv[3:]] if command.log else ["true"]) for command in plan.commands
    ]
    return replace(plan, commands=commands)


LOCAL = ("cluster=local", "cluster.ranks_per_node=1")
HOSTS = (
    *("cluster=hosts", "cluster.hosts=[localhost]", "cluster.num_nodes=1", "cluster.ranks_per_node=1"),
    *("cluster.device=cpu", "cluster.gpu=null"),
)
SLURM = ("cluster=slurm_test", "cluster.num_nodes=1", "cluster.ranks_per_node=1")
PLANS = {words: _quick(*words) for words in (LOCAL, HOSTS, SLURM)}


def launch(*overrides: str) -> Callable[[Path], int]:
    def launched(root: Path) -> int:
        plan = plan_of(root, *overrides)
        return run_here.run(plan, folders.make(plan, "trials: 2\n"))

    return launched


def resumed(root: Path) -> int:
    return resume.resume(root / "run")


def stopped_in_the_last_trial(root: Path) -> None:
    """Leave a run that was killed while its last trial was being opened."""
    events = root / "events"
    forked(lambda: launch(*LOCAL)(root / "whole"), root / "output", events=events)
    opened = [number for number, event in enumerate(json.loads(events.read_text()), 1) if "trial_1" in event]
    forked(lambda: launch(*LOCAL)(root), root / "output", kill_at=opened[2])
    assert ledger.read(root / "run")[0].outcome is Outcome.valid


def queued(root: Path) -> Slurm:
    """Return the stubs of Slurm of a case, on PATH."""
    if not (root / "bin").exists():
        Slurm(root)
    slurm = Slurm.__new__(Slurm)
    slurm.bin, slurm.queue, slurm.calls = root / "bin", root / "queue", root / "calls"
    os.environ["PATH"] = f"{slurm.bin}:{os.environ['PATH']}"
    return slurm


def submit(root: Path) -> int:
    queued(root)
    plan = plan_of(root, *SLURM)
    prepared = start.Prepared(plan=plan, folder=folders.make(plan, "trials: 2\n"), findings=[])
    return start.run_queued(SlurmBackend(), prepared)


def submitted(root: Path) -> None:
    """Leave a run whose job has started: Slurm has run the script up to its first step."""
    forked(lambda: submit(root), root / "output")
    for job in (root / "queue").iterdir():
        job.unlink()


def submit_once_more(root: Path) -> int:
    """Resume a run whose submission was killed; there must be one job at the end, and the folder must know it."""
    slurm, code, error = queued(root), 0, None
    try:
        code = resume.resume(root / "run")
    except ConfigError as refused:
        error = refused
    num_jobs = len(list(slurm.queue.iterdir()))
    assert slurm.num_calls("sbatch") == num_jobs, "a job was submitted twice"
    if num_jobs:
        assert runs.find(root / "run").is_active and runs.find(root / "run").id == "100"
    if error:
        raise error
    assert num_jobs == 1
    return code


def steps(root: Path, *, job: str = "100") -> int:
    """Do what job.sh does between the commands of a plan, in this process, with the ranks as its children."""
    run, plan = root / "run", plan_of(root, *SLURM)
    _step(run, "open", "--job", job)
    for trial in plan.trials:
        nonce = ledger.new_nonce()
        if _step(run, "begin", str(trial.index), "--job", job, "--nodes", "dgx-0", "--nonce", nonce) == 0:
            words = [*plan.commands[-len(plan.trials) + trial.index].argv]
            rank = {"PYTHONPATH": f"{ROOT}", "PYTHONSAFEPATH": "1", ATTEMPT_VARIABLE: nonce}
            subprocess.run(words, cwd=run, env=os.environ | rank, check=True)
            _step(run, "judge", str(trial.index))
    return _step(run, "close", "--exit-code", "0", "--what", "every trial ended", "--trials", "0 1")


def _step(run: Path, *words: str) -> int:
    sys.argv = ["between_commands", str(run), *words]
    try:
        between_commands.main()
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a step exits")


def resume_job(root: Path) -> int:
    """Resume a run whose job was killed, and run the job if there is one."""
    slurm = queued(root)
    code = resume.resume(root / "run")
    if jobs := list(slurm.queue.iterdir()):
        jobs[0].unlink()
        return steps(root, job="100")
    return code


def closed_by_the_script(root: Path) -> int:
    """Do what job.sh does after one of its steps was killed, then resume."""
    run = root / "run"
    if (run / LEDGER).exists():
        code = _step(run, "close", "--exit-code", "1", "--what", "opening the run failed", "--trials", "0 1")
        if code and not (run / STATUS).exists():
            (run / STATUS).write_text('{"outcome": "failed", "exit_code": 1, "what": "x", "fix": "y"}\n')
    return resume_job(root)


SCENES = (
    Scene(name="launch", killed=launch(*LOCAL), resumes=resumed),
    Scene(name="launch on hosts", killed=launch(*HOSTS), resumes=resumed),
    Scene(name="resume", before=stopped_in_the_last_trial, killed=resumed, resumes=resumed),
    Scene(name="submission", before=queued, killed=submit, resumes=submit_once_more, must_finish=False),
    Scene(name="job", before=submitted, killed=steps, resumes=resume_job),
    Scene(name="step of a job", before=submitted, killed=steps, resumes=closed_by_the_script),
)


# --- The cases


def play(scene: Scene, number: int, root: Path) -> list[str]:
    """Kill a scene before event `number`; return what is wrong after its user has resumed it."""
    root.mkdir()
    output = root / "output"
    forked(lambda: scene.before(root), output)
    killed = forked(lambda: scene.killed(root), output, kill_at=number)
    if killed != -signal.SIGKILL:
        return [f"it was not killed: {killed}", output.read_text()]
    shown = len(output.read_text())
    code = forked(lambda: scene.resumes(root), output)
    printed = output.read_text()[shown:]
    wrong = list(_left(scene, root / "run", code, printed))
    if processes := list(_processes(root)):
        wrong.append(f"processes left: {processes}")
    return [*wrong, output.read_text()] if wrong else []


def _left(scene: Scene, run: Path, code: int, printed: str) -> Iterator[str]:
    """Yield what is wrong with a run that was killed and resumed."""
    if code == 100:
        if not printed.startswith(REFUSALS):
            yield f"refused with {printed!r}"
        elif not printed.startswith("all trials"):
            if (run / LEDGER).exists() or list(run.glob("result_*")):
                yield "refused although something was started"
            return
    elif code:
        yield f"the exit code of the resumed run is {code}"
    if not scene.must_finish:
        return
    try:
        status, outcomes = statuses.read(run), [entry.outcome for entry in ledger.read(run)]
    except BenchError as error:
        yield str(error)
        return
    if status is None or status.outcome is not Ending.valid or outcomes != [Outcome.valid] * 2:
        yield f"ended as {status}, {outcomes}"
    if not (verified := verification.verify(run)).passed:
        yield f"not verified: {[each for each in verified.compared if each.passed is False]}"


def _processes(root: Path) -> Iterator[str]:
    """Yield the processes that still work in a case's folder after ENDS_S."""
    until_s = time.monotonic() + ENDS_S
    while alive := [words for words in map(_working_in, psutil.process_iter(), itertools.repeat(root)) if words]:
        if time.monotonic() > until_s:
            yield from alive
            return
        time.sleep(0.05)


def _working_in(process: psutil.Process, root: Path) -> str:
    with contextlib.suppress(psutil.Error):
        if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(root):
            return " ".join(process.cmdline()) or "a zombie"
    return ""


def played(cases: Sequence[tuple[Scene, int]], root: Path) -> list[list[str]]:
    """Play the cases, AT_ONCE at a time, since they mostly wait; return what is wrong with each."""

    def share(worker: int) -> None:
        for position in range(worker, len(cases), AT_ONCE):
            wrong = play(*cases[position], root / f"case_{position}")
            (root / f"wrong_{position}").write_text(json.dumps(wrong))

    workers = [pid for worker in range(AT_ONCE) if (pid := _forked_worker(share, worker))]
    for pid in workers:
        os.waitpid(pid, 0)
    return [json.loads((root / f"wrong_{position}").read_text()) for position in range(len(cases))]


def _forked_worker(act: Callable[[int], None], worker: int) -> int:
    if pid := os.fork():
        return pid
    try:
        act(worker)
    except BaseException:  # noqa: BLE001 - the process ends here
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def counted(scene: Scene, root: Path) -> list[str]:
    """Return the events of a scene that is not killed."""
    root.mkdir()
    forked(lambda: scene.before(root), root / "output")
    code = forked(lambda: scene.killed(root), root / "output", events=root / "counted")
    assert code == 0, (root / "output").read_text()
    events = json.loads((root / "counted").read_text())
    return [str(event) for event in events]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, help="how many cases (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="draws the cases")
    parser.add_argument("--only", default="", help="part of a scene's name")
    parser.add_argument("--at", type=int, help="only this event")
    args = parser.parse_args(argv)
    for name in ("DATADIR", "MODEL", "LOGDIR", "CONT"):
        os.environ.setdefault(name, tempfile.gettempdir())
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as temporary:
        root = Path(temporary)
        scenes = [scene for scene in SCENES if args.only in scene.name]
        events = {scene.name: counted(scene, root / f"{position}") for position, scene in enumerate(scenes)}
        cases = [(scene, number) for scene in scenes for number in range(1, len(events[scene.name]) + 1)]
        if args.at:
            cases = [case for case in cases if case[1] == args.at]
        if args.draw:
            cases = random.Random(args.seed).sample(cases, args.draw)
        for (scene, number), wrong in zip(cases, played(cases, root), strict=True):
            num_wrong += bool(wrong)
            if wrong:
                event = events[scene.name][number - 1]
                print(f"WRONG  {scene.name}, killed before {number}: {event}", *wrong, sep="\n  ")
    counts = ", ".join(f"{name} {len(names)}" for name, names in events.items())
    print(f"{len(cases)} kills, seed {args.seed}, {num_wrong} wrong; events: {counts}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
