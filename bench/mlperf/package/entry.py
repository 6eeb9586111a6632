"""One entry of a submission: the runs of one benchmark on one system, and why they cannot be submitted."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract import run_files
from bench.contract.plan import NOT_A_SUBMISSION, Plan
from bench.contract.plan_kinds import load as load_plan
from bench.errors import ConfigError
from bench.mlperf.official import num_dropped
from bench.mlperf.package.checkers import DIVISIONS
from bench.mlperf.result import Result, parse
from bench.mlperf.trial_set import by_number
from bench.rules.finding import Finding, Severity, broken, errors

_RECIPE = ("global_batch_size", "gradient_accumulation_steps", "max_", "opt_", "lora_")
"""Prefixes of the names of hyperparameters."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True, slots=True)
class Run:
    """A folder with logs of one benchmark."""

    folder: Path
    results: tuple[Result, ...]
    plan: Plan | None
    """None for runs of other tools."""

    @property
    def benchmark(self) -> str | None:
        return self.results[0].benchmark


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of results/<system>/<benchmark>/."""

    system: str
    benchmark: str
    runs: tuple[Run, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """In the order of their numbers."""
        return tuple(result for run in self.runs for result in run.results)


def read_run(folder: Path) -> Run:
    """Read a run folder, with its logs in numeric order.

    Raises:
        ConfigError: it has no logs, logs of several benchmarks, or logs of random weights.
        LogError: a log cannot be read.
    """
    logs = sorted((path for path in folder.glob(run_files.RESULTS) if path.is_file()), key=by_number)
    if not logs:
        fix = "give run folders that contain result_0.txt, result_1.txt, …"
        raise ConfigError("the folder has no result_K.txt", where=str(folder), fix=fix)
    plan = folder / run_files.PLAN
    run = Run(folder, tuple(parse(path) for path in logs), load_plan(plan) if plan.is_file() else None)
    if not all(result.has_target for result in run.results):
        fix = "pack runs that have a target, such as runs with model.weights=checkpoint"
        raise ConfigError("the run has no target, so it cannot be submitted", where=str(folder), fix=fix)
    if len(names := {result.benchmark for result in run.results}) > 1:
        listed = ", ".join(sorted(repr(name)[:80] for name in names))
        raise ConfigError(
            f"the folder has logs of several benchmarks: {listed}",
            where=str(folder),
            fix="put the logs of each benchmark into a separate folder",
        )
    return run


def grouped(runs: Iterable[Run], *, system: str | None) -> list[Entry]:
    """Group the runs by system and benchmark; the system is the platform in the logs, or the given one."""
    by_name: dict[tuple[str, str], list[Run]] = {}
    if system is not None:
        require_name(system, what="--system", fix="choose another name")
    for run in runs:
        name = system or system_name(run)
        by_name.setdefault((name, str(run.benchmark)), []).append(run)
    return [Entry(name, benchmark, tuple(group)) for (name, benchmark), group in sorted(by_name.items())]


def system_name(run: Run) -> str:
    """Return the platform's name as a file name."""
    platform = run.results[0].platform
    return require_name(
        (platform or "").replace(" ", "_"), what="submission_platform", fix="set the name of the system with --system"
    )


def require_name(name: str, *, what: str, fix: str) -> str:
    """Return a name that is safe in a path.

    Raises:
        ConfigError: it is not.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        shown = f"{what} {name!r:.80} is not a valid file name: use letters, digits and ._+-, first a letter or digit"
        raise ConfigError(shown, where=what, fix=fix)
    return name


def run_findings(runs: Sequence[Run]) -> Iterator[Finding]:
    """Yield a finding for each run whose task is not for submission."""
    for run in runs:
        marked = any(NOT_A_SUBMISSION in (r.org or "") + (r.platform or "") for r in run.results)
        if marked or (run.plan is not None and not run.plan.config.task.submittable):
            task = f"the task {run.plan.config.task.name}" if run.plan else "the task of these logs"
            yield broken("PCK-03", f"{task} is not for submission: {run.folder}", str(run.folder))


def entry_findings(entry: Entry, *, required: int, org: str) -> Iterator[Finding]:
    """Yield why an entry cannot be submitted."""
    results, entry_name = entry.results, f"{entry.benchmark} on {entry.system}"
    if len(results) != required:
        yield broken("PCK-01", f"{entry_name} has {len(results)} runs, but the rules require {required}", entry_name)
    failed = [result for result in results if not result.valid]
    severity: Severity = "error" if len(failed) > num_dropped(entry.benchmark) else "warning"
    for result in failed:
        first = errors(result.findings)[0]
        what = f"{result.file}: {first.titled}"
        if severity == "warning":
            what += "; the score counts this run as the slowest run"
        yield broken("PCK-02", what, result.file, severity=severity, line=first.line)
    for key, values in _logged(results):
        if len(values) > 1:
            listed = ", ".join(sorted(repr(value)[:80] for value in values))
            yield broken("PCK-04", f"{entry_name}: the runs have different values of {key}: {listed}", entry_name)
    for name in sorted({result.org for result in results if result.org not in (None, org)}, key=str):
        yield broken(
            "PCK-05",
            f"{entry_name}: submission_org is {name!r:.80} in a log, but --org is {org}",
            entry_name,
            severity="warning",
        )


def _logged(results: Sequence[Result]) -> Iterator[tuple[str, set[object]]]:
    """Yield the logged values of each key that must be equal in all runs of an entry."""
    yield "submission_platform", {result.platform for result in results}
    for key in sorted({key for result in results for key in result.hyperparameters if key.startswith(_RECIPE)}):
        yield key, {result.hyperparameters[key] for result in results if key in result.hyperparameters}


def division_of(entries: Sequence[Entry], *, requested: str | None) -> str:
    """Return the division of all entries: the requested one, if their logs qualify for it.

    Raises:
        ConfigError: their logs have none or several, or have open and closed is requested.
    """
    named = {result.division for entry in entries for result in entry.results}
    if len(named) > 1 or not named <= set(DIVISIONS):
        listed = ", ".join(sorted(repr(name)[:80] for name in named))
        raise ConfigError(
            f"all logs must have the same submission_division ({' or '.join(DIVISIONS)}), but the logs have {listed}",
            where="the logs",
            fix="pack only runs with the same submission_division together",
        )
    (logged,) = named
    if requested == "closed" and logged == "open":
        fix = "pack the runs with --division open"
        raise ConfigError("--division is closed, but the logs belong to the open division", where="--division", fix=fix)
    return str(requested or logged)
