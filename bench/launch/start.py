"""Start a run: check it, create its folder, and run it in this process or submit it to a queue."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import backends, hints, preflight
from bench.backends.protocol import Queue, SubmitsArrays
from bench.console import plan as plan_sheets
from bench.console import sheet
from bench.console import trial as trial_sheets
from bench.contract import atomic_files
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, LEDGER, STATUS, SUBMISSION
from bench.errors import BenchError, ConfigError, written
from bench.launch import run_here
from bench.preflight import Finding
from bench.results.kind import judge
from bench.rules.finding import errors
from bench.runs import folder as folders
from bench.runs import run as runs
from bench.runs import trial as trials
from bench.runs.folder import short
from bench.texts import counted
from bench.watch import How, sources, trackers, watch

if TYPE_CHECKING:
    from bench.console.sheet import Messages


def run_queued(queue: Queue, run: "Prepared") -> int:
    """Submit the job; return 0 once it is queued, or with launch.wait the exit code of the run.

    Raises:
        BenchError: the backend refuses the job, and the folder is removed; or it is unknown whether there is a job.
    """
    console, plan, folder = sheet.to_stderr(), run.plan, run.folder
    for finding in run.findings:
        console.print(str(finding), markup=False)
    try:
        with written(folder):
            job = queue.submit(plan, folder, forced=run.forced)
    except KeyboardInterrupt:
        if not (folder / SUBMISSION).exists() and not atomic_files.read_object(folder / JOB).get("jobs"):
            shutil.rmtree(folder)
            raise
        console.print("interrupted while the job was being submitted: the job may be queued", markup=False)
        console.print(f"  runstop runs {short(folder.parent)}   # show whether the job is queued", markup=False)
        console.print(f"  runstop cancel {short(folder)}   # cancel the job", markup=False)
        raise
    except BenchError:
        if not (folder / SUBMISSION).exists():  # else a job may be using this folder
            shutil.rmtree(folder)
        raise
    print(f"job {job}: {plan.name} on {counted(plan.world.num_ranks, 'rank')}, results in {short(folder)}")
    for verb, what in (("watch", "show its progress"), ("why", "explain a failure"), ("cancel", "cancel it")):
        console.print(f"  runstop {verb} {short(folder)}   # {what}", markup=False)
    if page := atomic_files.read_object(folder / JOB).get("page"):
        console.print(f"  {page}   # web page of the job", markup=False)
    return follow(plan, folder, console) if plan.config.launch.wait else 0


def follow(plan: Plan, folder: Path, console: "Messages") -> int:
    """Show a job until it ends, then the results of its trials; return the exit code of the run.

    Ctrl-C ends this display, not the job.
    """
    try:
        for job in runs.wait(folder, started=True):
            console.print(
                f"job {job.id}: {job.native_state}" + (f" ({job.reason})" if job.reason else ""), markup=False
            )
        watch(sources.run_folder(folder), How(), console=console)
        for _ in runs.wait(folder):
            pass
    except KeyboardInterrupt:
        console.print(f"the job keeps running; to cancel it: runstop cancel {short(folder)}")
        raise
    for trial in plan.trials:
        if problem := trials.unowned_log(folder, trial, may_have_moved=True):  # user ids may differ on this machine
            console.print(str(problem), markup=False)
        elif (folder / trial.log).exists():
            trial_sheets.show(folder, trial, judge(folder / trial.log, plan, trial))
    run = runs.find(folder)
    outcome, what = (run.status.outcome, run.status.what) if run.status else (run.state_name, None)
    still = f" (job {run.id} is still {run.states[0].native_state})" if run.is_active else ""
    console.print(f"{outcome}: {what or 'see ' + short(folder / STATUS)}{still}", markup=False)
    return runs.exit_code(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that has passed its checks and has a folder, but no job."""

    plan: Plan
    folder: Path
    findings: Sequence[Finding]

    @property
    def forced(self) -> list[Finding]:
        """The failed checks that launch.force ignores."""
        return errors(self.findings)


def check(plan: Plan, words: Sequence[str] = ()) -> Sequence[Finding]:
    """Return the findings of the checks before a start.

    Raises:
        BenchError: a check failed, and launch.force is not set.
    """
    findings = preflight.before_start(plan, words)
    uninstalled = trackers.uninstalled(plan.config.launch.trackers)
    preflight.require([] if plan.config.launch.force else findings, uninstalled)
    return findings


def dry_run(plan: Plan, words: Sequence[str]) -> int:
    """Show a plan and its findings, and start nothing; return 2 if a launch would refuse the plan, else 0."""
    findings = preflight.inspect(plan, words)
    plan_sheets.show_plan(plan, findings)
    return ConfigError.exit_code if preflight.would_refuse(plan, findings) else 0


