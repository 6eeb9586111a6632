"""Compare training throughput with published systems, and project a time-to-train from it.

A projection is not a result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.contract.plan_kinds import training_plan
from bench.mlperf import published
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.rcp import rcp_record
from bench.mlperf.result import PeakMemory
from bench.mlperf.speed import Spread, spread
from bench.mlperf.system_tables import System
from bench.mlperf.telemetry import Telemetry, joined
from bench.report import tables
from bench.report.compare import best_of_each, model
from bench.report.sets import TrialSet
from bench.report.tables import TRAINING_ONLY, Row, measured_rows, memory_row, spread_row, telemetry_rows, value_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Measurements of the valid trials of a set; None for what their logs do not have."""

    num_runs: int
    shape_of: str | None
    """The benchmark whose steps and evaluations need as many FLOPs as the ones here."""
    num_gpus: int | None
    global_batch_size: int | None
    step_time_ms: Spread | None
    """Taken over all steps of all trials."""
    estimated_step_ms: float | None
    """The estimate of the plan's cost model."""
    eval_time_s: Spread | None
    samples_s: float | None
    """Samples / time spent training; this and the rates derived from it are medians over the trials."""
    tokens_s_gpu: float | None
    real_tokens_s_gpu: float | None
    """Without padding; None if there is no padding."""
    steps_time_s: float | None
    """Of all steps of a trial."""
    epoch_time_s: float | None
    """Mean over a trial's epochs."""
    train_loss: float | None
    """The last one of a trial; None for random data."""
    tflop_per_sample: float | None
    tflops_gpu: float | None
    mfu: float | None
    mfu_counts: str
    peak_memory_gib: PeakMemory | None
    """The highest of all trials."""
    telemetry: Telemetry | None
    """GPU telemetry over all trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Projected minutes of a run at this speed that needs as many samples as the reference does on average."""

    minutes: float
    samples: float
    num_evaluations: float
    """An average, so it need not be a whole number."""
    formula: str
    label: str
    """The label that must be printed next to the minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One row of the table that compares this set with published systems."""

    name: str
    accelerator: str
    global_batch_size: int
    step_time_ms: float
    """Time spent training, without evaluations, divided by the number of steps."""
    samples_s: float
    tokens_s_gpu: float
    tflops_gpu: float | None
    """Computed with this set's TFLOP per sample."""
    official_minutes: float | None
    """None for this set."""
    ratio: float
    """This system's time per sample divided by this set's: above 1 is slower than this set."""
    ours: bool = False


def measure(trials: TrialSet) -> Throughput:
    """Return the measurements of the valid trials of a set."""
    valid, gpus = [r for r in trials.results if r.valid], trials.num_gpus
    peaks = [r.peak_memory_gib for r in valid if r.peak_memory_gib]
    shapes = {r.shape_of for r in valid}
    trained = None if trials.plan is None else training_plan(trials.plan)
    cost = None if trained is None else trained.cost
    return Throughput(
        num_runs=len(valid),
        shape_of=shapes.pop() if len(shapes) == 1 else None,
        num_gpus=gpus,
        global_batch_size=trials.score.global_batch_size,
        step_time_ms=spread([time_ms for r in valid for _, time_ms in r.step_times_ms]),
        estimated_step_ms=1000 * cost.step_s if cost else None,
        eval_time_s=spread([time_s for r in valid for time_s in r.eval_times_s]),
        samples_s=_median(r.throughput_samples_s for r in valid),
        tokens_s_gpu=_median(r.tokens_s_gpu for r in valid if gpus),
        real_tokens_s_gpu=_median(r.real_tokens_s_gpu for r in valid if gpus and (r.real_token_share or 1) < 1),
        steps_time_s=_median(r.steps_time_s for r in valid),
        epoch_time_s=_median(fmean(r.epoch_times_s) for r in valid if r.epoch_times_s),
        train_loss=_median(r.train_loss for r in valid),
        tflop_per_sample=_median(r.tflop_per_sample for r in valid),
        tflops_gpu=_median(r.tflops_gpu for r in valid if gpus),
        mfu=_median(r.mfu for r in valid if gpus),
        mfu_counts=next((r.mfu_counts for r in valid if r.mfu), ""),
        peak_memory_gib=max(peaks, key=lambda peak: peak.allocated, default=None),
        telemetry=joined([r.telemetry for r in valid if r.telemetry]),
    )


