"""Print what a run's job and ranks wrote, and go on as they write more."""

import time
from collections.abc import Iterator
from pathlib import Path

from bench.contract.run_files import RANK_LOGS, STATUS
from bench.errors import ConfigError
from bench.mlperf.reader import printable
from bench.runs.folder import short

POLL_S = 1.0
_PATTERNS = (
    "*.out",
    "*.err",
    f"{RANK_LOGS}/*.out",
    f"{RANK_LOGS}/*.err",
    f"{RANK_LOGS}/*.txt",
    f"{RANK_LOGS}/*.log",
)


def show(folder: Path, *, num_lines: int | None, follow: bool) -> None:
    """Print the last lines of each file, all of them for None; with `follow`, what is added until the run has ended.

    Raises:
        ConfigError: the folder is not there, or nothing has been written yet.
    """
    if not folder.is_dir():
        raise ConfigError("no such folder", where=str(folder), fix="python -m bench runs lists the runs")
    read: dict[Path, int] = {}
    last: Path | None = None
    while True:
        is_over = (folder / STATUS).exists() or not follow  # asked first: what was written last is then read too
        for path in written(folder):
            limit = num_lines if path not in read else None
            lines, read[path] = _lines(path, read.get(path, 0))
            if lines and path != last:
                print(f"==> {short(path)} <==", flush=True)
                last = path
            for line in lines[-limit:] if limit else lines:
                print(line, flush=True)
        if is_over:
            break
        time.sleep(POLL_S)
    if not read:
        raise ConfigError("neither job nor ranks have written anything", where=str(folder), fix="wait, or --follow")


def written(folder: Path) -> Iterator[Path]:
    """Yield the files that job and ranks write, those of the job first, then by name."""
    for pattern in _PATTERNS:
        yield from sorted(path for path in folder.glob(pattern) if path.stat().st_size)


def _lines(path: Path, start: int) -> tuple[list[str], int]:
    """Return the whole lines of a file from a place on, as a terminal may show them, and where the next one begins."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [printable(line) for line in whole.decode(errors="replace").splitlines()], start + len(whole)