def prepare(plan: Plan, config_yaml: str, findings: Sequence[Finding]) -> Prepared:
    """Create the folder of a run."""
    return Prepared(plan=plan, folder=folders.make(plan, config_yaml), findings=findings)


def submit_runs(queue: SubmitsArrays, prepared: Sequence[Prepared]) -> dict[Path, str | BenchError]:
    """Submit runs: one job array for each set of equal headers, a job of its own for a run that is alone in its set.

    Return the id of each run's job by the run's folder, or the error with which its queue refused it; the folder of a
    refused run is removed.
    """
    groups = [[prepared[position] for position in group] for group in queue.arrays([one.plan for one in prepared])]
    console = sheet.to_stderr()
    if any(group[1:] for group in groups):
        sizes = " and ".join(counted(len(group), "run") for group in groups)
        arrays = sum(bool(group[1:]) for group in groups)
        why = "; their nodes, partitions or time limits differ" if groups[1:] else ""
        console.print(f"{counted(arrays, 'job array')}: {sizes}{why}", markup=False)
    ids: dict[Path, str | BenchError] = {}
    for group in groups:
        try:
            ids |= _submitted(queue, group)
        except BenchError as error:
            ids |= dict.fromkeys((one.folder for one in group), error)
            for one in group:
                if not any(
                    (one.folder / name).exists() for name in (SUBMISSION, LEDGER)
                ):  # else a job may use it, or did
                    shutil.rmtree(one.folder)
    return ids


def _submitted(queue: SubmitsArrays, group: Sequence[Prepared]) -> dict[Path, str]:
    """Submit one array, or the only run of its group; return the ids by run folder."""
    for one in group:
        for finding in one.findings:
            sheet.to_stderr().print(str(finding), markup=False)
    if not group[1:]:
        with written(group[0].folder):
            return {group[0].folder: queue.submit(group[0].plan, group[0].folder, forced=group[0].forced)}
    with written(group[0].folder.parent):
        for one in group:
            if not (one.folder / JOB).exists():
                queue.prepare_shared(one.plan, one.folder, forced=one.forced)
        folder = folders.of_array(group[0].folder.parent)
        try:
            id = queue.submit_array([(one.plan, one.folder) for one in group], folder, name=group[0].plan.name)
        except BenchError:
            if not (folder / SUBMISSION).exists():
                shutil.rmtree(folder)
            raise
    return {one.folder: f"{id}_{task}" for task, one in enumerate(group)}


def run_several(planned: Sequence[tuple[Plan, str, Sequence[str]]], created: list[Path]) -> list[int]:
    """Submit several runs to one queue, as job arrays; return their exit codes.

    Each has a plan, the text of config.yaml, and the arguments of its command line, for the commands in fixes. The
    runs' folders are appended to `created`.

    Raises:
        BenchError: a check failed, and nothing was submitted.
    """
    checked = [(plan, text, check(plan, words)) for plan, text, words in planned]
    prepared = [prepare(plan, text, findings) for plan, text, findings in checked]
    created += [one.folder for one in prepared]
    queue = backends.for_plan(prepared[0].plan)
    assert isinstance(queue, SubmitsArrays), queue
    ids, codes = submit_runs(queue, prepared), []
    for error in dict.fromkeys(id for id in ids.values() if isinstance(id, BenchError)):
        hints.print_error(error)
    for one in prepared:
        match ids[one.folder]:
            case BenchError() as error:
                codes.append(error.exit_code)
            case id:
                ranks = counted(one.plan.world.num_ranks, "rank")
                print(f"job {id}: {one.plan.name} on {ranks}, results in {short(one.folder)}")
                codes.append(0)
    for one in prepared:
        if one.plan.config.launch.wait and one.folder.exists():
            codes.append(follow(one.plan, one.folder, sheet.to_stderr()))
    return codes


def run(plan: Plan, config_yaml: str, created: list[Path], words: Sequence[str] = ()) -> int:
    """Return 0 if every trial is valid; with a queue, if the job is queued.

    The run's folder is appended to `created`, also if the run fails. words: the arguments of the command line, for the
    commands in fixes.

    Raises:
        BenchError: a preflight check failed and nothing was started, a rank failed, or the queue refused the job.
    """
    prepared = prepare(plan, config_yaml, check(plan, words))
    created.append(prepared.folder)
    match backends.for_plan(plan):
        case Queue() as queue:
            return run_queued(queue, prepared)
        case _:
            return run_here.run(plan, prepared.folder)
