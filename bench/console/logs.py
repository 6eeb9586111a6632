"""Print the output of a run's job and ranks with secrets masked, and follow it as it grows."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from bench import backends, masking
from bench.backends.protocol import KeepsOutput
from bench.contract.regular_files import is_regular, opened
from bench.contract.run_files import JOB, RANK_LOGS, STATUS
from bench.errors import ConfigError
from bench.mlperf.reader import printable
from bench.runs import names
from bench.runs import run as runs
from bench.runs.folder import short
from bench.runs.run import Run

POLL_S = 1.0
MAX_BYTES = 1 << 26
_PATTERNS = (
    "*.out",
    "*.err",
    f"{RANK_LOGS}/*.out",
    f"{RANK_LOGS}/*.err",
    f"{RANK_LOGS}/*.txt",
    f"{RANK_LOGS}/*.log",
)


def show(folder: Path, *, num_lines: int | None, follow: bool, as_json: bool = False) -> None:
    """Print the last lines of each file, all lines for None; with `follow`, also new lines until the run ends.

    With `as_json`, every line is an object with the name of its file.

    Raises:
        ConfigError: the folder is not a run folder, or has no output (yet).
    """
    if not folder.is_dir():
        raise names.not_a_run(folder)
    if not any(written(folder)):
        runs.require_run(folder)
    if not any(written(folder)) and _show_printed(folder, num_lines, follow=follow, as_json=as_json):
        return
    read: dict[Path, int] = {}
    printed = _Output(as_json)
    while True:
        is_over = (
            folder / STATUS
        ).exists() or not follow  # checked before reading, so that the last lines are not missed
        for path in written(folder):
            limit = num_lines if path not in read else None
            lines, read[path] = _lines(path, read.get(path, 0))
            printed.add(short(path), lines[-limit:] if limit else lines)
        if is_over:
            break
        time.sleep(POLL_S)
    if not read:
        raise _no_output(folder)


def _no_output(folder: Path) -> ConfigError:
    run = runs.in_folders([folder], must_answer=False)[0]
    if run.status is not None or (run.states and not run.is_active):
        what, fix = "this run has ended, and its job wrote no output", f"to see why: runstop why {short(folder)}"
    else:
        what = "the job of this run has not written any output yet"
        fix = "run the command again later, or add --follow to wait for the output"
    return ConfigError(what, where=str(folder), fix=fix)


def _show_printed(folder: Path, num_lines: int | None, *, follow: bool, as_json: bool) -> bool:
    """Print the output that the run's backend keeps, such as pod logs; return whether there is any."""
    read: dict[str, int] = {}
    printed = _Output(as_json)
    while (run := _printing(folder)) is not None:
        backend = backends.get(run.backend)
        assert isinstance(backend, KeepsOutput)
        for name, text in backend.output(run.id).items():
            lines = text[: text.rfind("\n") + 1].splitlines()
            new = lines[read.get(name, 0) :]
            shown = new[-num_lines:] if num_lines and name not in read else new
            read[name] = len(lines)
            printed.add(name, shown)
        if not (follow and run.is_active):
            break
        time.sleep(POLL_S)
    return bool(read)


def _printing(folder: Path) -> Run | None:
    """Return the run of a folder if its backend keeps the output of its processes."""
    if not (folder / JOB).exists():
        return None
    run = runs.find(folder)
    return run if run.jobs and not run.why_not_queried and isinstance(backends.get(run.backend), KeepsOutput) else None


def written(folder: Path) -> Iterator[Path]:
    """Yield the output files of the job, then those of the ranks, by name."""
    for pattern in _PATTERNS:
        yield from sorted(path for path in folder.glob(pattern) if is_regular(path) and path.stat().st_size)


def _lines(path: Path, start: int) -> tuple[list[str], int]:
    """Return the complete lines of a file from an offset, and the offset of the next line.

    Of more than MAX_BYTES only the last ones are read.
    """
    try:
        with opened(path) as file:
            start = max(start, file.seek(0, os.SEEK_END) - MAX_BYTES)
            file.seek(start)
            data = bytearray()
            while len(data) < MAX_BYTES and (chunk := file.read(1 << 20)):
                data += chunk
    except OSError as error:
        raise ConfigError(
            f"the output cannot be read: {error.strerror}",
            where=str(path),
            fix="give this user read permission for the file",
        ) from error
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), start + len(whole)


class _Output:
    """Prints lines with secrets masked and control characters escaped, and the name of their file when it changes."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._last = ""

    def add(self, name: str, lines: list[str]) -> None:
        """Print the lines of a file or process."""
        shown = masking.masked("\n".join(lines)).split("\n") if lines else []
        if self._as_json:
            from bench import answers
            from bench.answers.schema import LogLine

            answers.show(*(LogLine(file=name, text=line) for line in shown))
            return
        if shown and name != self._last:
            print(f"==> {printable(name)} <==", flush=True)
            self._last = name
        for line in shown:
            print(printable(line), flush=True)
