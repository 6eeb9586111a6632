"""Read the result of a trial from its log: whether it is valid, and how fast it was.

A number that is not in the log is None. `bench.mlperf.compliance` checks the log.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.contract import mllog, modules
from bench.contract.modules import ModuleTimes
from bench.mlperf import compliance, local_sgd, reader, settings, speed, telemetry
from bench.mlperf import log as logs
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.local_sgd import LocalSgdResult
from bench.mlperf.log import Log, number
from bench.mlperf.reader import is_number
from bench.mlperf.speed import Spread
from bench.mlperf.telemetry import Telemetry
from bench.rules.finding import Finding, errors

NO_TARGET = "speed only (no target set)"
UNVERIFIED = "Unverified. Result not verified by MLCommons Association."
"""This text is shown with every number of ours that looks like a score."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One eval_accuracy record."""

    samples: float | None
    """Samples trained on so far; None if the log counts epochs or steps instead."""
    value: float
    line: int
    time_ms: int
    metric: str | None = None
    """The metric, if the benchmark has several (stable_diffusion: FID, CLIP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The highest peak memory of a GPU between run_start and run_stop, in GiB."""

    allocated: float
    reserved: float | None
    """The memory including the cache of the allocator."""
    estimated: float | None
    """The estimate of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One trial of a log. The first trial begins at the first record of the log. Each other trial begins at its
    run_start."""

    first_line: int
    last_line: int
    run_start_ms: int
    run_stop_ms: int | None
    minutes: float | None
    status: str | None
    seed: int | None
    eval_final: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one trial, from its log."""

    file: str
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    status: str | None
    """The status of run_stop: success or aborted."""
    run_start_ms: int | None
    run_stop_ms: int | None
    has_target: bool
    """Whether the run has a target; without one no number of this log is a time to train."""
    has_random_rows: bool
    """Whether the data was random tokens. Then losses have no meaning."""
    shape_of: str | None
    """If the log has no target: the benchmark with the same amount of work in steps and evaluations."""
    resumed_samples: float | None
    """Samples trained by earlier attempts, from whose checkpoint this one resumed; None for a complete trial."""
    minutes: float | None
    """From run_start to run_stop; None for a part of a trial."""
    init_s: float | None
    """First init_start to init_stop, in seconds."""
    evaluations: tuple[Evaluation, ...]
    train_losses: tuple[tuple[float | None, float], ...]
    """(samples, loss) pairs."""
    target: float | None
    """The value to reach; None if there are several, or if none is logged and no official one is known."""
    higher_is_better: bool
    """Whether a value at or above the target reaches it, as for an accuracy; a loss must be at or below."""
    eval_final: float | None
    samples_to_target: float | None
    """Samples at the first evaluation that reaches the target."""
    converged: bool
    """The last evaluation reaches the target; False without a target."""
    seed: int | None
    global_batch_size: int | None
    step_time_ms: Spread | None
    """Time of an optimizer step: of every step if the log lists them, else means between two log lines of a block.

    If no record counts samples, this is the step time that the run itself tracked."""
    step_times_ms: tuple[tuple[float, float], ...]
    """(samples, step time) of each measurement, in order."""
    eval_time_s: float | None
    """Median of eval_start to eval_stop, in seconds."""
    eval_times_s: tuple[float, ...]
    """Time of each evaluation, in order."""
    steps_time_s: float | None
    """Total time of all listed steps: training only, without loading, checkpoints and evaluations."""
    epoch_times_s: tuple[float, ...]
    """Total step time of each complete epoch; empty for random data."""
    real_token_share: float | None
    """Tokens without padding over all tokens of the steps; None if the log does not count them."""
    throughput_samples_s: float | None
    """Samples trained on over the time spent training, without evaluations."""
    num_gpus: int | None
    """From the log's SYSJSON record or num_ranks; None if they conflict."""
    gpu_count_conflict: str
    """Why the GPU count of the SYSJSON record is wrong; empty if there is no conflict or no record."""
    tokens_s_gpu: float | None
    """Throughput times sequence length over num_gpus."""
    tflop_per_sample: float | None
    """Of the model, forward and backward, as computed by the run (`bench.planning.estimates.flops`)."""
    tflops_gpu: float | None
    """Throughput times tflop_per_sample over num_gpus."""
    mfu: float | None
    """tflops_gpu over the peak in the log: model FLOPs utilization, 0 to 1."""
    peak_memory_gib: PeakMemory | None
    telemetry: Telemetry | None
    """Power, clocks and temperature of the GPUs during the run; None if not sampled, as on CPUs."""
    module_times: ModuleTimes | None
    """Time of each module in profiled warm-up steps; None without such a profile."""
    local_sgd: LocalSgdResult | None
    """None without local SGD."""
    system: dict[str, Any]
    """The log's SYSJSON record, which fills the system description of a submission; empty if there is none."""
    software: dict[str, str]
    """Versions by name, from the log's `software` record."""
    hyperparameters: dict[str, Any]
    """The settings that the log records once, without the submission keys and the seed."""
    inputs: dict[str, str]
    """The checksum of each input that the ranks read, by input; empty in logs that name none."""
    trials: tuple[Span, ...]
    """One for each run_start. If a log holds several, none of the numbers above belongs to a single trial."""
    findings: tuple[Finding, ...]
    valid: bool
    """No finding is an error: the trial completed and, if it has a target, reached it."""

    @property
    def evaluation_share(self) -> float | None:
        """The share of the run time that was spent in evaluations; None unless the log times each of them."""
        if not self.minutes or not self.evaluations or len(self.eval_times_s) != len(self.evaluations):
            return None
        return sum(self.eval_times_s) / (60 * self.minutes)

    @property
    def real_tokens_s_gpu(self) -> float | None:
        """tokens_s_gpu without padding; None if the log does not count padding."""
        return self.tokens_s_gpu and self.real_token_share and self.tokens_s_gpu * self.real_token_share

    @property
    def train_loss(self) -> float | None:
        """The last training loss in the log; None for random data."""
        return self.train_losses[-1][1] if self.train_losses and not self.has_random_rows else None

    @property
    def mfu_counts(self) -> str:
        """What the MFU counts as work, and which peak it uses."""
        peak, in_linear = map(self.hyperparameters.get, (mllog.ACCELERATOR_PEAK_TFLOPS, mllog.PRECISION_IN_LINEAR))
        name = {"fp8": "FP8", "bfloat16": "BF16"}.get(str(in_linear), "logged")
        of_peak = f"peak of {peak:,.0f} TFLOP/s" if is_number(peak) else "peak"
        return f"of the dense {name} {of_peak}; attention counted as causal, recomputation not counted"


