"""Start a run: check it, make its folder, and run it here or hand it to its queue."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import backends, preflight
from bench.backends.protocol import Queue
from bench.console import sheet
from bench.console import trial as trial_sheets
from bench.contract import atomic_files
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, STATUS, SUBMISSION
from bench.errors import BenchError, written
from bench.launch import run_here
from bench.preflight import Finding
from bench.results.kind import judge
from bench.runs import folder as folders
from bench.runs import run as runs
from bench.runs import trial as trials
from bench.runs.folder import short
from bench.watch import How, sources, trackers, watch

if TYPE_CHECKING:
    from bench.console.sheet import Messages


def run_queued(queue: Queue, plan: Plan, folder: Path, findings: Sequence[Finding]) -> int:
    """Return 0 once the job is queued, or with launch.wait what came of it.

    Raises:
        BenchError: the backend refuses the job, and the run's folder is gone; or nobody knows whether there is a job.
    """
    console = sheet.to_stderr()
    for finding in findings:
        console.print(str(finding), markup=False)
    try:
        with written(folder):
            job = queue.submit(plan, folder, forced=[f for f in findings if f.severity == "error"])
    except BenchError:
        if not (folder / SUBMISSION).exists():  # else there may be a job that works in this folder
            shutil.rmtree(folder)
        raise
    print(f"job {job}: {plan.name} on {plan.world.num_ranks} ranks, results in {short(folder)}")
    for verb, what in (("watch", "its progress"), ("why", "what went wrong"), ("cancel", "end it")):
        console.print(f"  python -m bench {verb} {short(folder)}   # {what}", markup=False)
    if page := atomic_files.read_object(folder / JOB).get("page"):
        console.print(f"  {page}   # its page", markup=False)
    return follow(plan, folder, console) if plan.config.launch.wait else 0


def follow(plan: Plan, folder: Path, console: "Messages") -> int:
    """Show a job from the queue to its end, and what its trials prove; return its exit code.

    Ctrl-C ends the following, not the job.
    """
    try:
        for job in runs.wait(folder, started=True):
            console.print(f"job {job.id}: {job.word}" + (f" ({job.reason})" if job.reason else ""), markup=False)
        watch(sources.run_folder(folder), How(), console=console)
        for _ in runs.wait(folder):
            pass
    except KeyboardInterrupt:
        console.print(f"the job goes on; python -m bench cancel {short(folder)} ends it")
        raise
    for trial in plan.trials:
        if found := trials.foreign(folder, trial, may_have_moved=True):  # seen from here, owners may have other ids
            console.print(str(found), markup=False)
        elif (folder / trial.log).exists():
            trial_sheets.show(folder, trial, judge(folder / trial.log, plan, trial))
    run = runs.find(folder)
    word, what = (run.status.outcome, run.status.what) if run.status else (run.word, None)
    still = f" (job {run.id} still is {run.states[0].word})" if run.is_active else ""
    console.print(f"{word}: {what or 'see ' + short(folder / STATUS)}{still}", markup=False)
    return runs.exit_code(folder)


def run(plan: Plan, config_yaml: str, made: list[Path]) -> int:
    """Return 0 when every log proves that its trial did what the task asks; in a queue, when the job is queued.

    The run's folder is entered into `made`, whatever comes of it.

    Raises:
        BenchError: something would fail later, and nothing was started; or a rank failed, or the queue refuses the job.
    """
    trackers.require(plan.config.launch.trackers)
    findings = preflight.before_start(plan)
    if not plan.config.launch.force:
        preflight.require(findings)
    folder = folders.make(plan, config_yaml)
    made.append(folder)
    match backends.of(plan):
        case Queue() as queue:
            return run_queued(queue, plan, folder, findings)
        case _:
            return run_here.run(plan, folder)
