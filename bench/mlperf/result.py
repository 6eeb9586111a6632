"""Read from a log what it proves: is the trial valid, then how fast it was; or why neither.

A number that the log does not prove is None. What is wrong with the log, `bench.mlperf.compliance` says.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from bench.contract import mllog
from bench.mlperf import compliance, reader
from bench.mlperf import log as logs
from bench.mlperf.intervals import Stretch, eval_times_s, step_times_ms, stretches
from bench.mlperf.log import Log, number
from bench.mlperf.reader import is_number, printable
from bench.rules.finding import Finding, errors

NO_TARGET = "no target: this measures speed, never a time to train or a score"
UNVERIFIED = "Unverified. Result not verified by MLCommons Association."
"""What stands beside every number of ours that looks like a score."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One eval_accuracy record."""

    samples: float | None
    """Trained on so far; None where the log counts epochs or steps instead."""
    value: float
    line: int
    time_ms: int
    metric: str | None = None
    """Which of several metrics (stable_diffusion: FID, CLIP); None where the benchmark has one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measured quantity is distributed; units are those of the field that holds it."""

    median: float
    p10: float
    p90: float
    mean: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """GiB that the fullest GPU held at most while the clock ran."""

    allocated: float
    reserved: float | None
    """With what the allocator kept besides."""
    estimated: float | None
    """What the plan expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One of the trials of a log: from its run_start (or its first record, for the first one) on."""

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
    """What one log says about one trial."""

    file: str
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    status: str | None
    """As run_stop gives it: success or aborted."""
    run_start_ms: int | None
    run_stop_ms: int | None
    has_target: bool
    """Something is to be reached; without a target no number of this log is a time to train."""
    has_random_rows: bool
    """The rows were random numbers, so that losses say nothing."""
    shape_of: str | None
    """Without a target: the benchmark that a step and an evaluation are as much work as."""
    minutes: float | None
    """From run_start to run_stop."""
    init_s: float | None
    """First init_start to init_stop, in seconds."""
    evaluations: tuple[Evaluation, ...]
    train_losses: tuple[tuple[float | None, float], ...]
    """(samples, loss) pairs."""
    target: float | None
    """Value to reach; None where none is logged and no official one known, or where there are several."""
    higher_is_better: bool
    """Whether a value at or above the target reaches it, as for an accuracy; a loss must be at or below."""
    eval_final: float | None
    samples_to_target: float | None
    """Of the first evaluation that reaches the target."""
    converged: bool
    """The last evaluation reaches the target; False without a target."""
    seed: int | None
    global_batch_size: int | None
    step_time_ms: Spread | None
    """Of an optimizer step: of each, where the log lists them, else means over the steps between two log lines of one training block.

    Where no record counts samples, what the run itself tracked."""
    step_times_ms: tuple[tuple[float, float], ...]
    """(samples, step time) of each measurement, in order."""
    eval_time_s: float | None
    """Median of eval_start to eval_stop, in seconds."""
    eval_times_s: tuple[float, ...]
    """Of each evaluation, in order."""
    throughput_samples_s: float | None
    """Samples trained on over the time spent training, evaluations apart."""
    num_gpus: int | None
    """As the log's SYSJSON record or num_ranks says; None where what they say is in doubt."""
    gpus_in_doubt: str
    """Why the SYSJSON record's number of GPUs is not believed; empty where it is, or where there is none."""
    tokens_s_gpu: float | None
    """Throughput times sequence length over num_gpus."""
    tflop_per_sample: float | None
    """Of the model, forward and backward, as the run worked it out (`bench.planning.flops`)."""
    tflops_gpu: float | None
    """Throughput times tflop_per_sample over num_gpus."""
    mfu: float | None
    """tflops_gpu over the peak that the log names: model FLOPs utilization, 0 to 1."""
    peak_memory_gib: PeakMemory | None
    system: dict[str, Any]
    """The log's SYSJSON record: what the system description of a submission is filled from; empty where there is none."""
    software: dict[str, str]
    """Versions by name, as the log's `software` record has them."""
    hyperparameters: dict[str, Any]
    """What the log says once of itself, submission and seed apart."""
    trials: tuple[Span, ...]
    """One for each run_start; an appended log has several, and then none of the numbers above belongs to a single one."""
    findings: tuple[Finding, ...]
    valid: bool
    """No finding is an error: the trial was completed and, where there is a target, reached it."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as strict JSON holds them, without NaN."""
        return asdict(self)


def parse(path: Path | str) -> Result:
    """Return what a log proves.

    Raises:
        LogError: the file cannot be opened; no content makes this fail.
    """
    return result(logs.read(path), str(path), reader.system(path))