def parse(path: Path | str) -> Result:
    """Return the result of a log of any content.

    Raises:
        LogError: the file cannot be opened.
    """
    return result(logs.read(path), str(path), reader.system(path))


def result(log: Log, file: str, system: dict[str, Any]) -> Result:
    """Return the result from the records of a log."""
    trial = (
        Log((), ()) if log.all(mllog.RUN_START)[1:] else log
    )  # in a log of several trials no number belongs to one of them
    findings = compliance.judge(log)
    return Result(
        file=file,
        **_identity(log),
        **_outcome(log, trial),
        **speed.times(log, trial),
        **speed.rates(log, trial, system),
        peak_memory_gib=_peak_memory(log),
        telemetry=telemetry.read(log),
        module_times=modules.parsed(log.value(mllog.MODULE_TIMES)),
        local_sgd=local_sgd.read(log),
        system=system,
        software=settings.software(log),
        hyperparameters=settings.hyperparameters(log),
        inputs=settings.inputs(log),
        trials=tuple(_span(span) for span in log.trials()),
        findings=findings,
        valid=not errors(findings),
    )


def _identity(log: Log) -> dict[str, Any]:
    """Return the fields that identify the benchmark, the system and the submitter."""
    return {
        "benchmark": log.text(mllog.SUBMISSION_BENCHMARK),
        "division": log.text(mllog.SUBMISSION_DIVISION),
        "org": log.text(mllog.SUBMISSION_ORG),
        "platform": log.text(mllog.SUBMISSION_PLATFORM),
        "seed": log.integer(mllog.SEED),
        "global_batch_size": log.integer(mllog.GLOBAL_BATCH_SIZE),
        "has_target": log.has_target,
        "has_random_rows": log.has_random_rows,
        "shape_of": _shape_of(log),
    }


