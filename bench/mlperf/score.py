"""Work out what a set of trials is worth by the official rules: olympic mean of the minutes, times the RCP factor.

The fastest and the slowest run do not count; one run that failed counts as the slowest. Where the others converged in fewer
samples than the reference (RCP) does on average, the minutes are multiplied by the ratio of the means.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.errors import ConfigError, LogError
from bench.mlperf import official
from bench.mlperf.official import RcpVerdict, Verdict
from bench.mlperf.result import NO_TARGET, Result, parse
from bench.mlperf.trial_set import ALIKE, Trials, by_number, disagreements, findings, is_in_samples, minutes, name
from bench.rules.finding import Finding, errors

_BRIEF = ("file", "minutes", "samples_to_target", "seed", "valid")
_NUM_RESAMPLES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the trials of a folder are worth together."""

    folder: str
    benchmark: str | None
    """This and what follows up to the batch size: None where the logs do not say, or differ."""
    division: str | None
    org: str | None
    platform: str | None
    num_gpus: int | None
    global_batch_size: int | None
    ruleset: str
    num_runs: int
    num_runs_required: int | None
    """None for a benchmark that the ruleset does not have."""
    results: tuple[Result, ...]
    """In the order of the numbers in their names."""
    dropped_fastest: str | None
    """File names; of a benchmark that drops several at each end, one after the other."""
    dropped_slowest: str | None
    dropped_reasons: tuple[str, ...]
    num_failed: int
    """Runs that did not converge, or whose logs we or the official checker reject."""
    olympic_minutes: float | None
    """Mean without the dropped runs, also of fewer runs than a score takes; None below three, or where too many failed."""
    olympic_samples: float | None
    """The same of the samples to the target, from which the runs with the fewest and the most are dropped."""
    rcp_mean_samples: float | None
    rcp_stdev_samples: float | None
    rcp_min_samples: float | None
    """Lowest mean that is accepted."""
    rcp_factor: float | None
    """At least 1; None unless the runs pass the reference check, and in the open division, which has none."""
    official_minutes: float | None
    """olympic_minutes times rcp_factor; None unless the score is valid."""
    interval_minutes: tuple[float, float] | None
    """90 % interval of official_minutes, from resampling the runs: what other runs of the same system would have given."""
    samples_distribution: dict[int, int]
    """How many runs reached the target after how many samples."""
    compliance: tuple[Verdict, ...]
    """One for each result."""
    rcp: RcpVerdict
    findings: tuple[Finding, ...]
    """Of the set; those of a log stand in its result."""
    valid: bool
    """This is a score by the official rules."""
    disagreements: tuple[str, ...]
    """Where the official checkers judge a log otherwise than we do."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as strict JSON holds them; of each result, what the score needs."""
        brief = [{name: getattr(result, name) for name in _BRIEF} for result in self.results]
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "results"}
        parts = {name: [asdict(part) for part in kept[name]] for name in ("compliance", "findings")}
        return kept | parts | {"rcp": asdict(self.rcp), "results": brief}


def score(paths: Path | Sequence[Path], *, ruleset: str | None = None) -> Score:
    """Return what the result_*.txt of a folder, or the files that are named, are worth.

    Without a ruleset the one that was in force when the last of them was run applies.

    Raises:
        ConfigError: there is no such folder or ruleset.
        LogError: the folder holds no results, one cannot be read, or one is of random weights.
    """
    trials = examined(paths, ruleset=ruleset)
    if not trials.has_target:
        fix = f"python -m bench report {trials.folder} shows how fast they train"
        raise LogError(NO_TARGET, where=trials.folder, fix=fix)
    return worth(trials)


def examined(paths: Path | Sequence[Path], *, ruleset: str | None = None) -> Trials:
    """Return the logs as we and the compliance checker judge them; raises like `score`, and takes random weights."""
    files = _files(paths)
    results = tuple(parse(file) for file in files)
    ruleset = ruleset or official.ruleset_of_runs(result.run_start_ms for result in results)
    compliance = tuple(official.official_verdict(file, ruleset=ruleset) for file in files)
    return Trials(results, compliance, ruleset)


def _files(paths: Path | Sequence[Path]) -> list[Path]:
    """Return the logs in the order of the numbers in their names: 2 before 10."""
    fix = "name a run folder, or another one that holds result_*.txt"
    if isinstance(paths, Path) and not paths.is_dir():
        raise ConfigError("this is not a folder", where=str(paths), fix=fix)
    found = paths.glob("result_*.txt") if isinstance(paths, Path) else paths
    if not (files := sorted(dict.fromkeys(found), key=by_number)):
        raise LogError("there is no result_*.txt to score", where=str(paths), fix=fix)
    return files


def worth(trials: Trials) -> Score:
    """Return what trials are worth together; of random weights, nothing."""
    converged = trials.converged
    samples = [result.samples_to_target for result in converged if result.samples_to_target is not None]
    olympic = trials.olympic([*map(minutes, converged)])
    rcp = _rcp(trials)
    point = rcp.record if is_in_samples(rcp) else None
    found = tuple(findings(trials, rcp))
    valid = not errors(found)
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
        findings=found,
        valid=valid,
        disagreements=tuple(disagreements(trials, rcp)),
    )


def _rcp(trials: Trials) -> RcpVerdict:
    """Return what the reference check says of the trials; the open division has none."""
    is_open = trials.common("division") == "open"
    if why_not := trials.why_no_rules or ("the open division has no reference to compare with" if is_open else ""):
        return RcpVerdict(ruleset=trials.ruleset, passed=None, message=why_not)
    files = [result.file for result in trials.results]
    return official.rcp_verdict(files, benchmark=trials.common("benchmark"), ruleset=trials.ruleset)


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
    """Return the 5th and 95th percentile of the official minutes of resampled runs; the same runs give the same interval.

    The converged runs are drawn with replacement, each with its minutes and its samples, so that every draw has a factor of
    its own; a failed run stays the slowest. Ten runs hold few of the rare slow ones: the true spread is wider.
    """
    counts = dict(zip((result.file for result in trials.results), rcp.counts, strict=False))
    pairs = [(minutes(result), counts.get(result.file)) for result in trials.converged]
    reference = rcp.record.mean if rcp.record and all(count for _, count in pairs) else None
    draw, found = random.Random(0), []
    for _ in range(_NUM_RESAMPLES):
        drawn = draw.choices(pairs, k=len(pairs))
        olympic, mean = (trials.olympic([pair[n] or 0 for pair in drawn]) for n in (0, 1))
        assert olympic is not None and mean is not None  # as many runs as those of which there is a score
        found.append(olympic * (max(1.0, reference / mean) if reference else rcp.factor or 1.0))
    cuts = quantiles(found, n=20, method="inclusive")
    return cuts[0], cuts[-1]