def result(log: Log, file: str, system: dict[str, Any]) -> Result:
    """Return what the records of a log prove."""
    one = Log((), ()) if log.all(mllog.RUN_START)[1:] else log  # of several trials no number is the log's
    start, stop = one.single(mllog.RUN_START), one.single(mllog.RUN_STOP)
    reached = one.first_reached
    training, gbs = tuple(stretches(one.events)), log.integer(mllog.GLOBAL_BATCH_SIZE)
    timed = [stretch for stretch in training if stretch.time_ms > 0]
    between_lines = tuple((s.samples, s.time_ms * gbs / s.trained) for s in timed) if gbs and gbs > 0 else ()
    step_times = tuple(step_times_ms(one)) or between_lines
    throughput = _throughput(training) or _median(_tracked(one, "throughput"))
    doubt = _doubt(log, system)
    num_gpus = _num_gpus(log, {} if doubt else system)
    per_gpu = throughput / num_gpus if throughput and num_gpus else None
    tokens, eval_times = _sequence_length(log), eval_times_s(one.events)
    tflop_per_sample, tflops_gpu, mfu = _arithmetic(log, per_gpu)
    findings = compliance.judge(log)
    return Result(
        file=file,
        benchmark=log.text(mllog.SUBMISSION_BENCHMARK),
        division=log.text(mllog.SUBMISSION_DIVISION),
        org=log.text(mllog.SUBMISSION_ORG),
        platform=log.text(mllog.SUBMISSION_PLATFORM),
        status=_text(stop.metadata.get("status")) if stop else None,
        run_start_ms=start.time_ms if start else None,
        run_stop_ms=stop.time_ms if stop else None,
        has_target=log.has_target,
        has_random_rows=log.has_random_rows,
        shape_of=_shape_of(log),
        minutes=compliance.minutes(one),
        init_s=_init_s(one),
        evaluations=tuple(
            Evaluation(log.samples(e), e.value, e.line, e.time_ms, _text(e.metadata.get("metric")))
            for e in one.evaluations
        ),
        train_losses=tuple(_train_losses(one)),
        target=log.goals[0].value if len(log.goals) == 1 else None,
        higher_is_better=bool(log.goals) and log.goals[0].higher_is_better,
        eval_final=one.evaluations[-1].value if one.evaluations else None,
        samples_to_target=log.samples(reached) if reached else None,
        converged=one.converged,
        seed=log.integer(mllog.SEED),
        global_batch_size=gbs,
        step_time_ms=spread([time_ms for _, time_ms in step_times] or _tracked(one, "train_step_time", scale=1000)),
        step_times_ms=step_times,
        eval_time_s=_median(eval_times),
        eval_times_s=tuple(eval_times),
        throughput_samples_s=throughput,
        num_gpus=num_gpus,
        gpus_in_doubt=doubt,
        tokens_s_gpu=per_gpu * tokens if per_gpu and tokens else None,
        tflop_per_sample=tflop_per_sample,
        tflops_gpu=tflops_gpu,
        mfu=mfu,
        peak_memory_gib=_peak_memory(log),
        system=system,
        software=_software(log),
        hyperparameters=_hyperparameters(log),
        trials=tuple(_span(trial) for trial in log.trials()),
        findings=findings,
        valid=not errors(findings),
    )


def title(result: Result) -> str:
    """Return what was measured where, as a headline; a stand-in for a benchmark goes by the name of its task."""
    name = task_of_mark(result.platform) or result.benchmark or "training"
    return printable(f"{name} on {result.platform or 'a platform that is not logged'}")


def task_of_mark(platform: str | None) -> str | None:
    """Return the task in a platform's mark of what may not be submitted; None without the mark."""
    marked = _TASK_OF_MARK.search(platform or "")
    return marked[1] if marked else None


_TASK_OF_MARK = re.compile(r"\(([\w.-]{1,80}): (?:random weights, )?not a submission\)")
"""How a plan marks the platform of a task that may not be submitted: `laptop (lora_tiny: not a submission)`."""


def spread(values: Sequence[float]) -> Spread | None:
    """Return how values are distributed; None for none."""
    if not values:
        return None
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return Spread(median(values), tenths[0], tenths[8], fmean(values), len(values))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _init_s(log: Log) -> float | None:
    starts, stop = log.all(mllog.INIT_START), log.single(mllog.INIT_STOP)
    return (stop.time_ms - starts[0].time_ms) / 1000 if starts and stop and stop.time_ms >= starts[0].time_ms else None


def _train_losses(log: Log) -> Iterator[tuple[float | None, float]]:
    """Yield (samples, loss): a key of their own in some logs, where some write a blank behind it, a tracked statistic in others."""
    own = log.all(mllog.TRAIN_LOSS) or log.all(f"{mllog.TRAIN_LOSS} ")
    for event in own or log.all(mllog.TRACKED_STATS):
        loss = event.value
        if isinstance(loss, dict):
            loss = loss.get("train_loss", loss.get("reduced_train_loss"))
        if is_number(loss):
            yield number(event.metadata.get("samples_count")), loss


def _throughput(training: Sequence[Stretch]) -> float | None:
    time_ms = sum(stretch.time_ms for stretch in training)
    return sum(stretch.trained for stretch in training) / time_ms * 1000 if time_ms > 0 else None


