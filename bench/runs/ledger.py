"""The ledger of a run: which trial has which seed, how often it was started, and what came of it.

A trial keeps its seed for ever. What an attempt that was cut short left behind is set aside, so that no log ever holds
two attempts and none of it is judged.
"""

import fcntl
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import masked_json
from bench.contract import atomic_files, checkpoint, run_files
from bench.contract import mllog as attempts_of
from bench.contract.mllog import Binding
from bench.contract.plan import Plan, Trial
from bench.contract.run_files import LEDGER, MANIFEST, STATUS
from bench.errors import BenchError, ConfigError, SubmitError


class Outcome(StrEnum):
    """Where a trial, or an attempt at it, stands."""

    planned = "planned"
    running = "running"
    interrupted = "interrupted"
    proven = "proven"
    not_proven = "not proven"
    aborted = "aborted"

    @property
    def is_open(self) -> bool:
        """Whether it is still to be done; the others are final."""
        return self in (Outcome.planned, Outcome.running, Outcome.interrupted)

    @property
    def is_result(self) -> bool:
        """Whether the trial ran to its end and was judged."""
        return self in (Outcome.proven, Outcome.not_proven)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a trial."""

    outcome: Outcome
    job: str | None = None
    nodes: str | None = None
    cause: str | None = None
    """Why it was cut short."""
    nonce: str | None = None
    """What its log begins with; None for attempts of versions that had no nonces."""
    checkpoint: int | None = None
    """The step of the newest checkpoint when it began; None where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One trial. What its log proved is None until it was judged."""

    trial: int
    seed: int | None = None
    outcome: Outcome
    minutes: float | None = None
    samples_to_target: int | None = None
    eval_final: float | None = None
    official: dict[str, bool | None] | None = None
    """The official checker's verdict by ruleset."""
    not_as_planned: list[str] | None = None
    log_sha256: str | None = None
    """Of its log, as that was when the trial ended."""
    log_bytes: int | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def nonce(self) -> str | None:
        """That of the last attempt, which is the one that its log must be of."""
        return self.attempts[-1].nonce if self.attempts else None


def create(folder: Path, plan: Plan) -> None:
    """Write the ledger of a new run; one that is there already stays.

    Raises:
        ConfigError: that one is of other trials.
    """
    planned = [Entry(trial=t.index, seed=t.seed, outcome=Outcome.planned) for t in plan.trials]
    with alone(folder):
        if not (folder / LEDGER).exists():
            _write(folder, planned)
    if [(entry.trial, entry.seed) for entry in read(folder)] != [(entry.trial, entry.seed) for entry in planned]:
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
        return [_entry(raw) for raw in json.loads((folder / LEDGER).read_text())]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BenchError(
            f"the ledger cannot be read: {error!r}",
            where=str(folder / LEDGER),
            fix="start a new run; the result_K.txt of this one can still be judged",
        ) from error


def found(folder: Path) -> list[Entry]:
    """Return one entry per trial, or nothing where there is no ledger that can be read."""
    with suppress(BenchError):
        return read(folder)
    return []


def begin(folder: Path, trial: Trial, *, attempts: int, job: str | None = None, nodes: str | None = None) -> bool:
    """Open a trial's next attempt, and keep job and nodes with it; return False if the trial is done.

    Attempts that have brought the trial to a new checkpoint are not counted.

    Raises:
        SubmitError: this job has started it as often as launch.attempts allows, and was cut short each time.
    """
    entry = read(folder)[trial.index]
    if not entry.outcome.is_open:
        return False
    made, cause = entry.attempts, _cause(folder, trial.index)
    if entry.outcome is Outcome.running and made:
        lost = "lost without a word: the node, or the batch script, died"
        made = (*made[:-1], replace(made[-1], outcome=Outcome.interrupted, cause=cause or lost))
    if made:
        _set_aside(folder, trial, len(made))
    newest = checkpoint.newest(folder, trial.index)
    tried = [attempt for attempt in made if attempt.job == job and attempt.checkpoint == newest]
    if len(tried) >= attempts:
        _change(folder, trial.index, lambda entry: replace(entry, outcome=Outcome.interrupted, attempts=made))
        causes = ", ".join(attempt.cause or "unknown" for attempt in tried)
        raise SubmitError(
            f"trial {trial.index} was started {len(tried)} times and cut short each time: {causes}",
            where=str(folder / LEDGER),
            fix="give it more time (walltime) or nodes that nobody takes away, then `python -m bench resume RUN`",
        )
    nonce = secrets.token_hex(16)
    new = Attempt(outcome=Outcome.running, job=job, nodes=nodes, nonce=nonce, checkpoint=newest)
    attempts_of.save(folder, Binding(nonce=nonce, trial=trial.index, attempt=len(made) + 1))
    nothing: dict[str, Any] = dict.fromkeys(("not_as_planned", "log_sha256", "log_bytes"))
    _change(folder, trial.index, lambda e: replace(e, outcome=Outcome.running, attempts=(*made, new), **nothing))
    return True


