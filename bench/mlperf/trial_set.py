"""The trials of a score: which of them count, and why a set has no valid score."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.contract.plan import NOT_A_SUBMISSION
from bench.mlperf import official
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.official import Verdict
from bench.mlperf.rcp import RcpVerdict
from bench.mlperf.result import NO_TARGET, Result
from bench.rules.finding import Finding, Severity, broken, errors

ALIKE = ("benchmark", "division", "platform", "global_batch_size")
"""Fields that must be equal in all runs of a score; not the submitter: published sets spell it in several ways."""

_FEW_DIGITS = 5
"""Values with more decimals than these do not agree by chance at two evaluations. Of 9,321 published runs 12 do, and
they are copies: their times agree to the millisecond, too."""
_ALL = "all trials"
"""The location of findings about a set of logs."""


@dataclass(frozen=True)
class Trials:
    """A set of logs with our verdicts and the compliance checker's."""

    results: tuple[Result, ...]
    compliance: tuple[Verdict, ...]
    ruleset: str

    @property
    def folder(self) -> str:
        return str(Path(self.results[0].file).parent)

    def common(self, name: str) -> Any:
        """Return the value of a field in all results that have one; None if they differ."""
        values = {getattr(result, name) for result in self.results} - {None}
        return values.pop() if len(values) == 1 else None

    @cached_property
    def num_required(self) -> int | None:
        """How many runs a score needs; None if the benchmark is not in the ruleset."""
        return official.num_runs_required(self.common("benchmark"), self.ruleset)

    @cached_property
    def num_dropped(self) -> int:
        """How many runs do not count at each end."""
        return official.num_dropped(self.common("benchmark"))

    @property
    def has_target(self) -> bool:
        """Whether every log has a target; otherwise there is no score."""
        return all(result.has_target for result in self.results)

    @cached_property
    def failed(self) -> dict[str, str]:
        """Why a run failed, by file: by our rules or, if the ruleset has the benchmark, by the official ones."""
        reasons = {}
        for result, verdict in zip(self.results, self.compliance, strict=True):
            if not result.has_target:
                reasons[result.file] = NO_TARGET
            elif not result.valid:
                reasons[result.file] = _why(result)
            elif self.num_required is not None and verdict.passed is False:
                reasons[result.file] = f"MLPerf's compliance checker {verdict.ruleset} failed: {_first_line(verdict)}"
        return reasons

    @cached_property
    def converged(self) -> list[Result]:
        """The runs that did not fail, the fastest first."""
        return sorted((result for result in self.results if result.file not in self.failed), key=minutes)

    def olympic(self, values: Sequence[float]) -> float | None:
        """Return the mean of the converged runs' values without the lowest and highest; failed runs are the highest."""
        num_failed = len(self.failed)
        in_score = sorted(values)[self.num_dropped : len(values) + num_failed - self.num_dropped]
        return fmean(in_score) if in_score and num_failed <= self.num_dropped else None

    @cached_property
    def why_no_rules(self) -> str:
        """Why no official rules apply; empty if they do."""
        if not self.has_target:
            return NO_TARGET
        marks = (mark for result in self.results for mark in (result.platform, result.org) if mark)
        if marked := next((mark for mark in marks if NOT_A_SUBMISSION in mark), None):
            return f"the logs are marked as not a submission: {marked}"
        if self.num_required is None:
            return (
                f"ruleset {self.ruleset} has no rules for {self.common('benchmark') or 'logs of different benchmarks'}"
            )
        return ""


def minutes(result: Result) -> float:
    """Return the minutes of a valid run."""
    assert result.minutes is not None
    return result.minutes


def name(result: Result) -> str:
    return Path(result.file).name


def by_number(file: Path) -> list[int | str]:
    """Return a sort key that puts result_2 before result_10."""
    parts = re.split(r"([0-9]+)", file.name)  # text and digits alternate, text first
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def findings(trials: Trials, rcp: RcpVerdict) -> Iterator[Finding]:
    """Yield why the trials are not a score, and as warnings what must be reported with a score."""
    number, required = len(trials.results), trials.num_required
    if trials.why_no_rules:
        yield _error("SCO-06", trials.why_no_rules)
    elif number != required:
        yield _error("SCO-01", f"a score needs {required} runs, but there are {number}")
    if len(trials.failed) > trials.num_dropped and trials.has_target:
        why = "; ".join(f"{Path(file).name}: {reason}" for file, reason in trials.failed.items())
        message = f"{len(trials.failed)} runs failed, but at most {trials.num_dropped} may fail: {why}"
        yield _error("SCO-02", message)
    yield from _seeds(trials)
    yield from _copies(trials)
    yield from _differences(trials)
    if rcp.passed is False and (why_not := _rcp_failure(trials, rcp)):
        yield _error("SCO-05", why_not)