def _tracked(log: Log, name: str, *, scale: float = 1) -> list[float]:
    """Return a statistic as the run itself tracked it: what is left where no record counts samples."""
    stats = (event.value.get(name) for event in log.all(mllog.TRACKED_STATS) if isinstance(event.value, dict))
    return [value * scale for value in stats if is_number(value) and value > 0]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _shape_of(log: Log) -> str | None:
    said = log.single(mllog.INITIAL_WEIGHTS)
    return _text(said.metadata.get("shape_of")) if said and not log.has_target else None


def _arithmetic(log: Log, samples_s_gpu: float | None) -> tuple[float | None, float | None, float | None]:
    """Return the TFLOP of a sample, TFLOP/s per GPU and their share of the peak, as far as the log says."""
    work, peak = number(log.value(mllog.MODEL_TFLOP_PER_SAMPLE)), number(log.value(mllog.ACCELERATOR_PEAK_TFLOPS))
    rate = samples_s_gpu * work if samples_s_gpu and work else None
    return work, rate, rate / peak if rate and peak and peak > 0 else None


def _peak_memory(log: Log) -> PeakMemory | None:
    said = log.value(mllog.PEAK_MEMORY)
    if not isinstance(said, dict) or (allocated := number(said.get("allocated"))) is None:
        return None
    return PeakMemory(
        allocated=allocated, reserved=number(said.get("reserved")), estimated=number(said.get("estimated"))
    )


def _num_gpus(log: Log, system: dict[str, Any]) -> int | None:
    """Return what the run script found, else the log's num_ranks. Ranks on CPUs are no GPUs."""
    nodes, per_node = (_count(system.get(name)) for name in ("number_of_nodes", "accelerators_per_node"))
    if nodes and per_node:
        return nodes * per_node
    ranks = None if log.value("accelerator") in (None, "cpu") else log.integer("num_ranks")
    return ranks if ranks and ranks > 0 else None


NO_DEVICES = "No devices were found"
"""What nvidia-smi, and with it a run script, says where it sees no GPU; the script then counts one."""


def _doubt(log: Log, system: dict[str, Any]) -> str:
    """Return why the run script's number of GPUs is not believed: it saw none, or the platform's name says another one.

    Some scripts describe one node of many, some all GPUs of a node of which a part is used. Names are like
    `8xDGX`, `1xXE7745x4H200-NVL-141GB`, `1xSR680aV3-8xH200_SXM` and `GX2560M7_H100_SXM_80GBx4`.
    """
    nodes, per_node = (_count(system.get(name)) for name in ("number_of_nodes", "accelerators_per_node"))
    if not nodes or not per_node:
        return ""
    if NO_DEVICES in str(system.get("accelerator_model_name")):
        return "the run script found no devices on its node"
    platform = log.text(mllog.SUBMISSION_PLATFORM) or ""
    for pattern, counted, what in ((_NODES_OF_NAME, nodes, "nodes"), (_GPUS_OF_NAME, per_node, "GPUs a node")):
        named = pattern.search(platform)
        if named and int(next(filter(None, named.groups()))) != counted:
            return f"the run script counted {counted} {what}, and the platform is called {printable(platform)[:60]}"
    return ""


_NODES_OF_NAME = re.compile(r"^(\d{1,6})x")
_GPUS_OF_NAME = re.compile(
    r"(?<=x)(\d{1,2})(?=[A-Z]{1,3}\d{2,4})|(?<=-)(\d{1,2})(?=x[A-Z]{1,3}\d{2,4})|(?<=x)(\d{1,2})$"
)


def _count(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and re.fullmatch(r"[0-9]{1,7}", text) else None


def _sequence_length(log: Log) -> float | None:
    logged = number(log.value("max_sequence_length"))
    known = log.benchmark.sequence_length if log.benchmark else None
    return logged if logged and logged > 0 else known


def _software(log: Log) -> dict[str, str]:
    said = log.value("software")
    return {str(name): str(version) for name, version in said.items()} if isinstance(said, dict) else {}


_SERIES = ("submission_", mllog.CACHE_CLEAR, mllog.SEED, mllog.TRACKED_STATS, mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS)


def _hyperparameters(log: Log) -> dict[str, Any]:
    """Return what is said once, or always alike, wherever it stands: some logs say it after run_start."""
    points = (key for key, found in log.by_key.items() if found[0].event_type == "POINT_IN_TIME")
    values = {key: log.value(key) for key in points if not key.startswith(_SERIES)}
    return {key: value for key, value in values.items() if is_number(value) or isinstance(value, str | bool)}


def _span(one: Log) -> Span:
    start, stops = one.all(mllog.RUN_START)[0], one.all(mllog.RUN_STOP)
    return Span(
        first_line=one.events[0].line,
        last_line=one.events[-1].line,
        run_start_ms=start.time_ms,
        run_stop_ms=stops[0].time_ms if stops else None,
        minutes=compliance.minutes(one),
        status=_text(stops[0].metadata.get("status")) if stops else None,
        seed=one.integer(mllog.SEED),
        eval_final=one.evaluations[-1].value if one.evaluations else None,
    )
