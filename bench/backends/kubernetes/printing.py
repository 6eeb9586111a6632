"""Print what a run's logs get while it goes on, so that `kubectl logs` of its first pod shows the run.

Each line stands behind the name of its file. Whoever does not see the results volume has trials and errors all the
same, and MLLOG lines are read from such a copy as from their own file.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.contract import run_files, secrets

EVERY_S = 2.0
PATTERNS = (run_files.PREPARE_LOG, run_files.RESULTS, *(f"{run_files.RANK_LOGS}/*.{kind}" for kind in ("out", "err")))


@contextmanager
def printed(run: Path) -> Iterator[None]:
    """Print lines of the run's files for as long as the block takes, and what came last at its end."""
    ended, places = threading.Event(), dict[Path, int]()

    def follow() -> None:
        while True:
            is_last = ended.wait(EVERY_S)
            for line in added(run, places):
                with suppress(OSError):
                    os.write(sys.stdout.fileno(), line)
            if is_last:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10 * EVERY_S)


def added(run: Path, places: dict[Path, int]) -> Iterator[bytes]:
    """Yield the whole lines that files have got since, but the runner's, which it prints by itself.

    `places` keeps how far each was read.
    """
    files = sorted(path for pattern in PATTERNS for path in run.glob(pattern))
    for path in (path for path in files if path != run / run_files.RUNNER_OUTPUT):
        with suppress(OSError), path.open("rb") as file:  # it may be set aside by the next attempt
            start = places.get(path, 0)
            start = 0 if os.fstat(file.fileno()).st_size < start else start  # that attempt's own is shorter
            file.seek(start)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            places[path] = start + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                yield f"{path.name}: {secrets.masked(line)}\n".encode()
