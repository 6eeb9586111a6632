"""One entry of a submission: the runs of one benchmark on one system, and why they could not be submitted."""

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
from bench.mlperf.result import NO_TARGET, Result, parse
from bench.mlperf.trial_set import by_number
from bench.rules.finding import Finding, Severity, broken, errors

_RECIPE = ("global_batch_size", "gradient_accumulation_steps", "max_", "opt_", "lora_")
"""How the names of hyperparameters begin."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True, slots=True)
class Run:
    """A folder with logs of one benchmark."""

    folder: Path
    results: tuple[Result, ...]
    plan: Plan | None
    """None for runs that were not made by this tool."""

    @property
    def benchmark(self) -> str | None:
        return self.results[0].benchmark


@dataclass(frozen=True, slots=True)
class Entry:
    """What lies in results/<system>/<benchmark>/ in the end."""

    system: str
    benchmark: str
    runs: tuple[Run, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """In the order in which they are numbered."""
        return tuple(result for run in self.runs for result in run.results)


def read_run(folder: Path) -> Run:
    """Return what lies in a run folder, its logs in numeric order.

    Raises:
        ConfigError: it has no logs, logs of several benchmarks, or logs of random weights.
        LogError: a log cannot be read.
    """
    logs = sorted((path for path in folder.glob(run_files.RESULTS) if path.is_file()), key=by_number)
    if not logs:
        fix = "name run folders that hold result_0.txt, …"
        raise ConfigError("no results in this folder", where=str(folder), fix=fix)
    plan = folder / run_files.PLAN
    run = Run(folder, tuple(parse(path) for path in logs), load_plan(plan) if plan.is_file() else None)
    if not all(result.has_target for result in run.results):
        fix = "pack runs of model.weights=checkpoint"
        raise ConfigError(NO_TARGET, where=str(folder), fix=fix)
    if len(names := {result.benchmark for result in run.results}) > 1:
        found = ", ".join(sorted(repr(name)[:80] for name in names))
        raise ConfigError(
            f"logs of several benchmarks: {found}", where=str(folder), fix="give each a folder of its own"
        )
    return run


def grouped(runs: Iterable[Run], *, system: str | None) -> list[Entry]:
    """Return the runs by system and benchmark; a system is named as the logs name their platform, or as given."""
    by_name: dict[tuple[str, str], list[Run]] = {}
    if system is not None:
        require_name(system, what="--system", fix="choose another")
    for run in runs:
        name = system or system_name(run)
        by_name.setdefault((name, str(run.benchmark)), []).append(run)
    return [Entry(name, benchmark, tuple(group)) for (name, benchmark), group in sorted(by_name.items())]


def system_name(run: Run) -> str:
    """Return the platform's name as a file name."""
    platform = run.results[0].platform
    return require_name((platform or "").replace(" ", "_"), what="submission_platform", fix="name it with --system")


def require_name(name: str, *, what: str, fix: str) -> str:
    """Return a name that is safe in a path.

    Raises:
        ConfigError: it is not.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        shown = f"{what} {name!r:.80} is no file name: letters, digits and ._+- only, a letter or digit first"
        raise ConfigError(shown, where=what, fix=fix)
    return name


def run_findings(runs: Sequence[Run]) -> Iterator[Finding]:
    """Yield a finding for each run that was not made to be submitted."""
    for run in runs:
        marked = any(NOT_A_SUBMISSION in (r.org or "") + (r.platform or "") for r in run.results)
        if marked or (run.plan is not None and not run.plan.config.task.submittable):
            name = run.plan.config.task.name if run.plan else "the task of these logs"
            yield broken("PCK-03", f"{name} is {NOT_A_SUBMISSION}: {run.folder}", str(run.folder))


def entry_findings(entry: Entry, *, required: int, org: str) -> Iterator[Finding]:
    """Yield what speaks against submitting an entry."""
    results, where = entry.results, f"{entry.benchmark} on {entry.system}"
    if len(results) != required:
        yield broken("PCK-01", f"{where} has {len(results)} runs, the rules want {required}", where)
    failed = [result for result in results if not result.valid]
    severity: Severity = "error" if len(failed) > num_dropped(entry.benchmark) else "warning"
    for result in failed:
        first = errors(result.findings)[0]
        counts = "" if severity == "error" else "; counts as the slowest run"
        what = f"{result.file}: {first.titled}{counts}"
        yield broken("PCK-02", what, result.file, severity=severity, line=first.line)
    for key, values in _logged(results):
        if len(values) > 1:
            named = ", ".join(sorted(repr(value)[:80] for value in values))
            yield broken("PCK-04", f"{where}: {key} is {named}", where)
    for name in sorted({result.org for result in results if result.org not in (None, org)}, key=str):
        yield broken("PCK-05", f"submission_org is {name!r:.80}, not {org}", where, severity="warning")


def _logged(results: Sequence[Result]) -> Iterator[tuple[str, set[object]]]:
    """Yield the values of each key that all runs of an entry must share, as far as they log it."""
    yield "submission_platform", {result.platform for result in results}
    for key in sorted({key for result in results for key in result.hyperparameters if key.startswith(_RECIPE)}):
        yield key, {result.hyperparameters[key] for result in results if key in result.hyperparameters}


def division_of(entries: Sequence[Entry], *, wanted: str | None) -> str:
    """Return the division of all entries: the one that is wanted, if their logs qualify for it.

    Raises:
        ConfigError: their logs name none or several, or name open where closed is wanted.
    """
    named = {result.division for entry in entries for result in entry.results}
    if len(named) > 1 or not named <= set(DIVISIONS):
        found = ", ".join(sorted(repr(name)[:80] for name in named))
        raise ConfigError(f"submission_division is {found}", where="the logs", fix="pack runs of one division together")
    (logged,) = named
    if wanted == "closed" and logged == "open":
        fix = "pack them as open"
        raise ConfigError("the logs say open, and open runs cannot become closed", where="--division", fix=fix)
    return str(wanted or logged)