def _seeds(trials: Trials) -> Iterator[Finding]:
    """Yield the runs without their own seed; the package checker needs one for every run, also for a failed one.

    Published sets of some benchmarks (dlrm_dcnv2) have official scores without seeds: a warning for benchmarks that are
    not fully checked here.
    """
    for seed, files in _grouped(trials.results, "seed").items():
        if seed is not None and len(files) > 1:
            yield _error("SCO-03", f"{', '.join(files)} have the same seed {seed}")
    without = [r for r in trials.results if any(f.rule == "LOG-15" and f.line is None for f in r.findings)]
    wrong = [r for r in trials.results if any(f.rule == "LOG-15" for f in errors(r.findings))]
    if without or wrong:
        names = ", ".join(name(r) for r in trials.results if r in without or r in wrong)
        yield broken(
            "SCO-03", f"these logs have no valid seed: {names}", _ALL, severity="error" if wrong else "warning"
        )


def _copies(trials: Trials) -> Iterator[Finding]:
    """Yield the runs whose evaluations are those of another run."""
    by_course: dict[Any, list[str]] = {}
    for result in trials.results:
        if len(result.evaluations) > 1:
            by_course.setdefault(_course(result), []).append(name(result))
    for files in by_course.values():
        if len(files) > 1:
            yield _error("SCO-07", f"{', '.join(files)} have the same evaluations: they are copies of one run")


def _course(result: Result) -> tuple[Any, ...]:
    """Return what no two runs have in common: their evaluations, and their times where the values have few digits."""
    values = tuple((one.samples, one.metric, one.value) for one in result.evaluations)
    if sum(one.value != round(one.value, _FEW_DIGITS) for one in result.evaluations) > 1:
        return values
    since = result.run_start_ms or 0
    return *values, *(one.time_ms - since for one in result.evaluations), result.minutes


def _differences(trials: Trials) -> Iterator[Finding]:
    """Yield fields that differ between trials; a failed trial may have ended before it logged a field.

    A platform is a name that the submitter typed: published sets with two spellings have official scores. Only logs of
    runstop name the checksums of their inputs.
    """
    for field in ALIKE:
        logged = [r for r in trials.results if getattr(r, field) is not None or r.file not in trials.failed]
        if len(by_value := _grouped(logged, field)) > 1:
            values = ", ".join(f"{value!r:.60} in {files[0]}" for value, files in by_value.items())
            severity: Severity = "warning" if field == "platform" else "error"
            yield broken("SCO-04", f"{field} differs between the logs: {values}", _ALL, severity=severity)
    for input_name in sorted({input_name for result in trials.results for input_name in result.inputs}):
        named = {name(r): r.inputs[input_name] for r in trials.results if input_name in r.inputs}
        if len(set(named.values())) > 1:
            values = ", ".join(f"{sha256:.12}… in {file}" for file, sha256 in named.items())
            yield _error("SCO-04", f"the SHA-256 of the {input_name} differs between the logs: {values}")


def _grouped(results: Sequence[Result], field: str) -> dict[Any, list[str]]:
    """Return the names of the logs by the value of a field."""
    by_value: dict[Any, list[str]] = {}
    for result in results:
        by_value.setdefault(getattr(result, field), []).append(name(result))
    return by_value


def _error(rule: str, message: str) -> Finding:
    return broken(rule, message, _ALL)


def _rcp_failure(trials: Trials, rcp: RcpVerdict) -> str:
    """Return why the reference check failed; empty for a mean that has no meaning, since too many runs failed."""
    point = rcp.record
    if point is None or rcp.mean is None or rcp.mean >= point.min_mean:
        return f"the official reference check failed: {rcp.message}"
    if len(trials.failed) > trials.num_dropped:
        return ""
    mean = f"the mean {point.unit} to the target is {rcp.mean:,.1f}"
    return f"{mean}, below the limit {point.min_mean:,.1f}: the runs converge too fast"


def disagreements(trials: Trials, rcp: RcpVerdict) -> Iterator[str]:
    """Yield where the verdict of an official checker differs from ours."""
    for result, verdict in zip(trials.results, trials.compliance, strict=True):
        if trials.num_required is not None and verdict.passed not in (None, result.valid):
            ours = "valid" if result.valid else f"invalid ({_why(result)})"
            theirs = "passed" if verdict.passed else f"failed ({_first_line(verdict)})"
            yield f"{name(result)}: {ours} for runstop, but {theirs} for MLPerf's compliance checker {verdict.ruleset}"
    if rcp.counts and is_in_samples(rcp):
        for result, count in zip(trials.results, rcp.counts, strict=True):
            samples = None if result.file in trials.failed else result.samples_to_target
            if samples != count:
                ours, theirs = ("failed" if n is None else f"{n:,.0f} samples" for n in (samples, count))
                yield f"{name(result)}: {ours} for runstop, but {theirs} for MLPerf's RCP checker"


def is_in_samples(rcp: RcpVerdict) -> bool:
    """Return whether the RCP checker counts convergence in the same samples as a result."""
    if rcp.record is None:
        return False
    known = BENCHMARKS.get(rcp.record.benchmark)
    return rcp.record.unit == "samples_count" or (known is not None and known.epoch_num_is_samples)


def _why(result: Result) -> str:
    first = errors(result.findings)[0]
    return f"{first.titled}"


def _first_line(verdict: Verdict) -> str:
    return verdict.messages[0].splitlines()[0] if verdict.messages else ""
