"""Run what a study lacks on this machine, one run after another; an interrupted run goes on where it was."""

import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from bench.console import messages
from bench.contract import plan as contract_plans
from bench.contract import secrets
from bench.contract.run_files import LEDGER, PLAN
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError
from bench.launch import run_local, start
from bench.runs.folder import require_ours, short
from bench.runs.summary import with_overrides
from bench.studies import folder as folders
from bench.studies import plans
from bench.studies.session import Session
from bench.studies.standing import Standing, Standings


def run(session: Session, backend: BackendName) -> None:
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
    messages.to_stderr().print(f"\n{session.kept.name}: {done} of {total} runs are done; {block}, {todo.name.arm.name}")


def attempt(session: Session, todo: Standing, work: Callable[[Session, Standing], None]) -> None:
    """Run or queue one arm in one block; what stops it is printed and kept, unless it stops the study."""
    reasons = folders.not_started(session.folder)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the study's table
            work(session, todo)
        reasons.pop(todo.folder.name, None)
    except BenchError as error:
        print(secrets.masked(str(error)), file=sys.stderr)
        reasons.pop(todo.folder.name, None)
        if not todo.folder.exists():
            reasons[todo.folder.name] = secrets.masked(error.what)
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
        run_local.run(plan, todo.folder)
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
        return contract_plans.load(folder / PLAN)
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
