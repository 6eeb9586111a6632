"""Decide which time a set of trials may claim, and compare it with published systems."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Literal

from bench.mlperf import published
from bench.mlperf.result import NO_TARGET
from bench.mlperf.system_tables import System
from bench.report.sets import TrialSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The time that a set may claim: a score, the mean of valid runs without a score, or none."""

    kind: Literal["score", "runs", "throughput", "none"]
    num_valid: int
    minutes: float | None
    what: str
    """What the minutes are based on, or why there are none."""
    why_no_score: str = ""
    remark: str = ""
    """The remark that must be printed next to minutes that are not a score."""
    interval: tuple[float, float] | None = None
    """The 90 % interval of a score, in minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The rank of a set among some published systems of its benchmark and number of GPUs."""

    name: str
    count: int
    best: System
    median_minutes: float
    rank: int | None
    """One more than the number of faster systems. Only a score has a rank; other minutes have ratios alone."""
    to_best: float | None
    to_median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the table that ranks this set among published systems."""

    name: str
    accelerator: str
    global_batch_size: int | None
    num_runs: int | None
    samples: float | None
    """Mean number of samples to the target."""
    step_time_ms: float | None
    """Time spent training, divided by the number of steps."""
    minutes: float
    ratio: float | None
    """This entry's minutes divided by this set's."""
    ours: bool = False


def claim(trials: TrialSet) -> Claim:
    """Return the minutes that a set may claim: a score, else the mean of runs that are all valid, else none."""
    s, results = trials.score, trials.results
    new_claim = partial(Claim, num_valid=sum(r.valid for r in results))
    if not trials.has_target:
        return new_claim(kind="throughput", minutes=None, what=NO_TARGET)
    complete = s.num_runs_required is not None and s.num_runs >= s.num_runs_required
    if s.valid and complete and s.official_minutes is not None and not trials.why_not_benchmark:
        factor = "" if s.rcp_factor is None else f" × RCP factor {s.rcp_factor:.4f}"
        what = f"olympic mean of {s.num_runs} runs{factor}"
        return new_claim(kind="score", minutes=s.official_minutes, what=what, interval=s.interval_minutes)
    why_not = trials.why_not_benchmark or "; ".join(f.what for f in s.findings if f.severity == "error")
    new_claim = partial(new_claim, why_no_score=why_not, remark=f"(n = {len(results)}, no score)")
    minutes = [r.minutes for r in results if r.valid and r.minutes is not None]
    if len(minutes) < len(results):
        return new_claim(
            kind="none", minutes=None, what=f"{len(results) - len(minutes)} of {len(results)} runs are invalid"
        )
    if s.olympic_minutes is not None:
        return new_claim(kind="runs", minutes=s.olympic_minutes, what=f"olympic mean of {len(minutes)} runs")
    what = "one run" if len(minutes) == 1 else f"mean of {len(minutes)} runs"
    return new_claim(kind="runs", minutes=fmean(minutes), what=what)


def peers(trials: TrialSet) -> tuple[tuple[System, ...], str]:
    """Return the published systems that a set may be compared with, fastest first, or why there are none."""
    if trials.why_not_benchmark:
        return (), trials.why_not_benchmark
    known = published.systems(trials.score.benchmark) if trials.score.benchmark else ()
    if not known:
        return (), f"no published results for {trials.score.benchmark or 'a log without a benchmark name'}"
    if trials.num_gpus is None:
        return (), "the log has no GPU count (set --num-gpus N)"
    same = sorted((s for s in known if s.num_gpus == trials.num_gpus), key=lambda s: s.official_minutes)
    return tuple(same), "" if same else f"no published system has {trials.num_gpus} GPUs"


def model(accelerator: str | None) -> str:
    """Return the short name of an accelerator (H200, MI300X); empty if there is none."""
    match = re.search(r"[A-Z]{1,3}\d{2,4}[A-Z]?(?![A-Za-z0-9])(-NVL)?", accelerator or "")
    return match[0] if match else ""


def rankings(trials: TrialSet, claimed: Claim, systems: Sequence[System]) -> tuple[Ranking, ...]:
    """Return the rank among all systems, those with the same accelerator, and those of each round."""
    own, systems = model(trials.accelerator), [s for s in systems if s.is_score]
    groups = {"all rounds": systems, f"{own}, all rounds": [s for s in systems if own and model(s.accelerator) == own]}
    for name in sorted({s.round for s in systems}, reverse=True):
        groups[name] = [s for s in systems if s.round == name]
    return tuple(_ranking(name, group, claimed) for name, group in groups.items() if group)


def _ranking(name: str, systems: Sequence[System], claimed: Claim) -> Ranking:
    times = [system.official_minutes for system in systems]
    middle, ours = median(times), claimed.minutes
    return Ranking(
        name=name,
        count=len(systems),
        best=min(systems, key=lambda s: s.official_minutes),
        median_minutes=middle,
        rank=None if claimed.kind != "score" or ours is None else rank(ours, systems),
        to_best=None if ours is None else ours / min(times),
        to_median=None if ours is None else ours / middle,
    )


_SAME_MINUTES = 0.0005
"""Published minutes are rounded; a published set must not rank behind itself."""


def rank(minutes: float, systems: Sequence[System]) -> int:
    """Return the place of a time among those of published systems, from 1."""
    return 1 + sum(system.official_minutes < minutes - _SAME_MINUTES for system in systems)


def ranked(trials: TrialSet, claimed: Claim, systems: Sequence[System]) -> tuple[Entry, ...]:
    """Return this set, if it has a time, among systems with its accelerator, else the best of each accelerator."""
    own = model(trials.accelerator)
    near = [s for s in systems if own and model(s.accelerator) == own] or best_of_each(systems)
    entries = [_entry(system, claimed.minutes) for system in near]
    if near and claimed.minutes is not None:
        entries.append(_own_entry(trials, claimed, claimed.minutes))
    return tuple(sorted(entries, key=lambda entry: entry.minutes))


def _entry(system: System, our_minutes: float | None) -> Entry:
    return Entry(
        name=system.name,
        accelerator=model(system.accelerator) or system.accelerator,
        global_batch_size=system.global_batch_size,
        num_runs=system.num_runs,
        samples=system.mean_samples,
        step_time_ms=None if system.step_time_s is None else 1000 * system.step_time_s,
        minutes=system.official_minutes,
        ratio=system.official_minutes / our_minutes if our_minutes else None,
    )


def _own_entry(trials: TrialSet, claimed: Claim, minutes: float) -> Entry:
    speeds = [r.throughput_samples_s for r in trials.results if r.throughput_samples_s]
    gbs = trials.score.global_batch_size
    return Entry(
        name=f"{trials.name} {claimed.remark}".rstrip(),
        accelerator=model(trials.accelerator) or trials.accelerator or "",
        global_batch_size=gbs,
        num_runs=len(trials.results),
        samples=trials.score.olympic_samples,
        step_time_ms=1000 * gbs / median(speeds) if gbs and speeds else None,
        minutes=minutes,
        ratio=1.0,
        ours=True,
    )


def best_of_each(systems: Sequence[System]) -> tuple[System, ...]:
    """Return the fastest system of each accelerator; `systems` is sorted, fastest first."""
    best: dict[str, System] = {}
    for system in systems:
        best.setdefault(model(system.accelerator) or system.accelerator, system)
    return tuple(best.values())