def project(measured: Throughput, *, ruleset: str) -> tuple[Projection | None, str]:
    """Return the projection, or None and why there is none.

    Minutes are (mean samples of the reference x seconds per sample + evaluations x seconds of one) / 60. The rules'
    schedule gives the number of evaluations. Run-to-run variation and the RCP factor are left out, since the mean is
    that of the reference.
    """
    m = measured
    if not m.num_runs:
        return None, _NO_TRIAL
    if m.shape_of is None or m.global_batch_size is None:
        return None, "the model or the evaluation differs from every benchmark's"
    if not m.samples_s or m.eval_time_s is None:
        return None, "no valid trial with step times and an evaluation time"
    point = rcp_record(m.shape_of, m.global_batch_size, ruleset)
    due = BENCHMARKS[m.shape_of].schedule if m.shape_of in BENCHMARKS else None
    if point is None or due is None:
        return (
            None,
            f"{m.shape_of} has no reference convergence point at batch size {m.global_batch_size} in ruleset {ruleset}",
        )
    first, every = due.first(m.global_batch_size), due.interval(m.global_batch_size)
    count = 1 + max(0.0, point.mean - first) / every
    minutes = (point.mean / m.samples_s + count * m.eval_time_s.median) / 60
    between = ", interpolated" if point.interpolated else ""
    return Projection(
        minutes=minutes,
        samples=point.mean,
        num_evaluations=count,
        formula=f"({point.mean:,.1f} samples x {1 / m.samples_s:.4g} s + "
        f"{count:.2f} evaluations x {m.eval_time_s.median:.4g} s) / 60",
        label=f"projection from {point.mean:,.0f} samples "
        f"(reference mean at batch size {m.global_batch_size}{between}), not a result",
    ), ""


def published_speeds(trials: TrialSet, measured: Throughput) -> tuple[tuple[Speed, ...], str]:
    """Return published systems with as many GPUs and this set, fastest first, or the reason why there are none.

    Published systems have the same accelerator; if there are none, the best system of each accelerator is taken.
    """
    m, own = measured, model(trials.accelerator)
    if not m.num_runs:
        return (), _NO_TRIAL
    if m.shape_of is None:
        return (), "the model differs from every published benchmark's"
    if m.num_gpus is None or not m.samples_s or not m.global_batch_size:
        return (), _why_no_rate(m, "batch size")
    same = [
        s for s in published.systems(m.shape_of) if s.num_gpus == m.num_gpus and s.step_time_s and s.global_batch_size
    ]
    if not same:
        return (), f"no published system of {m.shape_of} has {m.num_gpus} GPUs and a published step time"
    ranked = sorted(same, key=lambda s: s.official_minutes)
    near = [s for s in ranked if own and model(s.accelerator) == own] or best_of_each(ranked)
    lines = [_published(system, m) for system in near]
    lines.append(_speed(f"{trials.name}{_weights(trials)}", own, m.global_batch_size, m.samples_s, m, ours=True))
    return tuple(sorted(lines, key=lambda line: -line.samples_s)), ""


def _weights(trials: TrialSet) -> str:
    return " (random weights)" if any(r.has_random_rows for r in trials.results) else ""


def _published(system: System, m: Throughput) -> Speed:
    assert system.step_time_s and system.global_batch_size
    samples_s = system.global_batch_size / system.step_time_s
    accelerator = model(system.accelerator) or system.accelerator
    return _speed(
        system.name, accelerator, system.global_batch_size, samples_s, m, official_minutes=system.official_minutes
    )


def _speed(
    name: str,
    accelerator: str,
    gbs: int,
    samples_s: float,
    m: Throughput,
    *,
    official_minutes: float | None = None,
    ours: bool = False,
) -> Speed:
    assert m.samples_s and m.num_gpus and m.shape_of
    per_gpu = samples_s / m.num_gpus
    return Speed(
        name=name,
        accelerator=accelerator,
        global_batch_size=gbs,
        step_time_ms=1000 * gbs / samples_s,
        samples_s=samples_s,
        tokens_s_gpu=per_gpu * (BENCHMARKS[m.shape_of].sequence_length or 0),
        tflops_gpu=per_gpu * m.tflop_per_sample if m.tflop_per_sample else None,
        official_minutes=official_minutes,
        ratio=m.samples_s / samples_s,
        ours=ours,
    )


