"""Run or queue what a study lacks, as its cluster's backend does it."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from bench import backends, masking, preflight
from bench.backends.protocol import Queue, SharesNodes
from bench.console import sheet
from bench.contract import plan as contract_plans
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, LEDGER, PLAN, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, Stopped, SubmitError, written
from bench.launch import resume, start
from bench.launch import run_here as runs_here
from bench.runs import folder as run_folders
from bench.runs import ledger
from bench.runs import run as runs
from bench.runs.folder import NOT_OTHERS, require_ours, short
from bench.runs.run import POLL_S
from bench.runs.summary import with_overrides
from bench.studies import folder as folders
from bench.studies import plans
from bench.studies.session import Session, Standing, Standings, State
from bench.studies.spec import Jobs


def run_here(session: Session, backend: BackendName) -> None:
    """Run what is missing, each run at most once a call; one that fails leaves its reason, and the rest goes on."""
    tried = set[Path]()
    while True:
        standings = session.standings()
        todo = next((run for run in session.left(standings, backend) if run.folder not in tried), None)
        if todo is None:
            return
        tried.add(todo.folder)
        announce(session, todo, standings)
        attempt(session, todo, begin_or_resume)


def announce(session: Session, todo: Standing, standings: Standings) -> None:
    """Say how far the study is, and which run is next."""
    done, total = sum(run.is_done for run in standings.runs.values()), len(standings.runs)
    block = f"block {todo.name.block + 1} of {session.request.study.runs}"
    sheet.to_stderr().print(f"\n{session.kept.name}: {done} of {total} runs are done; {block}, {todo.name.arm.name}")


def attempt(session: Session, todo: Standing, work: Callable[[Session, Standing], None]) -> None:
    """Run or queue one arm in one block; what stops it is printed and kept, unless it stops the study."""
    reasons = folders.not_started(session.folder)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the study's table
            work(session, todo)
        reasons.pop(todo.folder.name, None)
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr)
        reasons.pop(todo.folder.name, None)
        if not todo.folder.exists():
            reasons[todo.folder.name] = masking.masked(error.what)
    if reasons != folders.not_started(session.folder):
        folders.note_not_started(session.folder, reasons)


def begin_or_resume(session: Session, todo: Standing) -> None:
    """Go on with a run's own plan if it has one, else make and start it.

    Raises:
        BenchError: it cannot start, or it failed.
    """
    plan = plan_in(todo.folder)
    if plan is not None:
        require_ours(todo.folder)
        runs_here.run(plan, todo.folder)
    else:
        start_anew(session, todo)


def plan_in(folder: Path) -> contract_plans.Plan | None:
    """Return the plan of a run that goes on; None where there is none, after what was cut short there is removed.

    Raises:
        ConfigError: there is a ledger, and its plan cannot be read.
    """
    if not folder.exists():
        return None
    try:
        return plan_kinds.load(folder / PLAN)
    except ConfigError:
        if (folder / LEDGER).exists():
            raise
    require_ours(folder)
    shutil.rmtree(folder)  # a kill while the folder was being made: nothing ran in it
    return None


def start_anew(session: Session, todo: Standing) -> None:
    """Plan, check and start a run in its folder."""
    start.run(*planned(session, todo), [])


def planned(session: Session, todo: Standing) -> tuple[contract_plans.Plan, str]:
    """Return the plan of a run, and its config.yaml."""
    batch = session.batch_of(todo)
    plan, config_yaml = plans.for_run(session.request, todo.name.arm, batch, folder=todo.folder, block=todo.name.block)
    words = [*session.request.overrides(todo.name.arm, batch), f"launch.folder={short(todo.folder)}"]
    return plan, with_overrides(config_yaml, words)


SHARED = "job."
"""Begins the name of a folder of a job that runs share."""


def run_queued(session: Session, queue: Queue, backend: BackendName) -> None:
    """Queue what is missing, each run at most once a call, and follow the jobs to their end where that is asked for."""
    console, tried = sheet.to_stderr(), set[Path]()
    said = ""
    while True:
        if isinstance(queue, SharesNodes):
            for folder in _shared_folders(session.folder):
                queue.note_shared(folder)
        standings = session.standings()
        todo = session.left(standings, backend)
        _submit(session, queue, [run for run in todo if run.folder not in tried])
        is_new = any(run.folder not in tried for run in todo)
        tried |= {run.folder for run in todo}
        standings = session.standings() if is_new else standings
        if (words := _counted(list(standings.runs.values()))) != said:
            console.print(f"{session.kept.name}: {words}")
            said = words
        if not session.waits or not any(run.has_job for run in standings.runs.values()):
            return
        time.sleep(POLL_S)


def _counted(runs: Sequence[Standing]) -> str:
    counts = {state: sum(run.state is state for run in runs) for state in State}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _shared_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{SHARED}*") if (path / JOB).exists())


def _submit(session: Session, queue: Queue, todo: Sequence[Standing]) -> None:
    shared = _sharing(session)
    if isinstance(queue, SharesNodes):
        for some in _jobs([run for run in todo if run.name.arm.name in shared], session):
            _submit_shared(session, queue, some)
    elif shared and session.request.study.jobs is Jobs.shared:
        raise ConfigError("jobs of this cluster are never shared", where="jobs", fix="set jobs: each in the study")
    else:
        shared = set()
    for one in todo:
        if one.name.arm.name not in shared:
            attempt(session, one, submit_one)


def _sharing(session: Session) -> set[str]:
    """Return the arms whose runs share a job."""
    study = session.request.study
    if study.jobs is Jobs.each:
        return set()
    if study.jobs is Jobs.shared:
        return {arm.name for arm in session.planned if arm.runs}
    return {name for pair in study.pairs for name in (pair.first, pair.second)}


def _jobs(runs: Sequence[Standing], session: Session) -> Iterator[list[Standing]]:
    """Yield the runs of each shared job: whole blocks, as many as the cluster's longest job has time for."""
    minutes = {arm.name: arm.walltime_min or 0 for arm in session.planned}
    some: list[Standing] = []
    for block in range(session.request.study.runs):
        mine = [run for run in runs if run.name.block == block]
        total = sum(minutes[run.name.arm.name] for run in (*some, *mine))
        if some and session.max_walltime_min is not None and total > session.max_walltime_min:
            yield some
            some = []
        some = [*some, *mine]
    if some:
        yield some


