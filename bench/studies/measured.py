"""What one proven run of a study measured: over its window of steps, and scaled where the run was shorter."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.contract import run_files
from bench.errors import LogError
from bench.history import compare, measured_trials
from bench.history.compare import Side
from bench.history.measured_trials import ProvenTrial, Runs
from bench.mlperf.result import Result
from bench.results.kind import read
from bench.results.measurement import Measurement, hardware_facts
from bench.runs import ledger
from bench.studies import arms, folder
from bench.studies.arms import Arm
from bench.studies.spec import Calculated, Window

SCALED = ("time_of_steps", "run_time")
"""Measurements that are proportional to the number of steps."""
EPOCH = "epoch_time"
"""Calculated from the time of all steps, where of_steps is the number of steps of an epoch."""
_RATES = ("throughput", "throughput_per_gpu", "real_throughput_per_gpu", "arithmetic_per_gpu", "mfu")
_FACTS = ("accelerator", "host_processor_model_name", "operating_system", "commit", "image")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Numbers of one run by the names of measurements, and the facts of what ran."""

    numbers: Mapping[str, Measurement]
    calculated: frozenset[str] = frozenset()
    """Names of numbers that are scaled from a shorter run."""
    facts: Mapping[str, str]
    began_ms: int | None = None
    """When it began by its log's clock, which a copy of the log keeps."""


def of_run(folder: Path, arm: Arm, *, window: Window | None) -> Measured:
    """Return what the log of a run's trial proves.

    Raises:
        LogError: the log cannot be read, has changed since its trial ended, or does not list the steps of the window.
    """
    log = folder / run_files.result(0)
    content = read(log)
    measured_trials.checksum(log, next((entry for entry in ledger.found(folder) if entry.trial == 0), None))
    numbers = {one.name: one for one in content.of_kind.measurements}
    if window is not None:
        numbers |= {one.name: one for one in of_window(content.result, numbers, window)}
    calculated: frozenset[str] = frozenset()
    if arm.calculated is not None:
        scaled = _scaled(numbers, arm.calculated)
        numbers, calculated = numbers | scaled, frozenset(scaled)
    began_ms = content.result.run_start_ms
    return Measured(numbers=numbers, calculated=calculated, facts=facts(content.result), began_ms=began_ms)


def of_window(result: Result, numbers: Mapping[str, Measurement], window: Window) -> list[Measurement]:
    """Return step time and rates over the steps after the first skip_steps, from the listed time of each step.

    Rates count training only. Those of the whole run count the same work, so that they differ by one factor.
    """
    times_ms = _steps_ms(result, window)
    step_ms, total_s = median(times_ms), sum(times_ms) / 1000
    steps = Measurement(name="step_time", unit="ms", value=step_ms, n=len(times_ms))
    found = [steps, Measurement(name="time_of_steps", unit="s", value=total_s, n=len(times_ms))]
    assert result.global_batch_size is not None  # or there are no listed steps
    samples_s = result.global_batch_size * len(times_ms) / total_s
    if "throughput" in numbers:
        factor = samples_s / numbers["throughput"].value
        rates = (numbers[name] for name in _RATES if name in numbers)
        found += [replace(rate, value=factor * rate.value, n=len(times_ms)) for rate in rates]
    return found


def _steps_ms(result: Result, window: Window) -> list[float]:
    gbs, first, last = result.global_batch_size or 0, window.skip_steps + 1, window.skip_steps + window.steps
    by_step = {round(samples / gbs): time_ms for samples, time_ms in result.step_times_ms} if gbs else {}
    times_ms = [by_step[step] for step in range(first, last + 1) if step in by_step]
    if len(times_ms) != window.steps:
        raise LogError(
            f"the log lists {len(times_ms)} of the {window.steps} steps from step {first} to {last}",
            where=result.file,
            fix="run it again: an attempt that went on from a checkpoint lists only its own steps",
        )
    return times_ms


def _scaled(numbers: Mapping[str, Measurement], short: Calculated) -> dict[str, Measurement]:
    """Return the times that of_steps steps would take."""
    factor = short.of_steps / short.steps
    found = {name: replace(numbers[name], value=factor * numbers[name].value) for name in SCALED if name in numbers}
    if "time_of_steps" in found:
        found[EPOCH] = replace(found["time_of_steps"], name=EPOCH)
    return found


def facts(result: Result) -> dict[str, str]:
    """Return what a log says of the machine and of what ran on it."""
    known = result.hyperparameters
    logged = {name.replace("_", " "): str(known[name]) for name in _FACTS if name in known}
    gpus = {"GPUs": str(result.num_gpus)} if result.num_gpus else {}
    return {**gpus, **hardware_facts(result), **logged, **result.software}


def side(text: str) -> Side:
    """Return the runs that a user means, as `bench.history.compare.side` does.

    Raises:
        ConfigError: there are no runs, or the study that they are of cannot be read.
    """
    found = compare.side(text)
    trials: list[ProvenTrial] = []
    left_out = list(found.runs.left_out)
    for trial in found.runs.trials:
        try:
            trials.append(_as_in_study(trial))
        except LogError as error:
            left_out.append(f"{trial.folder.name}: {error.what}")
    return replace(found, runs=Runs(trials=tuple(trials), left_out=tuple(left_out)))


def _as_in_study(trial: ProvenTrial) -> ProvenTrial:
    """Return a trial with the numbers that its study's tables have of it; one of no study as it is."""
    slug = compare.arm_of(trial.folder)
    if not slug:
        return trial
    kept = folder.kept(trial.folder.parent)
    arm = next((arm for arm in arms.of(kept.study, where=folder.STUDY) if arm.slug == slug), None)
    if arm is None:
        return trial
    numbers = of_run(trial.folder, arm, window=kept.study.window).numbers
    return replace(trial, measurements=numbers)
