"""Run or queue what a study lacks, as its cluster's backend does it."""

import sys

from bench import backends
from bench.errors import Stopped
from bench.studies import folder as folders
from bench.studies import in_turn, queued, running
from bench.studies.session import Session
from bench.studies.spec import Jobs
from bench.studies.standing import State


def go_on(session: Session) -> int:
    """Return 0 when every run is proven or queued; 1 when one has failed, and where no arm can run.

    Raises:
        ConfigError: another process runs the study, or it has changed since its runs were made.
    """
    with folders.opened(session.folder, session.kept, session.planned):
        try:
            if session.request.study.jobs is Jobs.in_turn:
                in_turn.run(session)
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
            case backends.Queue() as queue:
                queued.run(session, queue, name)
            case _:
                running.run(session, name)