def rows(measured: Throughput, projection: Projection | None, why_not: str) -> list[Row]:
    """Return the measurements as rows; what was not measured is blank with its reason."""
    m = measured
    mfu = 100 * m.mfu if m.mfu else None
    estimate = (
        [("estimated step time (ms)", f"{m.estimated_step_ms:,.0f}", "from the plan")] if m.estimated_step_ms else []
    )
    return [
        spread_row("median step time (ms)", m.step_time_ms, "step"),
        *estimate,
        *measured_rows(
            ("total step time (s)", m.steps_time_s, "{:,.1f}", TRAINING_ONLY),
            ("time per epoch (s)", m.epoch_time_s, "{:,.1f}", f"mean over epochs; {TRAINING_ONLY}"),
        ),
        ("samples/s", value_text(m.samples_s, "{:,.3f}"), "samples / time spent training" if m.num_runs else _NO_TRIAL),
        _rate_row(m, "tokens/s/GPU", m.tokens_s_gpu, "{:,.0f}", unlogged="sequence length"),
        *measured_rows(("tokens/s/GPU without padding", m.real_tokens_s_gpu, "{:,.0f}", "padding tokens not counted")),
        _rate_row(m, "TFLOP/s/GPU", m.tflops_gpu, "{:,.1f}", unlogged="TFLOP per sample"),
        (
            "TFLOP per sample",
            value_text(m.tflop_per_sample, "{:,.5g}"),
            "model FLOPs, forward and backward, without recomputation" if m.tflop_per_sample else _why_no_flops(m),
        ),
        ("MFU (%)", value_text(mfu, "{:.1f}"), m.mfu_counts if mfu else _why_no_rate(m, "peak rate of the GPUs")),
        memory_row(m.peak_memory_gib, "" if m.num_runs else _NO_TRIAL),
        *telemetry_rows(m.telemetry),
        spread_row("evaluation (s)", m.eval_time_s, "evaluation"),
        *measured_rows(("last training loss", m.train_loss, "{:.4f}", "")),
        ("projected minutes", "", f"none: {why_not}")
        if projection is None
        else ("projected minutes", f"{projection.minutes:.2f}", f"{projection.label}; {projection.formula}"),
    ]


_NO_TRIAL = "no valid trial"


def _why_no_rate(m: Throughput, unlogged: str) -> str:
    """Return why there is no rate per GPU; if everything else is there, the logs do not have `unlogged`."""
    if not m.num_runs:
        return _NO_TRIAL
    if m.num_gpus is None:
        return "not measured on GPUs, or the logs have no GPU count (set --num-gpus N)"
    return f"no {unlogged} in the logs" if m.samples_s else "no step times"


def _why_no_flops(m: Throughput) -> str:
    return "not in the logs" if m.num_runs else _NO_TRIAL


def _rate_row(m: Throughput, name: str, rate: float | None, form: str, *, unlogged: str) -> Row:
    return name, value_text(rate, form), "" if rate else _why_no_rate(m, unlogged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The throughput of a set, its projection, and the published systems it is compared with."""

    measured: Throughput
    projection: Projection | None
    rows: Sequence[Row]
    lines: Sequence[Speed]
    no_peers: str
    """Why there are no published systems to compare with."""


def compared(trials: TrialSet) -> Compared:
    """Return the throughput part of the report of a set without a target."""
    measured = measure(trials)
    projection, why_not = project(measured, ruleset=trials.score.ruleset)
    lines, no_peers = published_speeds(trials, measured)
    table = [*rows(measured, projection, why_not), *tables.set_rows(trials.results)]
    return Compared(measured=measured, projection=projection, rows=table, lines=lines, no_peers=no_peers)


RATIO = (
    "Mean step time: time spent training / steps. Ratio: time per sample / this set's; above 1 is slower than this set."
)


def _median(numbers: Iterable[float | None]) -> float | None:
    known: Sequence[float] = [number for number in numbers if number is not None]
    return median(known) if known else None
