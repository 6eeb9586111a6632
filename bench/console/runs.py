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
from bench.runs import run as run_folders
from bench.runs.folder import short
from bench.runs.ledger import Outcome
from bench.runs.run import Run
from bench.runs.summary import Summary, summary

if TYPE_CHECKING:
    from bench.answers.schema import Run as RunAnswer

COLUMNS = ("run", "started", "job", "state", "trials", "minutes", "step time (ms)", "tokens/s", "overrides", "reason")
SWEEP_COLUMNS = ("run", "overrides", "valid trials", "step time (ms)", "minutes", "tokens/s", "tokens/s vs. first run")
REFRESH_S = 10.0


def show(root: Path, *, active: bool, watch: bool, as_json: bool, limit: int | None = None) -> int:
    """Print the newest `limit` runs below a folder; with `watch`, repeat until none is active.

    Return the exit code: 1 if a backend does not answer that a listed run may still use.
    """
    while True:
        runs = [run for run in run_folders.below(root) if run.is_active or run.may_be_active or not active]
        newest = sorted(runs, key=_start, reverse=True)[:limit]
        listed = [(run, summary(run.folder)) for run in newest]
        if as_json:
            from bench import answers

            answers.show(*(answer(run, results) for run, results in listed))
        else:
            show_sheet(sheet(root, listed, num_runs=len(runs)))
        if not watch or not any(run.is_active or run.may_be_active for run in runs):
            return int(any(run.may_be_active for run in runs))
        time.sleep(REFRESH_S)


def sheet(root: Path, runs: Sequence[tuple[Run, Summary]], *, num_runs: int) -> TextTable:
    """Return the runs as a table, the newest first."""
    rows = [
        (
            run.folder.name,
            results.started,
            ", ".join(run.jobs[-1:]),
            run.state_name,
            _trials(run),
            *_speed(results),
            results.overrides,
            _reason(run),
        )
        for run, results in runs
    ]
    active = sum(run.is_active for run, _ in runs)
    more = "" if num_runs == len(runs) else f"; {num_runs - len(runs)} older runs not listed: use --limit N"
    unknown = sum(run.may_be_active for run, _ in runs)
    counts = f"queued or running: {active}" + (f", not known: {unknown}" if unknown else "")
    caption = f"runs: {len(runs)}, {counts}{more}" if runs else "no runs in this folder"
    filled = [place for place in range(len(COLUMNS)) if place < 2 or any(row[place] for row in rows)]
    return TextTable(
        f"runs in {short(root)}",
        [tuple(row[place] for place in filled) for row in rows],
        columns=tuple(COLUMNS[place] for place in filled),
        caption=caption,
    )


def answer(run: Run, results: Summary) -> "RunAnswer":
    """Return a run as an answer of --json."""
    from bench import answers

    return answers.run(run, results, reason=_reason(run), outcomes=_outcomes(run))


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


def _start(run: Run) -> tuple[float, str]:
    plan = run.folder / "plan.json"
    return plan.stat().st_mtime if plan.exists() else 0.0, run.folder.name


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
