"""Queue what a study lacks."""

from bench.backends import Queue
from bench.errors import ConfigError
from bench.studies.session import Session


def run(session: Session, queue: Queue) -> None:
    raise ConfigError("studies on a queue are not there yet", where=str(session.folder), fix="cluster=local")
