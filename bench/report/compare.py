"""What a set of trials may claim, and where it stands among published systems."""

import itertools
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from bench.contract import plan as plans
from bench.contract import run_files
from bench.contract.plan import NOT_A_SUBMISSION, Plan
from bench.contract.schema import Device
from bench.errors import ConfigError
from bench.mlperf import published
from bench.mlperf.gpu_count import NO_DEVICES
from bench.mlperf.published import System
from bench.mlperf.result import NO_TARGET, Result, task_of_mark
from bench.mlperf.score import Score, examined, worth

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSet:
    """The trials of one folder, or those of them that were named, and what they are worth."""

    name: str
    score: Score
    plan: Plan | None
    num_gpus: int | None

    @property
    def results(self) -> tuple[Result, ...]:
        return self.score.results

    @property
    def has_target(self) -> bool:
        """Whether every log has something to reach; otherwise they are worth no score."""
        return all(result.has_target for result in self.results)

    @property
    def system(self) -> dict[str, Any]:
        return next((r.system for r in self.results if r.system), {})

    @property
    def pretends(self) -> str | None:
        """Why this is not the benchmark that its logs name; None where it is."""
        if not self.has_target:
            return NO_TARGET
        if self.plan is not None and not self.plan.config.task.submittable:
            return f"{self.plan.config.task.name} is not an MLPerf benchmark: {NOT_A_SUBMISSION}"
        marked = (text for r in self.results for text in (r.platform, r.org) if text and NOT_A_SUBMISSION in text)
        return next(marked, None)

    @property
    def measured(self) -> str:
        """Name of what was measured, which for a stand-in is not that of the benchmark."""
        if not self.has_target:
            shape = next((r.shape_of for r in self.results if r.shape_of), None)
            return f"{self.plan.config.task.name if self.plan else shape or 'training'}, random weights"
        if self.pretends and self.plan is not None:
            return self.plan.config.task.name
        if self.pretends and (task := task_of_mark(self.platform)):
            return task
        name = self.score.benchmark or "training"
        return f"{name} ({NOT_A_SUBMISSION})" if self.pretends else name

    @property
    def trial_names(self) -> list[str]:
        """The K of result_K.txt, or places in the order of files where that does not tell trials apart."""
        numbers = [re.search(r"(\d+)\D*$", Path(r.file).stem) for r in self.results]
        names = [match[1] for match in numbers if match]
        places = [str(place) for place in range(len(self.results))]
        return names if len(set(names)) == len(places) and max(map(len, names)) < 4 else places

    @property
    def platform(self) -> str | None:
        """Its name; none where only a placeholder was logged."""
        names = (self.score.platform, self.system.get("system_name"))
        return next((n for n in names if isinstance(n, str) and n and not re.search("PLACEHOLDER|UNKNOWN", n)), None)

    @property
    def accelerator(self) -> str | None:
        gpu = self.plan.config.cluster.gpu if self.plan else None
        logged = next((r.hyperparameters.get("accelerator") for r in self.results), None)
        names = (self.system.get("accelerator_model_name"), gpu and gpu.name, logged)
        return next((name for name in names if isinstance(name, str) and name not in ("", "cpu", NO_DEVICES)), None)

    @property
    def hardware(self) -> str | None:
        """What was measured on, as every figure and table says."""
        if self.plan is not None and self.plan.config.cluster.device is Device.cpu:
            ranks = f"{self.plan.world.num_ranks} ranks on the {self.plan.config.cluster.device.name}"
            return f"{self.platform or 'platform not logged'}, {ranks}"
        if self.num_gpus is None:
            return self.platform
        return f"{self.num_gpus} × {self.accelerator or 'GPU'}" + (f", {self.platform}" if self.platform else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What may be said of a set's time: a score, the mean of valid runs that are no score, or nothing."""

    kind: Literal["score", "runs", "throughput", "none"]
    num_valid: int
    minutes: float | None
    what: str
    """Of what the minutes are, or why there are none."""
    why_no_score: str = ""
    remark: str = ""
    """What stands beside minutes that are no score."""
    interval: tuple[float, float] | None = None
    """Of a score, 90 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A set beside some of the published systems of its benchmark and number of GPUs."""

    name: str
    count: int
    best: System
    median_minutes: float
    rank: int | None
    """Of a score: one more than the systems that are faster. Less than a score has ratios, and no rank."""
    to_best: float | None
    to_median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the list that ranks this set among published systems."""

    name: str
    accelerator: str
    global_batch_size: int | None
    num_runs: int | None
    samples: float | None
    """Mean to the target."""
    step_time_ms: float | None
    """Time spent training over steps."""
    minutes: float
    ratio: float | None
    """To this set's minutes."""
    ours: bool = False


def load(paths: Sequence[Path], *, num_gpus: int | None = None) -> tuple[TrialSet, ...]:
    """Return one set per folder; files of one folder that are named one after another are a set, too.

    Raises:
        ConfigError: a path is not there, or the number of GPUs is none.
        LogError: a folder holds no results, or one cannot be read.
    """
    if num_gpus is not None and num_gpus < 1:
        raise ConfigError(f"{num_gpus} GPUs", where="--num-gpus", fix="name a number above 0, or leave it out")
    for path in paths:
        if not path.exists():
            raise ConfigError(
                "this does not exist", where=str(path), fix="name a run folder, or some of its result_*.txt"
            )
    found: list[TrialSet] = []
    paths = [inner for path in paths for inner in _sets_in(path)]
    for (folder, is_whole), group in itertools.groupby(paths, _folder):
        files = [] if is_whole else list(group)
        scored, plan = worth(examined(files or folder)), _plan(folder)
        _log.info("read %d results in %s, %s plan.json", scored.num_runs, folder, "with" if plan else "without")
        name = _name(folder.resolve(), scored.benchmark) + (f", {files[0].stem}" if len(files) == 1 else "")
        if any(name == other.name for other in found):
            name = str(files[0] if len(files) == 1 else folder)
        found.append(TrialSet(name=name, score=scored, plan=plan, num_gpus=_num_gpus(scored, plan, num_gpus)))
    return tuple(found)


def _sets_in(path: Path) -> list[Path]:
    """Return a path, or for a folder of run folders those of them that hold results."""
    if not path.is_dir() or any(path.glob("result_*.txt")):
        return [path]
    return sorted({log.parent for log in path.glob("*/result_*.txt")}) or [path]


def _folder(path: Path) -> tuple[Path, bool]:
    """Return where a path's logs lie, and whether it names all of them."""
    return (path, True) if path.is_dir() else (path.parent, False)


def claim(trials: TrialSet) -> Claim:
    """Return the minutes that a set may claim: a score, else the mean of runs that are all valid, else none."""
    s, results = trials.score, trials.results
    say = partial(Claim, num_valid=sum(r.valid for r in results))
    if not trials.has_target:
        return say(kind="throughput", minutes=None, what=NO_TARGET)
    complete = s.num_runs_required is not None and s.num_runs >= s.num_runs_required
    if s.valid and complete and s.official_minutes is not None and not trials.pretends:
        factor = "" if s.rcp_factor is None else f" × RCP factor {s.rcp_factor:.4f}"
        what = f"olympic mean of {s.num_runs} runs{factor}"
        return say(kind="score", minutes=s.official_minutes, what=what, interval=s.interval_minutes)
    why_not = trials.pretends or "; ".join(f.what for f in s.findings if f.severity == "error")
    say = partial(say, why_no_score=why_not, remark=f"(n = {len(results)}, no score)")
    minutes = [r.minutes for r in results if r.valid and r.minutes is not None]
    if len(minutes) < len(results):
        return say(kind="none", minutes=None, what=f"{len(results) - len(minutes)} of {len(results)} runs not valid")
    if s.olympic_minutes is not None:
        return say(kind="runs", minutes=s.olympic_minutes, what=f"olympic mean of {len(minutes)} runs")
    what = "one run" if len(minutes) == 1 else f"mean of {len(minutes)} runs"
    return say(kind="runs", minutes=fmean(minutes), what=what)


def peers(trials: TrialSet) -> tuple[tuple[System, ...], str]:
    """Return the published systems that a set may be compared with, fastest first, or why there are none."""
    if trials.pretends:
        return (), f"{trials.pretends}; so it is not compared with published systems"
    known = published.systems(trials.score.benchmark) if trials.score.benchmark else ()
    if not known:
        return (), f"no published figures for {trials.score.benchmark or 'a log that names no benchmark'}"
    if trials.num_gpus is None:
        return (), "the log does not say its number of GPUs; --num-gpus N does"
    same = sorted((s for s in known if s.num_gpus == trials.num_gpus), key=lambda s: s.official_minutes)
    return tuple(same), "" if same else f"no published system has {trials.num_gpus} GPUs"


def model(accelerator: str | None) -> str:
    """Return the short name that tells accelerators apart (H200, MI300X); empty where none is found."""
    match = re.search(r"[A-Z]{1,3}\d{2,4}[A-Z]?(?![A-Za-z0-9])(-NVL)?", accelerator or "")
    return match[0] if match else ""


def standings(trials: TrialSet, said: Claim, systems: Sequence[System]) -> tuple[Standing, ...]:
    """Return the set beside all the systems, those with the same accelerator, and those of each round."""
    own, systems = model(trials.accelerator), [s for s in systems if s.is_score]
    groups = {"all rounds": systems, f"{own}, all rounds": [s for s in systems if own and model(s.accelerator) == own]}
    for name in sorted({s.round for s in systems}, reverse=True):
        groups[name] = [s for s in systems if s.round == name]
    return tuple(_standing(name, group, said) for name, group in groups.items() if group)


def _standing(name: str, systems: Sequence[System], said: Claim) -> Standing:
    times = [system.official_minutes for system in systems]
    middle, ours = median(times), said.minutes
    return Standing(
        name=name,
        count=len(systems),
        best=min(systems, key=lambda s: s.official_minutes),
        median_minutes=middle,
        rank=None if said.kind != "score" or ours is None else 1 + sum(t < ours - _SAME_MINUTES for t in times),
        to_best=None if ours is None else ours / min(times),
        to_median=None if ours is None else ours / middle,
    )


_SAME_MINUTES = 0.0005
"""Published minutes are rounded; a set that was published is not slower than itself."""


def ranked(trials: TrialSet, said: Claim, systems: Sequence[System]) -> tuple[Entry, ...]:
    """Return the systems with the same accelerator, else the best of each, and among them this set if it has a time."""
    own = model(trials.accelerator)
    near = [s for s in systems if own and model(s.accelerator) == own] or best_of_each(systems)
    entries = [_entry(system, said.minutes) for system in near]
    if near and said.minutes is not None:
        entries.append(_own_entry(trials, said, said.minutes))
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


def _own_entry(trials: TrialSet, said: Claim, minutes: float) -> Entry:
    speeds = [r.throughput_samples_s for r in trials.results if r.throughput_samples_s]
    gbs = trials.score.global_batch_size
    return Entry(
        name=f"{trials.name} {said.remark}".rstrip(),
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
    """Return the fastest system of each accelerator; the systems come fastest first."""
    found: dict[str, System] = {}
    for system in systems:
        found.setdefault(model(system.accelerator) or system.accelerator, system)
    return tuple(found.values())


def _num_gpus(scored: Score, plan: Plan | None, said: int | None) -> int | None:
    """Return what the logs say, else the plan, else the user; none for a run on CPUs, whatever its logs count."""
    if plan is None:
        return scored.num_gpus or said
    return None if plan.config.cluster.device is Device.cpu else scored.num_gpus or plan.world.num_ranks


def _plan(folder: Path) -> Plan | None:
    """Return the plan of a run folder; its logs can be read without one, and without one that was cut off."""
    with suppress(ConfigError):
        return plans.load(folder / run_files.PLAN)
    return None


def _name(folder: Path, benchmark: str | None) -> str:
    """Return the folder's name, or that of the system in results/<system>/<benchmark>."""
    return folder.parent.name if folder.name == benchmark else folder.name
