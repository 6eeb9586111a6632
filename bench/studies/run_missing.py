"""Run or queue the missing runs of a study on their backends."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from bench import backends, hints, masking
from bench.backends.protocol import Queue, SharesNodes, SubmitsArrays
from bench.console import sheet
from bench.contract import atomic_files, plan_kinds
from bench.contract import plan as contract_plans
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, LEDGER, PLAN, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, Stopped, SubmitError, written
from bench.launch import resume, start
from bench.launch import run_here as runs_here
from bench.runs import ledger
from bench.runs import run as runs
from bench.runs.command_line import with_overrides
from bench.runs.folder import NOT_OTHERS, require_ours, short
from bench.runs.run import POLL_S
from bench.studies import folder as folders
from bench.studies import plans
from bench.studies.session import RunStatus, RunStatuses, Session, State
from bench.studies.spec import Jobs


def run_here(session: Session, backend: BackendName) -> None:
    """Run the missing runs here, each at most once per call; after a failed run the next one starts."""
    tried = set[Path]()
    while True:
        statuses = session.statuses()
        todo = next((run for run in session.left(statuses, backend) if run.folder not in tried), None)
        if todo is None:
            return
        tried.add(todo.folder)
        announce(session, todo, statuses)
        attempt(session, todo, begin_or_resume)


def announce(session: Session, todo: RunStatus, statuses: RunStatuses) -> None:
    """Print the progress of the study, and the next run."""
    done, total = sum(run.is_done for run in statuses.runs.values()), len(statuses.runs)
    block = f"block {todo.name.block + 1} of {session.request.study.runs}"
    sheet.to_stderr().print(
        f"\n{session.stored.name}: {done} of {total} runs done; next: {block}, {todo.name.arm.name}"
    )


def attempt(session: Session, todo: RunStatus, work: Callable[[Session, RunStatus], None]) -> None:
    """Run or queue one run; print an error and record it in not_started.json, and continue with the study."""
    reasons = folders.not_started_reasons(session.folder)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the table of the study
            work(session, todo)
        reasons.pop(todo.folder.name, None)
    except BenchError as error:
        hints.print_error(error)
        reasons.pop(todo.folder.name, None)
        if not todo.folder.exists():
            reasons[todo.folder.name] = masking.masked(error.what)
    if reasons != folders.not_started_reasons(session.folder):
        folders.write_not_started(session.folder, reasons)


def begin_or_resume(session: Session, todo: RunStatus) -> None:
    """Resume a run that has a plan, else plan and start it.

    Raises:
        BenchError: the run cannot start, or it failed.
    """
    plan = plan_in(todo.folder)
    if plan is not None:
        require_ours(todo.folder)
        runs_here.run(plan, todo.folder)
    else:
        start_anew(session, todo)


def plan_in(folder: Path) -> contract_plans.Plan | None:
    """Return the plan of a run to resume; None if there is none, after removing an incomplete folder.

    Raises:
        ConfigError: the folder has a ledger, and its plan cannot be read.
    """
    if not folder.exists():
        return None
    try:
        return plan_kinds.load(folder / PLAN)
    except ConfigError:
        if (folder / LEDGER).exists():
            raise
    require_ours(folder)
    shutil.rmtree(folder)  # the process was killed while it created the folder: nothing ran in it
    return None


def start_anew(session: Session, todo: RunStatus) -> None:
    """Plan, check and start a run in its folder."""
    start.run(*planned(session, todo), [])


def planned(session: Session, todo: RunStatus) -> tuple[contract_plans.Plan, str]:
    """Return the plan of a run, and its config.yaml."""
    batch = session.batch_of(todo)
    plan, config_yaml = plans.for_run(session.request, todo.name.arm, batch, folder=todo.folder, block=todo.name.block)
    overrides = [*session.request.overrides(todo.name.arm, batch), f"launch.folder={short(todo.folder)}"]
    return plan, with_overrides(config_yaml, overrides, session.request.config_dir)


SHARED = "job."
"""The prefix of folder names of shared jobs."""


def run_queued(session: Session, queue: Queue, backend: BackendName) -> None:
    """Queue the missing runs, each at most once per call; wait until the jobs have ended if launch.wait is set."""
    console, tried = sheet.to_stderr(), set[Path]()
    printed = ""
    while True:
        if isinstance(queue, SharesNodes):
            for folder in _shared_folders(session.folder):
                queue.record_shared_jobs(folder)
        statuses = session.statuses()
        todo = session.left(statuses, backend)
        _submit(session, queue, [run for run in todo if run.folder not in tried])
        is_new = any(run.folder not in tried for run in todo)
        tried |= {run.folder for run in todo}
        statuses = session.statuses() if is_new else statuses
        if (counts := _counted(list(statuses.runs.values()))) != printed:
            console.print(f"{session.stored.name}: {counts}")
            printed = counts
        if not session.waits or not any(run.has_job for run in statuses.runs.values()):
            return
        time.sleep(POLL_S)


def _counted(runs: Sequence[RunStatus]) -> str:
    counts = {state: sum(run.state is state for run in runs) for state in State}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _shared_folders(folder: Path) -> list[Path]:
    """Return the folders of jobs that runs share, and of arrays."""
    return sorted(path.parent for path in folder.glob(f"*/{JOB}") if "runs" in atomic_files.read_object(path))


def _submit(session: Session, queue: Queue, todo: Sequence[RunStatus]) -> None:
    shared = _sharing(session)
    if isinstance(queue, SharesNodes):
        for some in _jobs([run for run in todo if run.name.arm.name in shared], session):
            _submit_shared(session, queue, some)
    elif shared and session.request.study.jobs is Jobs.shared:
        what, fix = (
            "the backend of this cluster cannot run several runs in one job",
            "set `jobs: each` in the study's YAML file",
        )
        raise ConfigError(what, where="jobs: shared", fix=fix)
    else:
        shared = set()
    separate = [one for one in todo if one.name.arm.name not in shared]
    if isinstance(queue, SubmitsArrays):
        new = [one for one in separate if not (one.folder / JOB).exists()]
        separate = [one for one in separate if one not in new]
        _submit_arrays(session, queue, new)
    for one in separate:
        attempt(session, one, submit_one)


def _submit_arrays(session: Session, queue: SubmitsArrays, todo: Sequence[RunStatus]) -> None:
    """Submit new runs as tasks of job arrays; a refused run leaves its reason."""
    prepared: list[start.Prepared] = []

    def prepare(session: Session, one: RunStatus) -> None:
        _remove_unsubmitted(one.folder)
        plan, config_yaml = planned(session, one)
        prepared.append(start.prepare(plan, config_yaml, start.check(plan)))

    for one in todo:
        attempt(session, one, prepare)
    _submit_prepared(session, queue, prepared)


def _submit_prepared(session: Session, queue: SubmitsArrays, prepared: Sequence[start.Prepared]) -> None:
    with redirect_stdout(sys.stderr):  # stdout is for the study's table
        jobs = start.submit_runs(queue, prepared)
    errors = {folder: error for folder, error in jobs.items() if isinstance(error, BenchError)}
    for text in dict.fromkeys(masking.masked(str(error)) for error in errors.values()):
        print(hints.in_this_shell(text), file=sys.stderr)
    refused = {folder.name: masking.masked(error.what) for folder, error in errors.items() if not folder.exists()}
    if refused:
        folders.write_not_started(session.folder, folders.not_started_reasons(session.folder) | refused)


def _sharing(session: Session) -> set[str]:
    """Return the arms whose runs share a job."""
    study = session.request.study
    if study.jobs is Jobs.each:
        return set()
    if study.jobs is Jobs.shared:
        return {arm.name for arm in session.planned if arm.runs}
    return {name for pair in study.pairs for name in (pair.first, pair.second)}


def _jobs(runs: Sequence[RunStatus], session: Session) -> Iterator[list[RunStatus]]:
    """Yield the runs of each shared job: whole blocks, as many as fit into the longest walltime of the cluster."""
    minutes = {arm.name: arm.walltime_min or 0 for arm in session.planned}
    some: list[RunStatus] = []
    for block in range(session.request.study.runs):
        mine = [run for run in runs if run.name.block == block]
        total = sum(minutes[run.name.arm.name] for run in (*some, *mine))
        if some and session.max_walltime_min is not None and total > session.max_walltime_min:
            yield some
            some = []
        some = [*some, *mine]
    if some:
        yield some


def submit_one(session: Session, todo: RunStatus) -> None:
    """Submit a run as a separate job, or resume it.

    Raises:
        BenchError: a check or the queue refuses the run.
    """
    if (todo.folder / JOB).exists():
        resume.resume(todo.folder)
        return
    _remove_unsubmitted(todo.folder)
    start_anew(session, todo)


def _remove_unsubmitted(folder: Path) -> None:
    """Remove the folder of a run that an interrupted call created and did not submit."""
    if folder.exists():
        require_ours(folder)
        shutil.rmtree(folder)


def _submit_shared(session: Session, queue: SharesNodes, todo: Sequence[RunStatus]) -> None:
    """Submit one job for these runs; if they need different nodes, one job for each set of nodes."""
    prepared: list[tuple[Plan, RunStatus]] = []
    for one in todo:
        attempt(session, one, lambda session, one: prepared.append((_prepared(session, queue, one), one)))
    groups = _on_same_nodes(prepared, queue)
    if groups[1:] and session.request.study.jobs is Jobs.shared:
        raise ConfigError(
            "the runs of the study need different nodes, so one job cannot run all of these runs",
            where="jobs: shared",
            fix="set `jobs: each` in the study's YAML file",
        )
    for group in groups:
        if len({one.name.arm.name for _, one in group}) == 1 and session.request.study.jobs is not Jobs.shared:
            new = [(plan, one) for plan, one in group if isinstance(queue, SubmitsArrays) and _is_new(one.folder)]
            if new and isinstance(queue, SubmitsArrays):
                runs = [start.Prepared(plan=plan, folder=one.folder, findings=()) for plan, one in new]
                _submit_prepared(session, queue, runs)
            for _, one in [each for each in group if each not in new]:
                attempt(session, one, submit_one)
            continue
        try:
            job = _submitted(session, queue, [(plan, one.folder) for plan, one in group])
            print(f"job {job}: {len(group)} runs, one after another on the same nodes", file=sys.stderr)
        except BenchError as error:
            hints.print_error(error)


def _is_new(folder: Path) -> bool:
    """Whether a run has a folder, but never had a job: other runs are resumed, and their folders are never removed."""
    used = any((folder / name).exists() for name in (LEDGER, SUBMISSION))
    return not used and not atomic_files.read_object(folder / JOB).get("jobs")


def _on_same_nodes(
    prepared: Sequence[tuple[Plan, RunStatus]], queue: SharesNodes
) -> list[list[tuple[Plan, RunStatus]]]:
    """Return the runs grouped by the nodes that they need, in order."""
    groups: list[list[tuple[Plan, RunStatus]]] = []
    for plan, one in prepared:
        mine = next((group for group in groups if queue.shares_nodes([group[0][0], plan])), None)
        if mine is None:
            groups.append([(plan, one)])
        else:
            mine.append((plan, one))
    return groups


def _prepared(session: Session, queue: SharesNodes, one: RunStatus) -> Plan:
    """Create the folder of a run for a shared job unless it exists, and return its plan."""
    if (one.folder / JOB).exists():
        require_ours(one.folder)
        return plan_kinds.load(one.folder / PLAN)
    _remove_unsubmitted(one.folder)
    plan, config_yaml = planned(session, one)
    run = start.prepare(plan, config_yaml, start.check(plan))
    queue.prepare_shared(plan, run.folder, forced=run.forced)
    return plan


def _submitted(session: Session, queue: SharesNodes, runs: Sequence[tuple[Plan, Path]]) -> str:
    """Submit a shared job and return its id; if that fails, restore the folders of the runs."""
    folder = next(path for n in range(1, 10_000) if not (path := session.folder / f"{SHARED}{n}").exists())
    with ExitStack() as stack:
        stack.enter_context(written(session.folder))
        for _, run in runs:
            stack.enter_context(ledger.reopened(run))
            stack.enter_context(resume.without_reserve(run))
        folder.mkdir(mode=NOT_OTHERS)
        try:
            return queue.submit_shared(runs, folder, name=f"{session.stored.name}-{session.stored.cluster}")
        except BenchError:
            if not (folder / SUBMISSION).exists():  # with this file, a job may have been submitted
                shutil.rmtree(folder)
            raise


def run_sequentially(session: Session) -> None:
    """Run the missing runs one after another on their backends, each at most once per call.

    After a run that cannot start, the next one starts. If the call is stopped, the current job keeps running; the next
    call waits for it and continues.
    """
    tried = set[Path]()
    while True:
        statuses = session.statuses()
        for active in (one for one in statuses.runs.values() if one.has_job):
            _follow(active)
            statuses = session.statuses()
        todo = next((one for one in session.left(statuses) if one.folder not in tried), None)
        if todo is None:
            return
        tried.add(todo.folder)
        announce(session, todo, statuses)
        is_queued = isinstance(backends.get(session.backend_of(todo)), Queue)
        attempt(session, todo, submit_one if is_queued else begin_or_resume)


def _follow(run: RunStatus) -> None:
    """Wait for the end of a run's job and print its states; a job that its backend no longer knows has ended."""
    console = sheet.to_stderr()
    try:
        for job in runs.wait(run.folder):
            reason = f": {job.reason}" if job.reason else ""
            console.print(f"{run.folder.name}: {job.native_state}{reason}", markup=False)
    except KeyboardInterrupt:
        console.print(f"the job keeps running; to cancel it: runstop cancel {short(run.folder)}", markup=False)
        raise
    except SubmitError as error:
        hints.print_error(error)


def run_missing(session: Session) -> int:
    """Run or queue the missing runs; return 0 if every run is valid or active, 1 if one failed or no arm can run.

    Raises:
        ConfigError: another process runs the study, or the study has changed since its runs were started.
    """
    with folders.locked(session.folder, session.stored, session.planned):
        try:
            if session.request.study.jobs is Jobs.sequential:
                run_sequentially(session)
            else:
                _run_concurrently(session)
        except Stopped:
            print(hints.in_this_shell(f"stopped; to continue: {session.stored.command}"), file=sys.stderr)
            raise
    states = [run.state for run in session.statuses().runs.values()]
    return 0 if states and all(state in (State.valid, State.active) for state in states) else 1


def _run_concurrently(session: Session) -> None:
    """Run each arm on its backend: submit to queues first, then run the arms of this machine."""
    for name in session.backends:
        match backends.get(name):
            case Queue() as queue:
                run_queued(session, queue, name)
            case _:
                run_here(session, name)
