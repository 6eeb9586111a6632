"""The ledger of a run: which trial has which seed, how often it was started, and what came of it.

A trial keeps its seed for ever. What an attempt that was cut short left behind is set aside, so that no log ever holds two
attempts and none of it is judged.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from bench.runs import folder as folders
from bench.errors import BenchError
from bench.errors import ConfigError
from bench.errors import SubmitError
from bench.runs.folder import LEDGER
from bench.runs.folder import RANK_LOGS
from bench.runs.folder import STATUS
from bench.contract.plan import Plan
from bench.contract.plan import Trial

PLANNED, RUNNING, INTERRUPTED = "planned", "running", "interrupted"
"""Still to be done; the others are final."""
PROVEN, NOT_PROVEN, ABORTED = "proven", "not proven", "aborted"
OPEN = (PLANNED, RUNNING, INTERRUPTED)
ATTEMPTS = "attempts"
"""Folder of what was cut short: attempts/2.1/ is the first attempt of trial 2."""
CAUSES = ("interrupted_{}.txt", "interrupted.txt")
"""Where the batch script says why it ends before its work is done: that of an array element, which has one trial, or of a job."""

Entry: TypeAlias = dict[str, Any]


def create(folder: Path, plan: Plan) -> None:
    """Write the ledger of a new run; one that is there already stays.

    Raises:
        ConfigError: that one is of other trials.
    """
    planned = [{"trial": t.index, "seed": t.seed} for t in plan.trials]
    with alone(folder):
        if not (folder / LEDGER).exists():
            folders.write(folder / LEDGER, [trial | {"outcome": PLANNED} for trial in planned])
    if [{"trial": entry["trial"], "seed": entry.get("seed")} for entry in read(folder)] != planned:
        raise ConfigError(
            "the ledger is that of a run with other seeds",
            where=str(folder / LEDGER),
            fix="start a new run",
            rule="CFG-05",
        )


def read(folder: Path) -> list[Entry]:
    """Return one entry per trial.

    Raises:
        BenchError: there is none, or it is damaged.
    """
    try:
        entries = json.loads((folder / LEDGER).read_text())
        if all(isinstance(entry["outcome"], str) and isinstance(entry["trial"], int) for entry in entries):
            return list(entries)
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem: Exception | None = error
    else:
        problem = None
    raise BenchError(
        f"the ledger cannot be read: {problem!r}",
        where=str(folder / LEDGER),
        fix="start a new run; the result_K.txt of this one can still be judged",
    ) from problem


def record(folder: Path, trial: int, **facts: Any) -> None:
    """Add what is known of a trial to its entry."""
    with alone(folder):
        entries = read(folder)
        entries[trial] |= facts
        folders.write(folder / LEDGER, entries)


def begin(folder: Path, trial: Trial, *, attempts: int, **where: str) -> bool:
    """Open a trial's next attempt; return False if the trial is done. `where` (job, nodes) is kept with the attempt.

    Raises:
        SubmitError: this job has started it as often as launch.attempts allows, and was cut short each time.
    """
    entry = read(folder)[trial.index]
    if entry["outcome"] not in OPEN:
        return False
    made = list(entry.get("attempts", []))
    said = _cause(folder, trial.index)
    if entry["outcome"] == RUNNING and made:
        made[-1] |= {
            "outcome": INTERRUPTED,
            "cause": said or "lost without a word: the node, or the batch script, died",
        }
    if made:
        _set_aside(folder, trial, len(made))
    tried = [attempt for attempt in made if attempt.get("job") == where.get("job")]
    if len(tried) >= attempts:
        record(folder, trial.index, outcome=INTERRUPTED, attempts=made)
        causes = ", ".join(str(attempt.get("cause", "unknown")) for attempt in tried)
        raise SubmitError(
            f"trial {trial.index} was started {len(tried)} times and cut short each time: {causes}",
            where=str(folder / LEDGER),
            fix="give it more time (walltime) or nodes that nobody takes away, then `python -m bench resume RUN`",
        )
    record(folder, trial.index, outcome=RUNNING, attempts=[*made, {"outcome": RUNNING} | where])
    return True


def end(folder: Path, trial: int, facts: Entry) -> None:
    """Close a trial and its attempt; facts hold its outcome."""
    made = list(read(folder)[trial].get("attempts", []))
    if made:
        made[-1] |= {"outcome": facts["outcome"]}
    record(folder, trial, **facts, **({"attempts": made} if made else {}))


def reopen(folder: Path) -> None:
    """Let a run go on that had ended: its last word is set aside, and aborted trials are open again.

    A trial that ran to its end and missed its target is a result, and stays one.
    """
    if (folder / STATUS).exists():
        kept = _numbered(folder / ATTEMPTS, "run")
        kept.mkdir(parents=True)
        (folder / STATUS).rename(kept / STATUS)
    for entry in read(folder) if (folder / LEDGER).exists() else []:
        if entry["outcome"] == ABORTED:
            record(folder, entry["trial"], outcome=INTERRUPTED)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other elements of a job array out, where the file system has locks."""
    with (folder / ".ledger.lock").open("w") as lock:
        with suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _cause(folder: Path, trial: int) -> str | None:
    """Return why the job's last life ended early, as its batch script said; said once."""
    for name in CAUSES:
        with suppress(OSError):
            said = (folder / name.format(trial)).read_text().strip()
            (folder / name.format(trial)).unlink()
            return said or None
    return None


def _set_aside(folder: Path, trial: Trial, attempt: int) -> None:
    """Move what an attempt left behind to a folder of its own."""
    kept = folder / ATTEMPTS / f"{trial.index}.{attempt}"
    names = (trial.log, f"{RANK_LOGS}/trial_{trial.index}_*", f"{RANK_LOGS}/trial_{trial.index}.*")
    left = [path for name in names for path in folder.glob(name)]
    if left:
        kept.mkdir(parents=True, exist_ok=True)
    for path in left:
        path.rename(kept / path.name)


def _numbered(parent: Path, name: str) -> Path:
    return next(path for n in range(1, 10_000) if not (path := parent / f"{name}.{n}").exists())
