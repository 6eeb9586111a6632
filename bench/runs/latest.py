"""The newest run: what `latest` stands for."""

import logging
import os
from pathlib import Path

from bench.contract.run_files import LEDGER, PLAN
from bench.errors import ConfigError

LATEST = "latest"
_log = logging.getLogger(__name__)


def root() -> Path:
    """Return the folder that run folders are made in."""
    return Path(os.environ.get("LOGDIR") or "runs")


def resolved(run: Path) -> Path:
    """Return the run folder that is meant: the newest one for `latest`, unless a folder has that name.

    Raises:
        ConfigError: there is no run yet.
    """
    if str(run) != LATEST or run.exists():
        return run
    found = [path for name in (PLAN, LEDGER) for path in root().glob(f"*/{name}")]
    if not found:
        raise ConfigError(
            "there is no run yet", where=str(root()), fix="name a run folder, or set LOGDIR to the folder of your runs"
        )
    newest = max(found, key=lambda path: (path.stat().st_mtime, path)).parent
    _log.info("the newest run is %s", newest)
    return newest