def _outcome(log: Log, trial: Log) -> dict[str, Any]:
    """Return the fields about the outcome of training."""
    start, stop, reached = trial.single(mllog.RUN_START), trial.single(mllog.RUN_STOP), trial.first_reached
    return {
        "status": _text(stop.metadata.get("status")) if stop else None,
        "run_start_ms": start.time_ms if start else None,
        "run_stop_ms": stop.time_ms if stop else None,
        "resumed_samples": log.samples(resumed) if (resumed := trial.single(mllog.RESUMED)) else None,
        "minutes": compliance.minutes(trial),
        "init_s": _init_s(trial),
        "evaluations": tuple(
            Evaluation(log.samples(e), e.value, e.line, e.time_ms, _text(e.metadata.get("metric")))
            for e in trial.evaluations
        ),
        "train_losses": tuple(_train_losses(trial)),
        "target": log.goals[0].value if len(log.goals) == 1 else None,
        "higher_is_better": bool(log.goals) and log.goals[0].higher_is_better,
        "eval_final": trial.evaluations[-1].value if trial.evaluations else None,
        "samples_to_target": log.samples(reached) if reached else None,
        "converged": trial.converged,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _init_s(log: Log) -> float | None:
    starts, stop = log.all(mllog.INIT_START), log.single(mllog.INIT_STOP)
    return (stop.time_ms - starts[0].time_ms) / 1000 if starts and stop and stop.time_ms >= starts[0].time_ms else None


def _train_losses(log: Log) -> Iterator[tuple[float | None, float]]:
    """Yield (samples, loss).

    Some logs have records with the key train_loss, in some with a blank after it; others have it in tracked_stats.
    """
    records = log.all(mllog.TRAIN_LOSS) or log.all(f"{mllog.TRAIN_LOSS} ")
    for event in records or log.all(mllog.TRACKED_STATS):
        loss = event.value
        if isinstance(loss, dict):
            loss = loss.get("train_loss", loss.get("reduced_train_loss"))
        if is_number(loss):
            yield number(event.metadata.get("samples_count")), loss


def _shape_of(log: Log) -> str | None:
    record = log.single(mllog.INITIAL_WEIGHTS)
    return _text(record.metadata.get("shape_of")) if record and not log.has_target else None


def _peak_memory(log: Log) -> PeakMemory | None:
    peak = log.value(mllog.PEAK_MEMORY)
    if not isinstance(peak, dict) or (allocated := number(peak.get("allocated"))) is None:
        return None
    return PeakMemory(
        allocated=allocated, reserved=number(peak.get("reserved")), estimated=number(peak.get("estimated"))
    )


def _span(trial: Log) -> Span:
    start, stops = trial.all(mllog.RUN_START)[0], trial.all(mllog.RUN_STOP)
    return Span(
        first_line=trial.events[0].line,
        last_line=trial.events[-1].line,
        run_start_ms=start.time_ms,
        run_stop_ms=stops[0].time_ms if stops else None,
        minutes=compliance.minutes(trial),
        status=_text(stops[0].metadata.get("status")) if stops else None,
        seed=trial.integer(mllog.SEED),
        eval_final=trial.evaluations[-1].value if trial.evaluations else None,
    )


def with_gpus(result: Result, num_gpus: int | None) -> Result:
    """Return a result with its rates per GPU, unless the log itself has the number of GPUs."""
    if num_gpus is None or result.num_gpus is not None:
        return result
    per_gpu = None if result.throughput_samples_s is None else result.throughput_samples_s / num_gpus
    known = BENCHMARKS.get(result.benchmark or "")
    tokens = result.hyperparameters.get("max_sequence_length") or (known.sequence_length if known else None)
    work, peak = result.tflop_per_sample, result.hyperparameters.get(mllog.ACCELERATOR_PEAK_TFLOPS)
    tflops = per_gpu * work if per_gpu and work else None
    return replace(
        result,
        num_gpus=num_gpus,
        tokens_s_gpu=per_gpu * tokens if per_gpu and isinstance(tokens, int | float) else None,
        tflops_gpu=tflops,
        mfu=tflops / peak if tflops and is_number(peak) and peak > 0 else None,
    )


def differing(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return, as text, the settings whose logged value is not the planned one; pairs are (logged, planned)."""
    return [
        f"{name} is {logged} in the log, but {planned} in the plan"
        for name, (logged, planned) in pairs.items()
        if logged != planned
    ]
