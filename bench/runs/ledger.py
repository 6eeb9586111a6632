"""The ledger of a run: the seed, the attempts and the outcome of each trial.

A trial keeps its seed in every attempt. The files of an interrupted attempt are moved to attempts/, so that no log
holds two attempts, and such a log is never judged.
"""

import fcntl
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import masked_json
from bench.contract import atomic_files, checkpoint, checksums, plan_kinds, regular_files, run_files
from bench.contract import mllog as attempts_of
from bench.contract.mllog import Binding
from bench.contract.plan import Plan, Trial
from bench.contract.run_files import LEDGER, MANIFEST, PLAN, SIGNATURE, STATUS
from bench.errors import BenchError, ConfigError, SubmitError
from bench.runs.older_outcomes import with_current_outcome


class Outcome(StrEnum):
    """The state or the outcome of a trial, or of an attempt."""

    planned = "planned"
    running = "running"
    interrupted = "interrupted"
    valid = "valid"
    invalid = "invalid"
    aborted = "aborted"

    @property
    def is_open(self) -> bool:
        """Whether the trial still has to run; the other outcomes are final."""
        return self in (Outcome.planned, Outcome.running, Outcome.interrupted)

    @property
    def is_result(self) -> bool:
        """Whether the trial completed and was judged."""
        return self in (Outcome.valid, Outcome.invalid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a trial."""

    outcome: Outcome
    job: str | None = None
    nodes: str | None = None
    cause: str | None = None
    """Why it was interrupted."""
    nonce: str | None = None
    """The nonce in the first line of its log; None for attempts of versions that wrote no nonce."""
    checkpoint: int | None = None
    """The step of the newest checkpoint when it started; None if there was none."""
    left_out: dict[str, str] | None = None
    """The nodes of its job that were slow and not used, each with the reason; None if there was none."""
    began_ms: int | None = None
    """When it started, by the wall clock; None for attempts of earlier versions."""
    ended_ms: int | None = None
    """When its outcome was recorded; None if it was killed before, and for attempts of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One trial. The values from its log are None until it is judged."""

    trial: int
    seed: int | None = None
    outcome: Outcome
    minutes: float | None = None
    samples_to_target: int | None = None
    eval_final: float | None = None
    official: dict[str, bool | None] | None = None
    """The verdict of the official checker, by ruleset."""
    not_as_planned: list[str] | None = None
    log_sha256: str | None = None
    """Checksum and size of its log when the trial ended."""
    log_bytes: int | None = None
    plan_sha256: str | None = None
    """The plan of the run (`plan_kinds.identity`) when its ledger was created; None in ledgers of earlier versions,
    until the trial's next attempt."""
    inputs: dict[str, str] | None = None
    """The checksum of each input that its ranks read, from its log."""
    attempts: tuple[Attempt, ...] = ()

    @property
    def nonce(self) -> str | None:
        """The nonce of the last attempt, which must have written the log."""
        return self.attempts[-1].nonce if self.attempts else None


def create(folder: Path, plan: Plan) -> None:
    """Write the ledger of a new run; keep an existing one.

    Raises:
        ConfigError: the existing ledger has other trials.
    """
    plan_sha256 = _plan_sha256(folder)
    planned = [Entry(trial=t.index, seed=t.seed, outcome=Outcome.planned, plan_sha256=plan_sha256) for t in plan.trials]
    with locked(folder):
        if not (folder / LEDGER).exists():
            _write(folder, planned)
    if [(entry.trial, entry.seed) for entry in read(folder)] != [(entry.trial, entry.seed) for entry in planned]:
        raise ConfigError(
            "the ledger (the record of the trials) has other trials or seeds than the plan",
            where=str(folder / LEDGER),
            fix="start a new run with `runstop launch`",
            rule="CFG-05",
        )


def read(folder: Path) -> list[Entry]:
    """Return one entry per trial.

    Raises:
        BenchError: there is no ledger, or it is damaged.
    """
    try:
        return [_entry(raw) for raw in json.loads(regular_files.read_bytes(folder / LEDGER))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BenchError(
            f"the ledger cannot be read: {error!r}",
            where=str(folder / LEDGER),
            fix="start a new run; `runstop parse` can still check the result_K.txt of this run",
        ) from error


def entries(folder: Path) -> list[Entry]:
    """Return one entry per trial; an empty list if no ledger can be read."""
    with suppress(BenchError):
        return read(folder)
    return []


def _plan_sha256(folder: Path) -> str | None:
    """Return the identity of the plan in a folder; None if it has none, or one that cannot be read."""
    with suppress(OSError, UnicodeDecodeError, ConfigError):
        return plan_kinds.identity(regular_files.read_text(folder / PLAN))
    return None


def changed_plan(folder: Path) -> ConfigError | None:
    """Return the error of a plan that is not the one with which the run started; None if it is, or if none is known."""
    known = next((entry.plan_sha256 for entry in entries(folder) if entry.plan_sha256 is not None), None)
    if known is None or _plan_sha256(folder) == known:
        return None
    return checksums.changed(
        f"{PLAN} was changed since the run started",
        folder / PLAN,
        fix="find out who changed the plan and restore the file; to use another plan, start a new run",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_nonce() -> str:
    """Return the nonce of an attempt."""
    return secrets.token_hex(16)


def begin(
    folder: Path,
    trial: Trial,
    *,
    attempts: int,
    job: str | None = None,
    nodes: str | None = None,
    nonce: str | None = None,
    left_out: dict[str, str] | None = None,
    unrecorded_cause: str | None = None,
) -> bool:
    """Start the next attempt of a trial and record its job and nodes; return False if the trial is done.

    Attempts after which there was a new checkpoint are not counted. `unrecorded_cause` is why the previous attempt was
    interrupted, if the batch script recorded no cause.

    Raises:
        SubmitError: this job has started the trial launch.attempts times, and each attempt was interrupted.
        ConfigError: plan.json was changed since the run started.
    """
    entry = read(folder)[trial.index]
    if not entry.outcome.is_open:
        return False
    if (changed := changed_plan(folder)) is not None:
        raise changed
    plan_sha256 = _plan_sha256(folder)
    previous, cause = entry.attempts, _cause(folder, trial.index)
    if entry.outcome is Outcome.running and previous:
        lost = "unknown: the node or the batch script was killed before it could report a cause"
        cause = cause or unrecorded_cause or lost
        previous = (*previous[:-1], replace(previous[-1], outcome=Outcome.interrupted, cause=cause))
    if previous:
        _set_aside(folder, trial, len(previous))
    newest = checkpoint.newest(folder, trial.index)
    tried = [attempt for attempt in previous if attempt.job == job and attempt.checkpoint == newest]
    if len(tried) >= attempts:
        _change(folder, trial.index, lambda entry: replace(entry, outcome=Outcome.interrupted, attempts=previous))
        causes = ", ".join(attempt.cause or "unknown" for attempt in tried)
        raise SubmitError(
            f"trial {trial.index} was started {len(tried)} times and interrupted each time: {causes}",
            where=str(folder / LEDGER),
            fix="raise walltime, or use nodes on which jobs are not preempted, then run `runstop resume RUN`",
        )
    nonce = nonce or new_nonce()
    new = Attempt(
        outcome=Outcome.running,
        job=job,
        nodes=nodes,
        nonce=nonce,
        checkpoint=newest,
        left_out=left_out or None,
        began_ms=_now_ms(),
    )
    attempts_of.save(
        folder, Binding(nonce=nonce, trial=trial.index, attempt=len(previous) + 1, plan_sha256=plan_sha256)
    )
    cleared: dict[str, Any] = dict.fromkeys(("not_as_planned", "log_sha256", "log_bytes", "inputs"))
    cleared["plan_sha256"] = plan_sha256
    _change(folder, trial.index, lambda e: replace(e, outcome=Outcome.running, attempts=(*previous, new), **cleared))
    return True


def end(folder: Path, trial: int, outcome: Outcome, *, cause: str | None = None, **facts: Any) -> None:
    """Record the outcome of a trial and of its attempt; facts are further fields of Entry."""

    def closed(entry: Entry) -> Entry:
        ended = (
            replace(last, outcome=outcome, cause=cause or last.cause, ended_ms=_now_ms())
            for last in entry.attempts[-1:]
        )
        return replace(entry, outcome=outcome, attempts=(*entry.attempts[:-1], *ended), **facts)

    _change(folder, trial, closed)


def reopen(folder: Path) -> None:
    """Make a run that has ended ready to resume: move status.json and the manifest away, reopen aborted trials.

    A completed trial that missed its target is a result, and keeps its outcome.
    """
    with locked(folder):
        before = read(folder) if (folder / LEDGER).exists() else []
        opened = [replace(e, outcome=Outcome.interrupted) if e.outcome is Outcome.aborted else e for e in before]
        if opened != before:
            _write(folder, opened)
        final_files = [folder / name for name in (SIGNATURE, MANIFEST, STATUS) if (folder / name).exists()]
        if final_files:
            kept = _numbered(folder / run_files.ATTEMPTS, "run")
            kept.mkdir(parents=True)
        for path in final_files:  # status.json is moved last: while it is there, the run may have to be reopened
            path.rename(kept / path.name)


@contextmanager
def reopened(folder: Path) -> Iterator[None]:
    """Reopen a run for the block; if reopening or the block fails, restore every file."""
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
def locked(folder: Path) -> Iterator[None]:
    """Lock the ledger against other tasks of a job array, if the file system supports locks."""
    with (folder / run_files.LEDGER_LOCK).open("w") as lock:
        with suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _change(folder: Path, trial: int, change: Callable[[Entry], Entry]) -> None:
    """Replace the entry of a trial by `change(entry)`."""
    with locked(folder):
        changed = read(folder)
        changed[trial] = change(changed[trial])
        _write(folder, changed)


def _write(folder: Path, content: list[Entry]) -> None:
    masked_json.write(folder / LEDGER, [_plain(entry) for entry in content])


def _plain(value: Entry | Attempt) -> dict[str, Any]:
    """Return the JSON object of an entry or an attempt, without the fields that are None."""
    raw = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Entry):
        raw["attempts"] = [_plain(attempt) for attempt in value.attempts] or None
    return {name: content for name, content in raw.items() if content is not None}


def _entry(raw: dict[str, Any]) -> Entry:
    """Return an entry of the file; unknown keys are ignored."""
    if not isinstance(raw["trial"], int):
        raise TypeError(f"trial {raw['trial']!r}")
    raw = with_current_outcome(raw)
    known = {f.name: raw[f.name] for f in fields(Entry) if f.name in raw}
    known["attempts"] = tuple(_attempt(attempt) for attempt in raw.get("attempts") or ())
    return Entry(**known | {"outcome": Outcome(raw["outcome"])})


def _attempt(raw: dict[str, Any]) -> Attempt:
    raw = with_current_outcome(raw)
    known = {f.name: raw[f.name] for f in fields(Attempt) if f.name in raw}
    return Attempt(**known | {"outcome": Outcome(raw["outcome"])})


def _cause(folder: Path, trial: int) -> str | None:
    """Return why the last attempt was interrupted, from the file that its batch script wrote; remove the file."""
    for name in (run_files.interrupted(f"_{trial}"), run_files.interrupted()):
        with suppress(OSError):
            cause = regular_files.read_text(folder / name).strip()
            (folder / name).unlink()
            return cause or None
    return None


def _set_aside(folder: Path, trial: Trial, number: int) -> None:
    """Move the files of an attempt to attempts/TRIAL.NUMBER.

    Its binding is moved before the others are listed: a rank of that attempt that still runs then cannot open a log.
    """
    kept, binding = folder / run_files.attempt(trial.index, number), folder / run_files.binding(trial.index)
    if binding.exists():
        kept.mkdir(parents=True, exist_ok=True)
        binding.rename(kept / binding.name)
    left = [path for pattern in run_files.of_attempt(trial.index) for path in folder.glob(pattern)]
    if left:
        kept.mkdir(parents=True, exist_ok=True)
    for path in left:
        path.rename(kept / path.name)


def _numbered(parent: Path, name: str) -> Path:
    return next(path for n in range(1, 10_000) if not (path := parent / f"{name}.{n}").exists())
