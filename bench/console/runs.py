"""List runs: where their jobs stand, and what came of their trials."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.backends.slurm import jobs as slurm_jobs
from bench.backends.slurm.jobs import Run
from bench.console.sheet import Sheet
from bench.console.sheet import show as show_sheet
from bench.errors import with_rule
from bench.runs.folder import short
from bench.runs.ledger import RUNNING

COLUMNS = ("run", "job", "state", "trials", "why")
AGAIN_S = 10.0


def show(root: Path, *, active: bool, again: bool, as_json: bool) -> None:
    """Print the runs below a folder once, or again and again until none is active."""
    while True:
        runs = [run for run in slurm_jobs.runs(root) if run.is_active or not active]
        if as_json:
            for run in runs:
                print(json.dumps(row(run)), flush=True)
        else:
            show_sheet(sheet(root, runs))
        if not again or not any(run.is_active for run in runs):
            return
        time.sleep(AGAIN_S)


def sheet(root: Path, runs: list[Run]) -> Sheet:
    """Return the runs as a table."""
    rows = [(short(run.folder), ", ".join(run.jobs[-1:]), run.word, _trials(run), _reason(run)) for run in runs]
    active = sum(run.is_active for run in runs)
    caption = f"runs: {len(runs)}, queued or running: {active}" if runs else "none"
    return Sheet(f"runs in {short(root)}", rows, columns=COLUMNS, caption=caption)


def row(run: Run) -> dict[str, Any]:
    """Return a run as strict JSON holds it."""
    return {
        "run": str(run.folder),
        "jobs": list(run.jobs),
        "state": run.word,
        "slurm": run.state and run.state.state,
        "active": run.is_active,
        "reason": _reason(run),
        "trials": list(run.outcomes),
        "exit_code": run.status.get("exit_code"),
        "rule": run.status.get("rule"),
    }


def _trials(run: Run) -> str:
    is_cut = bool(run.jobs) and not run.is_active
    counts = Counter("interrupted" if is_cut and outcome == RUNNING else outcome for outcome in run.outcomes)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _reason(run: Run) -> str:
    """Return why it waits or failed; nothing for what runs or went well."""
    if run.is_active:
        return run.state.reason if run.state else ""
    return with_rule(run.status.get("rule"), str(run.status.get("what", ""))) if run.status.get("exit_code") else ""