def submit_one(session: Session, todo: Standing) -> None:
    """Hand a run to its queue as a job of its own, or go on with it there.

    Raises:
        BenchError: it is refused, before anything started or by the queue.
    """
    if (todo.folder / JOB).exists():
        resume.resume(todo.folder)
        return
    _remove_unsubmitted(todo.folder)
    start_anew(session, todo)


def _remove_unsubmitted(folder: Path) -> None:
    """Remove what a call that was cut short left of a run before it was handed to the queue."""
    if folder.exists():
        require_ours(folder)
        shutil.rmtree(folder)


def _submit_shared(session: Session, queue: SharesNodes, todo: Sequence[Standing]) -> None:
    """Submit one job for these runs; where their nodes differ, one for those that need the same ones."""
    found: list[tuple[Plan, Standing]] = []
    for one in todo:
        attempt(session, one, lambda session, one: found.append((_prepared(session, queue, one), one)))
    groups = _on_same_nodes(found, queue)
    if groups[1:] and session.request.study.jobs is Jobs.shared:
        raise ConfigError("runs share a job, and need different nodes", where="jobs", fix="set jobs: each in the study")
    for group in groups:
        if len({one.name.arm.name for _, one in group}) == 1 and session.request.study.jobs is not Jobs.shared:
            for _, one in group:
                attempt(session, one, submit_one)
            continue
        try:
            job = _submitted(session, queue, [(plan, one.folder) for plan, one in group])
            print(f"job {job}: {len(group)} runs, one after another on the same nodes", file=sys.stderr)
        except BenchError as error:
            print(masking.masked(str(error)), file=sys.stderr)


