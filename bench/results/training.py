"""The result of a training trial, from its log: whether it is valid, and its measurements."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contract import mllog
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import TrainingPlan, required
from bench.mlperf.local_sgd import LocalSgdResult
from bench.mlperf.log import Log
from bench.mlperf.result import Result, differing
from bench.mlperf.speed import Spread, spread
from bench.results.cost import with_costs
from bench.results.measurement import Measurement, of_telemetry
from bench.results.modules import of_modules

UNITS = {
    "time_to_train": "min",
    "run_time": "min",
    "samples_to_target": "samples",
    "step_time": "ms",
    "evaluation_time": "s",
    "evaluation_share": "",
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
    "averaging_time": "s",
    "averaging_bytes": "B",
    "efficiency_local_sgd": "",
    "training_loss": "",
    "evaluation_loss": "",
}
"""The units of the measurements, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a training trial."""

    result: Result
    problems: tuple[str, ...] = ()
    """Always empty: the problems of training logs are in the findings of `result`."""

    @property
    def valid(self) -> bool:
        """Whether the log is valid, and the target, if there is one, was reached."""
        return self.result.valid and (self.result.target is None or self.result.converged)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Times first, then rates, memory and losses. The epoch time is a mean.

        The time to train and the samples to the target exist only if the target was reached. Without a target, the
        time from run_start to run_stop is the run time.
        """
        return with_costs(_measured(self.result), self.result)

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from the planned trial."""
        training_plan, result = required(plan, TrainingPlan), self.result
        planned = {
            "seed": (result.seed, trial.seed),
            "submission_benchmark": (result.benchmark, training_plan.submission.benchmark),
            "submission_division": (result.division, training_plan.submission.division),
            "target_accuracy": (result.target, training_plan.config.training.target_eval_loss),
            "global_batch_size": (result.global_batch_size, training_plan.batch.global_batch_size),
        }
        start, source = training_plan.config.training.starts_from, training_plan.data.source
        for key, value in ((mllog.INITIAL_WEIGHTS, start), (mllog.DATA_SOURCE, source)):
            planned[key] = (result.hyperparameters.get(key), value.name)
        if not result.has_target:
            last = result.evaluations[-1].samples if result.evaluations else None
            if training_plan.config.program is not None:  # which chooses when to evaluate
                counts = [last, *(samples for samples, _ in (*result.train_losses, *result.step_times_ms))]
                last = max((samples for samples in counts if samples is not None), default=None)
            planned["samples trained on"] = (last, training_plan.max_samples)
        return differing(planned)


def read(log: Log, result: Result) -> TrainingResult:
    """Return the result of a training log."""
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
        ("evaluation_share", "", result.evaluation_share),
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
    if result.local_sgd is not None:
        yield from of_local_sgd(result.local_sgd, result.steps_time_s)
    if result.telemetry is not None:
        yield from of_telemetry(result.telemetry)
    if result.module_times is not None:
        yield from of_modules(result.module_times)


def of_local_sgd(local_sgd: LocalSgdResult, steps_time_s: float | None) -> Iterator[Measurement]:
    """Yield the step time, the cost of weight averaging and the efficiency of local SGD."""
    for name, unit, value in (
        ("inner_step_time", "ms", min(local_sgd.inner_step_ms.values(), default=None)),
        ("averaging_time", "s", local_sgd.exchange_s),
        ("averaging_bytes", "B", local_sgd.rank_bytes),
        ("efficiency_local_sgd", "", local_sgd.efficiency(steps_time_s)),
    ):
        if value is not None:
            yield Measurement(name=name, unit=unit, value=value)


def _mean(name: str, unit: str, values: Spread | None) -> Iterator[Measurement]:
    if values is not None:
        yield Measurement(name=name, unit=unit, value=values.mean, n=values.count, p10=values.p10, p90=values.p90)


def _spread(name: str, unit: str, values: Spread | None) -> Iterator[Measurement]:
    if values is not None:
        yield Measurement(name=name, unit=unit, value=values.median, n=values.count, p10=values.p10, p90=values.p90)
