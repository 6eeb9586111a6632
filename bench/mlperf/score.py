"""Score a set of trials by the official rules: the olympic mean of their minutes, times the RCP factor.

The fastest and the slowest run do not count; a failed run counts as the slowest. If the other runs converged in fewer
samples than the reference (RCP) on average, the minutes are multiplied by the ratio of the two means.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.run_files import PLAN
from bench.errors import ConfigError, LogError, NotALogError
from bench.mlperf import official
from bench.mlperf.official import Verdict
from bench.mlperf.rcp import RcpVerdict, rcp_verdict
from bench.mlperf.result import Result, parse
from bench.mlperf.trial_set import ALIKE, Trials, by_number, disagreements, findings, is_in_samples, minutes, name
from bench.rules.finding import Finding, errors

_NUM_RESAMPLES = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of the trials of a folder."""

    folder: str
    benchmark: str | None
    """This and the fields down to the batch size are None if the logs differ or do not have them."""
    division: str | None
    org: str | None
    platform: str | None
    num_gpus: int | None
    global_batch_size: int | None
    ruleset: str
    num_runs: int
    num_runs_required: int | None
    """None for a benchmark that is not in the ruleset."""
    results: tuple[Result, ...]
    """In the order of the numbers in their file names."""
    dropped_fastest: str | None
    """File names, separated by commas if the benchmark drops several runs at each end."""
    dropped_slowest: str | None
    dropped_reasons: tuple[str, ...]
    num_failed: int
    """Runs that did not converge, or whose logs we or the official checker reject."""
    olympic_minutes: float | None
    """Mean without the dropped runs, even of fewer runs than a score needs; None below three or if too many failed."""
    olympic_samples: float | None
    """The same mean of the samples to the target, without the runs with the fewest and the most samples."""
    rcp_mean_samples: float | None
    rcp_stdev_samples: float | None
    rcp_min_samples: float | None
    """The lowest accepted mean."""
    rcp_factor: float | None
    """At least 1; None unless the runs pass the reference check, and in the open division, which has none."""
    official_minutes: float | None
    """olympic_minutes times rcp_factor; None unless the score is valid."""
    interval_minutes: tuple[float, float] | None
    """90 % interval of official_minutes from resampled runs: the range of scores that the same system would give."""
    samples_distribution: dict[int, int]
    """How many runs reached the target after how many samples."""
    compliance: tuple[Verdict, ...]
    """One for each result."""
    rcp: RcpVerdict
    findings: tuple[Finding, ...]
    """Problems of the set; the problems of a log are in its result."""
    valid: bool
    """Whether this is a score by the official rules."""
    disagreements: tuple[str, ...]
    """Where the verdict of an official checker differs from ours."""


def score(paths: Path | Sequence[Path], *, ruleset: str | None = None) -> Score:
    """Return the score of the result_*.txt of a folder, or of the given files.

    Without `ruleset`, the ruleset in force at the latest run applies.

    Raises:
        ConfigError: the folder or the ruleset does not exist.
        LogError: the folder has no results, one cannot be read, or one has random weights.
    """
    trials = judged_trials(paths, ruleset=ruleset)
    if not trials.has_target:
        fix = f"to see the speed: runstop report {shlex.quote(trials.folder)}"
        what = "at least one trial has no target, so the trials have no score"
        raise LogError(what, where=trials.folder, fix=fix)
    return score_trials(trials)


def judged_trials(paths: Path | Sequence[Path], *, ruleset: str | None = None) -> Trials:
    """Return the logs with our and the official verdicts; raises like `score`, but accepts random weights."""
    files = _files(paths)
    results = tuple(parse(file) for file in files)
    ruleset = ruleset or official.ruleset_of_runs(result.run_start_ms for result in results)
    compliance = tuple(official.official_verdict(file, ruleset=ruleset) for file in files)
    return Trials(results, compliance, ruleset)


def _files(paths: Path | Sequence[Path]) -> list[Path]:
    """Return the logs in the order of the numbers in their names: 2 before 10."""
    fix = "give a run folder, or another folder with result_*.txt"
    if isinstance(paths, Path) and not paths.is_dir():
        raise ConfigError("this path is not a folder", where=str(paths), fix=fix)
    listed = paths.glob("result_*.txt") if isinstance(paths, Path) else paths
    if not (files := sorted(dict.fromkeys(listed), key=by_number)):
        is_run = isinstance(paths, Path) and (paths / PLAN).exists()
        kind = LogError if is_run else NotALogError
        raise kind("the folder has no result_*.txt to score", where=str(paths), fix=fix)
    return files


