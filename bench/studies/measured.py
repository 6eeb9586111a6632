"""Read the measurements of one valid run of a study: over its window of steps, and scaled for shortened runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.contract import run_files
from bench.errors import LogError
from bench.history import measured_trials
from bench.history.compare import RunSet
from bench.history.measured_trials import Runs, ValidTrial
from bench.mlperf.result import Result
from bench.results import cost
from bench.results.kind import read
from bench.results.measurement import Measurement, hardware_facts
from bench.runs import ledger, names
from bench.studies import arms, folder
from bench.studies.arms import Arm
from bench.studies.spec import Calculated, Window

SCALED = ("time_of_steps", "run_time")
"""Measurements that are proportional to the number of steps."""
EPOCH = "epoch_time"
"""The measurement calculated from the time of all steps, if of_steps is the number of steps of an epoch. A pass over
random rows is no epoch of a data set."""
_RATES = ("throughput", "throughput_per_gpu", "real_throughput_per_gpu", "arithmetic_per_gpu", "mfu")
_FACTS = ("accelerator", "host_processor_model_name", "operating_system", "commit", "image")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one run by name, with the facts about hardware and software."""

    numbers: Mapping[str, Measurement]
    calculated: frozenset[str] = frozenset()
    """Names of the measurements that are scaled from a shorter run."""
    has_random_rows: bool = False
    facts: Mapping[str, str]
    began_ms: int | None = None
    """The time of run_start in its log, which a copy of the log keeps."""


def of_run(folder: Path, arm: Arm, *, window: Window | None) -> Measured:
    """Return the measurements in the log of a run's trial.

    Raises:
        LogError: the log cannot be read, has changed since its trial ended, or does not list the steps of the window.
    """
    log = folder / run_files.result(0)
    content = read(log)
    measured_trials.checksum(log, next((entry for entry in ledger.entries(folder) if entry.trial == 0), None))
    numbers = {one.name: one for one in content.of_kind.measurements}
    if window is not None:
        numbers |= {one.name: one for one in of_window(content.result, numbers, window)}
    calculated: frozenset[str] = frozenset()
    if arm.calculated is not None:
        scaled = _scaled(numbers, arm.calculated, has_epochs=not content.result.has_random_rows)
        numbers, calculated = numbers | scaled, frozenset(scaled)
    costs = {one.name: one for one in cost.of_measured(tuple(numbers.values()), content.result)}
    numbers |= costs
    calculated |= {cost.RUN, cost.EPOCH} & set(costs) if calculated else frozenset()
    began_ms = content.result.run_start_ms
    return Measured(
        numbers=numbers,
        calculated=calculated,
        has_random_rows=content.result.has_random_rows,
        facts=facts(content.result),
        began_ms=began_ms,
    )


def of_window(result: Result, numbers: Mapping[str, Measurement], window: Window) -> list[Measurement]:
    """Return step time and rates over the steps of the window, from the logged time of each step.

    The rates count training only. The rates of the whole run count the same work, so all differ by the same factor.
    """
    times_ms = _steps_ms(result, window)
    step_ms, total_s = median(times_ms), sum(times_ms) / 1000
    steps = Measurement(name="step_time", unit="ms", value=step_ms, n=len(times_ms))
    of_steps = [steps, Measurement(name="time_of_steps", unit="s", value=total_s, n=len(times_ms))]
    assert result.global_batch_size is not None  # else no steps are listed
    samples_s = result.global_batch_size * len(times_ms) / total_s
    if "throughput" in numbers:
        factor = samples_s / numbers["throughput"].value
        rates = (numbers[name] for name in _RATES if name in numbers)
        of_steps += [replace(rate, value=factor * rate.value, n=len(times_ms)) for rate in rates]
    return of_steps


def _steps_ms(result: Result, window: Window) -> list[float]:
    gbs, first, last = result.global_batch_size or 0, window.skip_steps + 1, window.skip_steps + window.steps
    by_step = {round(samples / gbs): time_ms for samples, time_ms in result.step_times_ms} if gbs else {}
    times_ms = [by_step[step] for step in range(first, last + 1) if step in by_step]
    if len(times_ms) != window.steps:
        raise LogError(
            f"the log has the times of only {len(times_ms)} of the {window.steps} steps from step {first} to {last}",
            where=result.file,
            fix="run this trial again without interruption: a resumed trial logs only the steps after its checkpoint",
        )
    return times_ms


def _scaled(numbers: Mapping[str, Measurement], short: Calculated, *, has_epochs: bool) -> dict[str, Measurement]:
    """Return the times scaled to of_steps steps."""
    factor = short.of_steps / short.steps
    scaled = {name: replace(numbers[name], value=factor * numbers[name].value) for name in SCALED if name in numbers}
    if has_epochs and "time_of_steps" in scaled:
        scaled[EPOCH] = replace(scaled["time_of_steps"], name=EPOCH)
    return scaled


def facts(result: Result) -> dict[str, str]:
    """Return the hardware and software in a log, by title."""
    known = result.hyperparameters
    logged = {name.replace("_", " "): str(known[name]) for name in _FACTS if name in known}
    gpus = {"GPUs": str(result.num_gpus)} if result.num_gpus else {}
    return {**gpus, **hardware_facts(result), **logged, **result.software}


def as_in_study(of_path: RunSet) -> RunSet:
    """Return runs with the measurements of their study's tables; runs of no study are returned unchanged.

    Raises:
        ConfigError: the study of the runs cannot be read.
    """
    trials: list[ValidTrial] = []
    left_out = list(of_path.runs.left_out)
    for trial in of_path.runs.trials:
        try:
            trials.append(_as_in_study(trial))
        except LogError as error:
            left_out.append(f"{trial.folder.name}: {error.what}")
    return replace(of_path, runs=Runs(trials=tuple(trials), left_out=tuple(left_out)))


def _as_in_study(trial: ValidTrial) -> ValidTrial:
    """Return a trial with the measurements of its study's tables; a trial of no study is returned unchanged."""
    slug = names.arm_of(trial.folder)
    if not slug:
        return trial
    stored = folder.read(trial.folder.parent)
    arm = next((arm for arm in arms.build(stored.study, where=folder.STUDY) if arm.slug == slug), None)
    if arm is None:
        return trial
    numbers = of_run(trial.folder, arm, window=stored.study.window).numbers
    return replace(trial, measurements=numbers)
