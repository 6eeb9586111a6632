"""Queue what a study lacks: each run as a job of its own, or runs that take turns on the same nodes in one job."""

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import preflight
from bench.backends import Queue
from bench.console import messages
from bench.contract import plan as contract_plans
from bench.contract import secrets
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, PLAN, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, written
from bench.launch import again
from bench.runs import folder as run_folders
from bench.runs import ledger
from bench.runs.folder import NOT_OTHERS, require_ours
from bench.runs.run import POLL_S
from bench.studies import running
from bench.studies.session import Session
from bench.studies.spec import Jobs
from bench.studies.standing import Standing, State

SHARED = "job."
"""Begins the name of a folder of a job that runs share."""


def run(session: Session, queue: Queue, backend: BackendName) -> None:
    """Queue what is missing, each run at most once a call, and follow the jobs to their end where that is asked for."""
    console, tried = messages.to_stderr(), set[Path]()
    said = ""
    while True:
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
    for some in _jobs([run for run in todo if run.name.arm.name in shared], session):
        _submit_shared(session, queue, some)
    for one in todo:
        if one.name.arm.name not in shared:
            running.attempt(session, one, submit_one)


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
        again.resume(todo.folder)
        return
    _remove_unsubmitted(todo.folder)
    running.start_anew(session, todo)


def _remove_unsubmitted(folder: Path) -> None:
    """Remove what a call that was cut short left of a run before it was handed to the queue."""
    if folder.exists():
        require_ours(folder)
        shutil.rmtree(folder)


def _submit_shared(session: Session, queue: Queue, todo: Sequence[Standing]) -> None:
    """Submit one job for these runs; where their nodes differ, one for those that need the same ones."""
    found: list[tuple[Plan, Standing]] = []
    for one in todo:
        running.attempt(session, one, lambda session, one: found.append((_prepared(session, queue, one), one)))
    groups = _on_same_nodes(found, queue)
    if groups[1:] and session.request.study.jobs is Jobs.shared:
        raise ConfigError("runs share a job, and need different nodes", where="jobs", fix="set jobs: each in the study")
    for group in groups:
        if len({one.name.arm.name for _, one in group}) == 1 and session.request.study.jobs is not Jobs.shared:
            for _, one in group:
                running.attempt(session, one, submit_one)
            continue
        try:
            job = _submitted(session, queue, [(plan, one.folder) for plan, one in group])
            print(f"job {job}: {len(group)} runs, one after another on the same nodes", file=sys.stderr)
        except BenchError as error:
            print(secrets.masked(str(error)), file=sys.stderr)


def _on_same_nodes(found: Sequence[tuple[Plan, Standing]], queue: Queue) -> list[list[tuple[Plan, Standing]]]:
    """Return the runs, in their order, with those together that need the same nodes."""
    groups: list[list[tuple[Plan, Standing]]] = []
    for plan, one in found:
        mine = next((group for group in groups if queue.shares_nodes([group[0][0], plan])), None)
        if mine is None:
            groups.append([(plan, one)])
        else:
            mine.append((plan, one))
    return groups


def _prepared(session: Session, queue: Queue, one: Standing) -> Plan:
    """Return the plan of a run whose folder is ready for a job."""
    if (one.folder / JOB).exists():
        require_ours(one.folder)
        return contract_plans.load(one.folder / PLAN)
    _remove_unsubmitted(one.folder)
    plan, config_yaml = running.planned(session, one)
    findings = preflight.before_start(plan)
    if not plan.config.launch.force:
        preflight.require(findings)
    folder = run_folders.make(plan, config_yaml)
    queue.prepare_shared(plan, folder, forced=[finding for finding in findings if finding.severity == "error"])
    return plan


def _submitted(session: Session, queue: Queue, runs: Sequence[tuple[Plan, Path]]) -> str:
    """Return the id of the job; where there is none, the runs' folders are as they were."""
    folder = next(path for n in range(1, 10_000) if not (path := session.folder / f"{SHARED}{n}").exists())
    with ExitStack() as stack:
        stack.enter_context(written(session.folder))
        for _, run in runs:
            stack.enter_context(ledger.reopened(run))
            stack.enter_context(again.without_reserve(run))
        folder.mkdir(mode=NOT_OTHERS)
        try:
            return queue.submit_shared(runs, folder, name=f"{session.kept.name}-{session.kept.cluster}")
        except BenchError:
            if not (folder / SUBMISSION).exists():  # else there may be a job that works in these folders
                shutil.rmtree(folder)
            raise
