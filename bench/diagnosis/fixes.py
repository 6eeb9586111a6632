"""Fixes computed from the plan and the log of a run: settings that need less memory, a sufficient time limit."""

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from bench.contract import checkpoint, mllog
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan, required, training_plan
from bench.contract.schema import Config, Runtime
from bench.contract.training import Recompute
from bench.diagnosis.log_scan import Clue
from bench.errors import ConfigError
from bench.mlperf.reader import Event, is_number
from bench.mlperf.result import Result
from bench.planning import make_plan
from bench.runs import ledger
from bench.runs.folder import short

MARGIN_MIN = 5
"""Minutes for starting and stopping, as in the walltime of a job."""
_SILENT_MIN = 0.5
_SILENT_GAPS = 10
"""A run hung if it logged nothing for this many minutes before its end, and this many times its longest pause."""
_ENDED_AT = re.compile(r"CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_START_AGAIN = (
    "so it hung: start it again, and when it hangs again, run `py-spy dump --pid PID` for every rank to see where"
)
_COUNTED = (mllog.TRAIN_LOSS, mllog.TRACKED_STATS, mllog.EVAL_ACCURACY, mllog.EVAL_STOP)


_MODULE = re.compile(r"No module named '([\w.]+)'")
_PIP = {"flash_attn": "flash-attn --no-build-isolation", "megatron": "'runstop[engine]'", "torch": "'runstop[engine]'"}
"""The arguments of pip for modules whose packages have other names."""


def of_this_run(clue: Clue, plan: Plan | None) -> Clue:
    """Return the clue with a fix that names the missing module, or with the rule of a run without a container."""
    if clue.rule == "RUN-25" and (module := _MODULE.search(clue.text)):
        package = module[1].partition(".")[0]
        where = "on the machine of the ranks, in their Python environment or image"
        return replace(clue, fix=f"{where}: pip install {_PIP.get(package, package)}")
    return without_image(clue, plan)


def without_image(clue: Clue, plan: Plan | None) -> Clue:
    """Change PYX-03 to RUN-25 for a run without a container: the module is missing from the Python environment."""
    if clue.rule != "PYX-03" or plan is None or plan.config.container.runtime is not Runtime.none:
        return clue
    fix = "run `pip install 'runstop[engine]'` in the environment of the ranks: it installs torch and megatron-core"
    return replace(clue, rule="RUN-25", fix=fix)


def less_memory(plan: Plan) -> str | None:
    """Return the smallest valid changes whose estimated memory is visibly below the plan's and fits, or None."""
    trained = training_plan(plan)
    if trained is None or trained.memory is None:
        return None
    now, fitting = trained.memory.total_gib, []
    for key, changed in _changes(trained):
        try:
            needed = required(make_plan.make(changed), TrainingPlan).memory
        except ConfigError:
            continue
        saves = needed is not None and needed.total_gib < now and f"{needed.total_gib:.1f}" != f"{now:.1f}"
        if needed is not None and needed.fits is not False and saves:
            fitting.append((key, needed.total_gib))
    best = {key.split("=")[0]: f"{key} ({gib:.1f} GiB)" for key, gib in reversed(fitting)}  # the smallest of each key
    if not best:
        return None
    choice = "one of " if len(best) > 1 else ""
    return f"set {choice}{', '.join(reversed(best.values()))}; this plan needs {now:.1f} GiB (estimates per GPU)"


