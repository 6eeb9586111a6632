"""What a trial of a training task shows, from its log alone: what it proves, and its measurements."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contract import mllog
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import TrainingPlan, required
from bench.mlperf.local_sgd import Apart
from bench.mlperf.log import Log
from bench.mlperf.result import Result, differing
from bench.mlperf.speed import Spread, spread
from bench.results.measurement import Measurement, of_telemetry
from bench.results.modules import of_modules

UNITS = {
    "time_to_train": "min",
    "run_time": "min",
    "samples_to_target": "samples",
    "step_time": "ms",
    "evaluation_time": "s",
    "epoch_time": "s",
    "time_of_steps": "s",
    "initialization_time": "s",
    "throughput": "samples/s",
    "throughput_per_gpu": "tokens/s/GPU",
    "real_throughput_per_gpu": "tokens/s/GPU",
    "arithmetic_per_gpu": "TFLOP/s/GPU",
    "mfu": "",
    "peak_memory": "GiB",
    "inner_step_time": "ms",
    "merge_time": "s",
    "merge_bytes": "B",
    "efficiency_apart": "",
    "training_loss": "",
    "evaluation_loss": "",
}
"""Of a trial's measurements, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What the log says of a trial that trained."""

    result: Result
    problems: tuple[str, ...] = ()
    """None of its own: what is wrong with training stands in the findings of the log."""

    @property
    def valid(self) -> bool:
        """Whether the log is that of a valid trial, and its target was reached."""
        return self.result.valid and (self.result.target is None or self.result.converged)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Times first, then rates, memory and losses. The time of an epoch is a mean.

        A time to train and the samples to the target exist only if the target was reached. Without a target, the
        interval from run_start to run_stop is the duration of the run's steps.
        """
        return tuple(_measured(self.result))

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from the planned trial."""
        wanted, result = required(plan, TrainingPlan), self.result
        planned = {
            "seed": (result.seed, trial.seed),
            "submission_benchmark": (result.benchmark, wanted.submission.benchmark),
            "submission_division": (result.division, wanted.submission.division),
            "target_accuracy": (result.target, wanted.config.training.target_eval_loss),
            "global_batch_size": (result.global_batch_size, wanted.batch.global_batch_size),
        }
        start, source = wanted.config.training.starts_from, wanted.data.source
        for key, want in ((mllog.INITIAL_WEIGHTS, start), (mllog.DATA_SOURCE, source)):
            planned[key] = (result.hyperparameters.get(key), want.name)
        if not result.has_target:
            last = result.evaluations[-1].samples if result.evaluations else None
            planned["samples trained on"] = (last, wanted.max_samples)
        return differing(planned)


def read(log: Log, result: Result) -> TrainingResult:
    """Return what a log says of training; the logs of other kinds say nothing of it."""
    return TrainingResult(result=result)


def _measured(result: Result) -> Iterator[Measurement]:
    if result.minutes is not None and (result.converged or not result.has_target):
        yield Measurement(name="time_to_train" if result.has_target else "run_time", unit="min", value=result.minutes)
    if result.samples_to_target is not None:
        yield Measurement(name="samples_to_target", unit="samples", value=result.samples_to_target)
    yield from _spread("step_time", "ms", result.step_time_ms)
    yield from _spread("evaluation_time", "s", spread(result.eval_times_s))
    yield from _mean("epoch_time", "s", spread(result.epoch_times_s))
    if result.steps_time_s is not None:
        yield Measurement(name="time_of_steps", unit="s", value=result.steps_time_s, n=len(result.step_times_ms))
    for name, unit, value in (
        ("initialization_time", "s", result.init_s),
        ("throughput", "samples/s", result.throughput_samples_s),
        ("throughput_per_gpu", "tokens/s/GPU", result.tokens_s_gpu),
        ("real_throughput_per_gpu", "tokens/s/GPU", result.real_tokens_s_gpu),
        ("arithmetic_per_gpu", "TFLOP/s/GPU", result.tflops_gpu),
        ("mfu", "", result.mfu),
        ("peak_memory", "GiB", result.peak_memory_gib.allocated if result.peak_memory_gib else None),
        ("training_loss", "", result.train_loss),
        ("evaluation_loss", "", None if result.has_random_rows or result.higher_is_better else result.eval_final),
    ):
        if value is not None:
            yield Measurement(name=name, unit=unit, value=value)
    if result.apart is not None:
        yield from of_apart(result.apart, result.steps_time_s)
    if result.telemetry is not None:
        yield from of_telemetry(result.telemetry)
    if result.module_times is not None:
        yield from of_modules(result.module_times)


def of_apart(apart: Apart, steps_time_s: float | None) -> Iterator[Measurement]:
    """Yield what merging groups that train apart took."""
    for name, unit, value in (
        ("inner_step_time", "ms", min(apart.inner_step_ms.values(), default=None)),
        ("merge_time", "s", apart.exchange_s),
        ("merge_bytes", "B", apart.rank_bytes),
        ("efficiency_apart", "", apart.efficiency(steps_time_s)),
    ):
        if value is not None:
            yield Measurement(name=name, unit=unit, value=value)


def _mean(name: str, unit: str, values: Spread | None) -> Iterator[Measurement]:
    if values is not None:
        yield Measurement(name=name, unit=unit, value=values.mean, n=values.count, p10=values.p10, p90=values.p90)


def _spread(name: str, unit: str, values: Spread | None) -> Iterator[Measurement]:
    if values is not None:
        yield Measurement(name=name, unit=unit, value=values.median, n=values.count, p10=values.p10, p90=values.p90)