def _on_same_nodes(found: Sequence[tuple[Plan, Standing]], queue: SharesNodes) -> list[list[tuple[Plan, Standing]]]:
    """Return the runs, in their order, with those together that need the same nodes."""
    groups: list[list[tuple[Plan, Standing]]] = []
    for plan, one in found:
        mine = next((group for group in groups if queue.shares_nodes([group[0][0], plan])), None)
        if mine is None:
            groups.append([(plan, one)])
        else:
            mine.append((plan, one))
    return groups


def _prepared(session: Session, queue: SharesNodes, one: Standing) -> Plan:
    """Return the plan of a run whose folder is ready for a job."""
    if (one.folder / JOB).exists():
        require_ours(one.folder)
        return plan_kinds.load(one.folder / PLAN)
    _remove_unsubmitted(one.folder)
    plan, config_yaml = planned(session, one)
    findings = preflight.before_start(plan)
    if not plan.config.launch.force:
        preflight.require(findings)
    folder = run_folders.make(plan, config_yaml)
    queue.prepare_shared(plan, folder, forced=[finding for finding in findings if finding.severity == "error"])
    return plan


def _submitted(session: Session, queue: SharesNodes, runs: Sequence[tuple[Plan, Path]]) -> str:
    """Return the id of the job; where there is none, the runs' folders are as they were."""
    folder = next(path for n in range(1, 10_000) if not (path := session.folder / f"{SHARED}{n}").exists())
    with ExitStack() as stack:
        stack.enter_context(written(session.folder))
        for _, run in runs:
            stack.enter_context(ledger.reopened(run))
            stack.enter_context(resume.without_reserve(run))
        folder.mkdir(mode=NOT_OTHERS)
        try:
            return queue.submit_shared(runs, folder, name=f"{session.kept.name}-{session.kept.cluster}")
        except BenchError:
            if not (folder / SUBMISSION).exists():  # else there may be a job that works in these folders
                shutil.rmtree(folder)
            raise


def run_sequentially(session: Session) -> None:
    """Run what is missing, each run at most once a call; one that cannot start leaves its reason, and the rest goes on.

    A call that is stopped leaves the job under way at work. The next call waits for it, and then goes on.
    """
    tried = set[Path]()
    while True:
        standings = session.standings()
        for under_way in (one for one in standings.runs.values() if one.has_job):
            _follow(under_way)
            standings = session.standings()
        todo = next((one for one in session.left(standings) if one.folder not in tried), None)
        if todo is None:
            return
        tried.add(todo.folder)
        announce(session, todo, standings)
        is_queued = isinstance(backends.get(session.backend_of(todo)), Queue)
        attempt(session, todo, submit_one if is_queued else begin_or_resume)


def _follow(run: Standing) -> None:
    """Wait for the end of a run's job, and say where it stands; one that nobody knows any more has ended."""
    console = sheet.to_stderr()
    try:
        for job in runs.wait(run.folder):
            reason = f": {job.reason}" if job.reason else ""
            console.print(f"{run.folder.name}: {job.word}{reason}", markup=False)
    except KeyboardInterrupt:
        console.print(f"the job goes on; python -m bench cancel {short(run.folder)} ends it", markup=False)
        raise
    except SubmitError as error:
        print(error, file=sys.stderr)


def run_missing(session: Session) -> int:
    """Return 0 when every run is proven or queued; 1 when one has failed, and where no arm can run.

    Raises:
        ConfigError: another process runs the study, or it has changed since its runs were made.
    """
    with folders.opened(session.folder, session.kept, session.planned):
        try:
            if session.request.study.jobs is Jobs.in_turn:
                run_sequentially(session)
            else:
                _run_side_by_side(session)
        except Stopped:
            print(f"stopped; to go on: {session.kept.command}", file=sys.stderr)
            raise
    states = [run.state for run in session.standings().runs.values()]
    return 0 if states and all(state in (State.proven, State.active) for state in states) else 1


def _run_side_by_side(session: Session) -> None:
    """Let each backend work on its arms: queues get theirs first, and work on them while this machine runs its own."""
    for name in session.backends:
        match backends.get(name):
            case Queue() as queue:
                run_queued(session, queue, name)
            case _:
                run_here(session, name)