def _changes(plan: TrainingPlan) -> Iterator[tuple[str, Config]]:
    """Yield changes that could need less memory, the smallest of each key first."""
    config, ranks = plan.config, plan.world.num_ranks
    for name in ("tp", "cp"):
        for size in range(getattr(plan.world, name) + 1, ranks + 1):
            if ranks % size == 0:
                changed = copy.deepcopy(config)
                setattr(changed.parallel, name, size)
                yield f"parallel.{name}={size}", changed
    if config.training_recipe.recompute is not Recompute.full:
        changed = copy.deepcopy(config)
        changed.training_recipe.recompute = Recompute.full
        yield "recipe.recompute=full", changed
    if (config.training_recipe.micro_batch_size or 1) > 1:
        changed = copy.deepcopy(config)
        changed.training_recipe.micro_batch_size = 1
        yield "recipe.micro_batch_size=1", changed


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a trial got."""

    samples: float
    """The samples trained on at the last record with a samples_count."""
    pace_samples_min: float | None
    """The pace from run_start to that record, evaluations and pauses included; None if no time has passed."""
    minutes: float
    """The time from the first record to the last one."""
    before_min: float
    """The part of these minutes before run_start."""


def reached(events: Sequence[Event], result: Result) -> Reached | None:
    """Return how far a trial got by its records; None if no record counts samples."""
    counted = [
        (samples, event.time_ms)
        for event in events
        if event.key.rstrip() in _COUNTED and is_number(samples := event.metadata.get("samples_count"))
    ]
    if not counted or result.run_start_ms is None:
        return None
    samples, at_ms = max(counted)
    first_ms, last_ms = min(event.time_ms for event in events), max(event.time_ms for event in events)
    took_min = (at_ms - result.run_start_ms) / 60_000
    return Reached(
        samples,
        pace_samples_min=samples / took_min if took_min > 0 and samples > 0 else None,
        minutes=(last_ms - first_ms) / 60_000,
        before_min=(result.run_start_ms - first_ms) / 60_000,
    )


def how_far(reached: Reached | None, result: Result) -> str:
    """Return samples, last evaluation and target as one line."""
    parts = ["samples not in the log" if reached is None else f"{reached.samples:,.0f} samples"]
    if reached and (total := total_samples(result)):
        parts[0] += f" of at most {total:,.0f}"
    if reached and reached.pace_samples_min:
        parts.append(f"{reached.pace_samples_min:,.1f} samples/min")
    last = result.evaluations[-1] if result.evaluations else None
    parts.append(f"last evaluation {last.value:.5g}" if last else "no evaluation")
    if result.target is not None:
        parts.append(f"target {result.target:g}")
    return ", ".join(parts)


BUS_ERROR = re.compile(r"\bSIGBUS\b|Bus error|\bexitcode *: -7\b|exit code 135\b")
MAPPED_FILE = (
    "a rank read a part of a mapped file that no longer exists: either a file of rows or weights became shorter during "
    "the run (delete the file and prepare it again), or /dev/shm or the disk is full (`df -h`)"
)


def resume_hint(folder: Path) -> str | None:
    """Return the command that resumes a run from its checkpoints; None if no unfinished trial has one."""
    unfinished = [entry.trial for entry in ledger.entries(folder) if not entry.outcome.is_result]
    if all(checkpoint.newest(folder, trial) is None for trial in unfinished):
        return None
    return f"to resume from the last checkpoint: runstop resume {short(folder)}"


def total_samples(result: Result) -> float | None:
    """Return the samples of all planned steps; a run that reaches its target trains on fewer."""
    steps = result.hyperparameters.get(mllog.OPT_LEARNING_RATE_TRAINING_STEPS)
    return steps * result.global_batch_size if is_number(steps) and steps > 0 and result.global_batch_size else None


def enough_time(reached: Reached | None, result: Result, plan: Plan | None) -> str | None:
    """Return the time limit that the run needs to its last step; None if the log does not show it."""
    total = total_samples(result)
    if reached is None or not reached.pace_samples_min or total is None or total < reached.samples:
        return None
    minutes = reached.before_min + total / reached.pace_samples_min + MARGIN_MIN
    had_min = plan.config.walltime if plan else None
    if had_min is not None and minutes <= had_min:
        return (
            f"at its pace the run needs {math.ceil(minutes)} min, and its time limit was {had_min} min, {_START_AGAIN}"
        )
    return (
        f"set walltime={math.ceil(minutes)} (minutes per trial) to reach the last step ({total:,.0f} samples) at this "
        f"pace; the log of this run covers {reached.minutes:.0f} min. A run that reaches its target earlier needs less"
    )


def hung(events: Sequence[Event], evidence: str, plan: Plan | None) -> str | None:
    """Return what to do if a run stopped logging long before its time limit; None if it did not."""
    ended = _ENDED_AT.search(evidence)
    if plan is None or plan.config.walltime is None or ended is None or len(events) < 3:
        return None
    times = [event.time_ms for event in events]
    # Two estimates: from the walltime of a trial, and from the clock, which may be in another time zone here.
    by_walltime = plan.config.walltime - (times[-1] - times[0]) / 60_000
    by_clock = datetime.fromisoformat(ended[1]).timestamp() / 60 - times[-1] / 60_000
    silent_min = min(by_walltime, by_clock)
    longest_min = max(b - a for a, b in zip(times, times[1:], strict=False)) / 60_000
    if silent_min < max(_SILENT_MIN, _SILENT_GAPS * longest_min):
        return None
    return (
        f"the run logged nothing in its last {60 * silent_min:,.0f} s; before that its longest pause was "
        f"{max(1, 60 * longest_min):,.0f} s, {_START_AGAIN}. A longer time limit does not help"
    )