def end(folder: Path, trial: int, outcome: Outcome, *, cause: str | None = None, **facts: Any) -> None:
    """Close a trial and its attempt; facts are what its log proved, by the names of Entry's fields."""

    def closed(entry: Entry) -> Entry:
        ended = (replace(last, outcome=outcome, cause=cause or last.cause) for last in entry.attempts[-1:])
        made = (*entry.attempts[:-1], *ended)
        return replace(entry, outcome=outcome, attempts=made, **facts)

    _change(folder, trial, closed)


def reopen(folder: Path) -> None:
    """Let a run go on that had ended: its last words are set aside, and aborted trials are open again.

    A trial that ran to its end and missed its target is a result, and stays one.
    """
    with alone(folder):
        before = read(folder) if (folder / LEDGER).exists() else []
        opened = [replace(e, outcome=Outcome.interrupted) if e.outcome is Outcome.aborted else e for e in before]
        if opened != before:
            _write(folder, opened)
        last_words = [folder / name for name in (MANIFEST, STATUS) if (folder / name).exists()]
        if last_words:
            kept = _numbered(folder / run_files.ATTEMPTS, "run")
            kept.mkdir(parents=True)
        for path in last_words:  # status.json goes last: whoever finds it knows that the run may have to be reopened
            path.rename(kept / path.name)


@contextmanager
def reopened(folder: Path) -> Iterator[None]:
    """Reopen a run for what is done in the block; if either fails, every file is as it was."""
    attempts = folder / run_files.ATTEMPTS
    kept, is_new = _numbered(attempts, "run"), not attempts.exists()
    try:
        with atomic_files.kept(folder / LEDGER):
            reopen(folder)
            yield
    except BaseException:
        for path in kept.glob("*"):
            path.rename(folder / path.name)
        if kept.exists():
            kept.rmdir()
        if is_new and attempts.exists():
            attempts.rmdir()
        raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other elements of a job array out, where the file system has locks."""
    with (folder / run_files.LEDGER_LOCK).open("w") as lock:
        with suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _change(folder: Path, trial: int, change: Callable[[Entry], Entry]) -> None:
    """Replace a trial's entry by what `change` makes of it."""
    with alone(folder):
        entries = read(folder)
        entries[trial] = change(entries[trial])
        _write(folder, entries)


def _write(folder: Path, entries: list[Entry]) -> None:
    masked_json.write(folder / LEDGER, [_plain(entry) for entry in entries])


def _plain(value: Entry | Attempt) -> dict[str, Any]:
    """Return what the file holds: what is not known is left out."""
    raw = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Entry):
        raw["attempts"] = [_plain(attempt) for attempt in value.attempts] or None
    return {name: content for name, content in raw.items() if content is not None}


def _entry(raw: dict[str, Any]) -> Entry:
    """Return an entry of the file; earlier versions wrote the same keys, and other ones are none of ours."""
    if not isinstance(raw["trial"], int):
        raise TypeError(f"trial {raw['trial']!r}")
    known = {f.name: raw[f.name] for f in fields(Entry) if f.name in raw}
    known["attempts"] = tuple(_attempt(attempt) for attempt in raw.get("attempts") or ())
    return Entry(**known | {"outcome": Outcome(raw["outcome"])})


def _attempt(raw: dict[str, Any]) -> Attempt:
    known = {f.name: raw[f.name] for f in fields(Attempt) if f.name in raw}
    return Attempt(**known | {"outcome": Outcome(raw["outcome"])})


def _cause(folder: Path, trial: int) -> str | None:
    """Return why the last attempt was cut short, as its batch script said; said once."""
    for name in (run_files.interrupted(f"_{trial}"), run_files.interrupted()):
        with suppress(OSError):
            said = (folder / name).read_text().strip()
            (folder / name).unlink()
            return said or None
    return None


def _set_aside(folder: Path, trial: Trial, number: int) -> None:
    """Move what an attempt left behind to a folder of its own."""
    kept = folder / run_files.attempt(trial.index, number)
    left = [path for pattern in run_files.of_attempt(trial.index) for path in folder.glob(pattern)]
    if left:
        kept.mkdir(parents=True, exist_ok=True)
    for path in left:
        path.rename(kept / path.name)


def _numbered(parent: Path, name: str) -> Path:
    return next(path for n in range(1, 10_000) if not (path := parent / f"{name}.{n}").exists())
