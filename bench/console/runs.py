"""List runs: start time, overrides, job state and trial outcomes."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.console.sheet import show as show_sheet
from bench.contract.schema import BackendName
from bench.errors import with_rule
from bench.report.tables import TextTable
from bench.runs import names, tags
from bench.runs import run as run_folders
from bench.runs.filters import Filter
from bench.runs.folder import plan_in, short
from bench.runs.ledger import Outcome
from bench.runs.run import Run
from bench.runs.status import Ending
from bench.runs.summary import Summary, summary

if TYPE_CHECKING:
    from bench.answers.schema import Run as RunAnswer

COLUMNS = (
    *("run", "started", "state", "trials", "tags", "minutes", "step time (ms)", "tokens/s"),
    *("reason", "overrides", "note", "job"),
)
SWEEP_COLUMNS = ("run", "overrides", "valid trials", "step time (ms)", "minutes", "tokens/s", "tokens/s vs. first run")
REFRESH_S = 10.0
ACTIVE, UNKNOWN = "active", "unknown"
ANY = Filter()
ENDED = "ended"
"""The state of a run on this machine that ended without a final status."""
STATUSES = (ACTIVE, *Ending, ENDED, UNKNOWN)


def show(
    root: Path,
    *,
    active: bool,
    watch: bool,
    as_json: bool,
    limit: int | None = None,
    only: Sequence[Path] | None = None,
    wanted: Filter = ANY,
    status: str | None = None,
) -> int:
    """Print the newest `limit` runs below a folder, or those of `only`; with `watch`, repeat until none is active.

    Return the exit code: 1 if a backend does not answer that a listed run may still use.

    Raises:
        ConfigError: the folder does not exist.
    """
    while True:
        if only is None:
            names.require_root(root)
        folders = names.below(root) if only is None else list(only)
        known = {run.folder: run for run in run_folders.in_folders(wanted.selected(folders), must_answer=False)}
        runs = [known[folder] for folder in folders if folder in known and _is_wanted(known[folder], active, status)]
        listed = [(run, summary(run.folder)) for run in runs[:limit]]
        if as_json:
            from bench import answers

            answers.show(*(answer(run, results) for run, results in listed))
        else:
            filters = " ".join(filter(None, (str(wanted), status and f"--status {status}", "--active" * active)))
            why_none = "" if runs else _why_none(filters, folders)
            show_sheet(sheet(root, listed, num_runs=len(runs), why_none=why_none))
        if not watch or not any(run.is_active or run.may_be_active for run in runs):
            return int(any(run.may_be_active for run in runs))
        time.sleep(REFRESH_S)


def _is_wanted(run: Run, active: bool, status: str | None) -> bool:
    if active and not (run.is_active or run.may_be_active):
        return False
    return status is None or status in (_status(run), run.state_name)


def _status(run: Run) -> str:
    """Return the outcome of a run that has ended; else `active` or `unknown`."""
    if run.is_active or run.status is None:
        return ACTIVE if run.is_active else UNKNOWN
    return str(run.status.outcome)


def _why_none(filters: str, folders: Sequence[Path]) -> str:
    """Return why no run is listed: there is none, or the filters select none of those in the folder."""
    if not filters or not folders:
        return "no runs in this folder"
    plans = [plan for folder in folders if (plan := plan_in(folder)) is not None]
    known = {
        "tasks": {plan.config.task.name for plan in plans},
        "clusters": {plan.config.cluster.name for plan in plans},
        "tags": {tag for folder in folders for tag in tags.read(folder).tags},
    }
    lists = "; ".join(f"{name}: {', '.join(sorted(values))}" for name, values in known.items() if values)
    return f"none of {len(folders)} runs has {filters}. {lists}"


def sheet(root: Path, runs: Sequence[tuple[Run, Summary]], *, num_runs: int, why_none: str) -> TextTable:
    """Return the runs as a table, the newest first."""
    rows = []
    for run, results in runs:
        state, _, why = run.state_name.partition(": ")
        rows.append(
            (
                run.folder.name,
                results.started,
                state,
                _trials(run),
                ", ".join(results.tags.tags),
                *_speed(results),
                "; ".join(part for part in (why, _reason(run)) if part),
                results.overrides,
                results.tags.note,
                ", ".join(run.jobs[-1:]),
            )
        )
    active = sum(run.is_active for run, _ in runs)
    more = "" if num_runs == len(runs) else f"; {num_runs - len(runs)} older runs not listed: use --limit N"
    unknown = sum(run.may_be_active for run, _ in runs)
    counts = f"queued or running: {active}" + (f", not known: {unknown}" if unknown else "")
    caption = f"runs: {len(runs)}, {counts}{more}" if runs else why_none
    return TextTable(f"runs in {short(root)}", rows, columns=COLUMNS, caption=caption, is_list=True)


def answer(run: Run, results: Summary) -> "RunAnswer":
    """Return a run as an answer of --json."""
    from bench import answers

    return answers.run(run, results, reason=_reason(run), outcomes=_outcomes(run))


def tags_sheets(paths: Sequence[Path]) -> list[TextTable]:
    """Return a table with the tags and notes of runs; no table if none has any."""
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    rows = [
        (names.name_of(folder), ", ".join(own.tags), own.note) for folder in folders if (own := tags.read(folder)).rows
    ]
    return [TextTable("tags and notes", rows, columns=("run", "tags", "note"))] if rows else []


def sweep_sheet(runs: Sequence[Summary]) -> TextTable:
    """Return the runs of one sweep as a table, with the first run as the baseline."""
    overrides = [run.overrides.split() for run in runs]
    base = runs[0].tokens_s if runs else None
    rows = []
    for run, own in zip(runs, overrides, strict=True):
        differing = " ".join(each for each in own if not all(each in others for others in overrides))
        minutes, step_time, tokens_s = _speed(run)
        ratio = f"{run.tokens_s / base:.3f}" if run.tokens_s and base else ""
        rows.append((run.folder.name, differing, str(run.num_valid), step_time, minutes, tokens_s, ratio))
    caption = (
        "Medians over each run's valid trials. A ratio above 1 is faster than the first run. Small differences need "
        "more trials (trials=N)."
    )
    return TextTable("runs of this sweep", rows, SWEEP_COLUMNS, caption)


def _speed(run: Summary) -> tuple[str, str, str]:
    return tuple(
        "" if value is None else form.format(value)
        for value, form in ((run.minutes, "{:.2f}"), (run.step_time_ms, "{:,.1f}"), (run.tokens_s, "{:,.0f}"))
    )  # type: ignore[return-value]


def _outcomes(run: Run) -> list[Outcome]:
    """Return the outcome of each trial; one that was running when its job ended is interrupted."""
    replaced = {} if run.is_active or not run.is_queried else {Outcome.running: Outcome.interrupted}
    return [replaced.get(outcome, outcome) for outcome in run.outcomes]


def _trials(run: Run) -> str:
    counts = Counter(_outcomes(run))
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _reason(run: Run) -> str:
    """Return why a run waits or failed; empty if it runs or succeeded."""
    if run.is_active:
        return run.state.reason if run.state else ""
    if run.has_died:
        killed = "the batch script was killed or its node failed"
        if run.backend in (BackendName.local, BackendName.ssh):
            killed = "the process that drove the run was killed, or its machine failed"
        return f"no final status: {killed}; to continue: runstop resume {short(run.folder)}"
    status = run.status
    return with_rule(status.rule, status.what or "") if status and status.exit_code else ""
