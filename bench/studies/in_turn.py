"""Run what a study lacks, one run after another wherever each of them runs: for places that have the same machines.

A queue would begin runs side by side, on nodes or on a machine that others of the same block work on. Here a job is
followed to its end before the next run begins.
"""

import sys
from pathlib import Path

from bench import backends
from bench.console import messages
from bench.errors import SubmitError
from bench.runs import run as runs
from bench.runs.folder import short
from bench.studies import queued, running
from bench.studies.session import Session
from bench.studies.standing import Standing


def run(session: Session) -> None:
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
        running.announce(session, todo, standings)
        is_queued = isinstance(backends.get(session.backend_of(todo)), backends.Queue)
        running.attempt(session, todo, queued.submit_one if is_queued else running.begin_or_resume)


def _follow(run: Standing) -> None:
    """Wait for the end of a run's job, and say where it stands; one that nobody knows any more has ended."""
    console = messages.to_stderr()
    try:
        for job in runs.wait(run.folder):
            reason = f": {job.reason}" if job.reason else ""
            console.print(f"{run.folder.name}: {job.word}{reason}", markup=False)
    except KeyboardInterrupt:
        console.print(f"the job goes on; python -m bench cancel {short(run.folder)} ends it", markup=False)
        raise
    except SubmitError as error:
        print(error, file=sys.stderr)