def score_trials(trials: Trials) -> Score:
    """Return the score of trials; it is not valid for random weights."""
    converged = trials.converged
    samples = [result.samples_to_target for result in converged if result.samples_to_target is not None]
    olympic = trials.olympic([*map(minutes, converged)])
    rcp = _rcp(trials)
    point = rcp.record if is_in_samples(rcp) else None
    problems = tuple(findings(trials, rcp))
    valid = not errors(problems)
    return Score(
        folder=trials.folder,
        **{field: trials.common(field) for field in (*ALIKE, "org", "num_gpus")},
        ruleset=trials.ruleset,
        num_runs=len(trials.results),
        num_runs_required=trials.num_required,
        results=trials.results,
        **(_dropped(trials) if olympic is not None else _NONE_DROPPED),
        num_failed=len(trials.failed),
        olympic_minutes=olympic,
        olympic_samples=trials.olympic(samples) if len(samples) == len(converged) else None,
        rcp_mean_samples=point.mean if point else None,
        rcp_stdev_samples=point.stdev if point else None,
        rcp_min_samples=point.min_mean if point else None,
        rcp_factor=rcp.factor,
        official_minutes=olympic * (rcp.factor or 1) if valid and olympic is not None else None,
        interval_minutes=_interval(trials, rcp) if valid else None,
        samples_distribution=dict(sorted(Counter(map(int, samples)).items())),
        compliance=trials.compliance,
        rcp=rcp,
        findings=problems,
        valid=valid,
        disagreements=tuple(disagreements(trials, rcp)),
    )


def _rcp(trials: Trials) -> RcpVerdict:
    """Return the verdict of the reference check; the open division has none."""
    is_open = trials.common("division") == "open"
    if why_not := trials.why_no_rules or ("the open division has no reference" if is_open else ""):
        return RcpVerdict(ruleset=trials.ruleset, passed=None, message=why_not)
    files = [result.file for result in trials.results]
    return rcp_verdict(files, benchmark=trials.common("benchmark"), ruleset=trials.ruleset)


_NONE_DROPPED: dict[str, Any] = {"dropped_fastest": None, "dropped_slowest": None, "dropped_reasons": ()}


def _dropped(trials: Trials) -> dict[str, Any]:
    """Return which runs do not count, and why."""
    converged, at_end = trials.converged, trials.num_dropped
    fastest, slowest = converged[:at_end], converged[len(converged) + len(trials.failed) - at_end :]
    failed = [result for result in trials.results if result.file in trials.failed]
    reasons = [f"{name(result)} is the fastest, {minutes(result):.3f} min" for result in fastest]
    reasons += [f"{name(result)} is the slowest, {minutes(result):.3f} min" for result in slowest]
    reasons += [f"{name(result)} failed and counts as the slowest: {trials.failed[result.file]}" for result in failed]
    return {
        "dropped_fastest": ", ".join(map(name, fastest)),
        "dropped_slowest": ", ".join(map(name, [*slowest, *failed])),
        "dropped_reasons": tuple(reasons),
    }


def _interval(trials: Trials, rcp: RcpVerdict) -> tuple[float, float]:
    """Return the 5th and 95th percentile of the official minutes over bootstrap resamples; the seed is fixed.

    The converged runs are sampled with replacement. Minutes and samples of a run are sampled together, so every
    resample has its own factor; a failed run stays the slowest. Ten runs contain few of the rare slow ones: the true
    spread is wider.
    """
    import numpy as np

    counts = dict(zip((result.file for result in trials.results), rcp.counts, strict=False))
    samples = [counts.get(result.file) for result in trials.converged]
    factor: Any = rcp.factor or 1.0
    sampled = np.random.default_rng(0).integers(len(samples), size=(_NUM_RESAMPLES, len(samples)))
    in_score = slice(trials.num_dropped, len(samples) + len(trials.failed) - trials.num_dropped)

    def olympic_means(values: list[float]) -> Any:
        return np.sort(np.array(values)[sampled], axis=1)[:, in_score].mean(axis=1)

    if rcp.record and all(samples):
        factor = np.maximum(1.0, rcp.record.mean / olympic_means([count or 0.0 for count in samples]))
    low, high = np.quantile(olympic_means([*map(minutes, trials.converged)]) * factor, (0.05, 0.95))
    return float(low), float(high)
