"""Run or queue what a study lacks, as its cluster's backend does it."""

import sys

from bench import backends
from bench.errors import ConfigError, Stopped
from bench.studies import folder as folders
from bench.studies import queued, running
from bench.studies.session import Session
from bench.studies.standing import State


def go_on(session: Session) -> int:
    """Return 0 when every run is proven, or where there is a queue, when none has failed and the missing are queued.

    Raises:
        ConfigError: no arm can run, another process runs the study, or it has changed since its runs were made.
    """
    _check_some_run(session)
    with folders.opened(session.folder, session.kept, session.planned):
        try:
            for name in session.backends:
                match backends.get(name):
                    case backends.Queue() as queue:
                        queued.run(session, queue, name)
                    case _:
                        running.run(session, name)
        except Stopped:
            print(f"stopped; to go on: {session.kept.command}", file=sys.stderr)
            raise
    states = [run.state for run in session.standings().runs.values()]
    return 0 if all(state in (State.proven, State.active) for state in states) else 1


def _check_some_run(session: Session) -> None:
    """Raise ConfigError where no arm can run, and the reason lies with the request: there is nothing to make."""
    if any(arm.runs for arm in session.planned):
        return
    reasons = dict.fromkeys(f"{arm.name}: {arm.reason}" for arm in session.planned)
    raise ConfigError(
        "no arm of the study can run:\n    " + "\n    ".join(reasons),
        where=session.kept.command,
        fix="choose a cluster on which one does; --dry-run shows all of them",
    )
