"""What a trial of a kernels task measured, from its log alone: every point asked for, and the best beside limits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bench.contract import codec, mllog
from bench.contract.kernels import Point
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import KernelsPlan, required
from bench.mlperf import telemetry
from bench.mlperf.log import Log, number
from bench.mlperf.reader import Event
from bench.mlperf.result import Result, differing
from bench.mlperf.telemetry import Telemetry
from bench.results.measurement import BEST, NOTHING_MEASURED, Measurement, of_telemetry

MIN_RUNS = 3
PER_UNIT = {"TFLOP/s": 1e12, "GB/s": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One point that was measured. Times are those of the slowest rank."""

    point: Point
    n: int
    """Runs; of a sustained point, stretches of runs without a pause."""
    latency_us: float
    """Of one call, the median over the runs."""
    p10_us: float
    p90_us: float
    ran: str
    """What computed it: a kernel, an algorithm; empty where nothing says."""
    rank: int
    """The slowest one, whose times these are."""

    @property
    def rate(self) -> float:
        """The point's work over the median time, in the unit of the point."""
        return self.rate_at(self.latency_us)

    def rate_at(self, latency_us: float) -> float:
        return self.point.work / (latency_us / 1e6) / PER_UNIT[self.point.unit]

    @property
    def share_of_peak(self) -> float | None:
        return None if self.point.peak is None else self.rate / self.point.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best point of a kernel: a GEMM in one precision, a way to copy, a collective of so many ranks, attention."""

    kernel: str
    measured: Measured
    reached: bool | None
    """Whether it is no further below the limit than the tolerance; None without one of them."""

    @property
    def share_of_limit(self) -> float | None:
        limit = self.measured.point.limit
        return None if limit is None else self.measured.rate / limit


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsResult:
    """What the log says of the points that were asked for."""

    result: Result
    measured: tuple[Measured, ...]
    missing: tuple[tuple[str, str], ...]
    """Name of each point that was asked for and not measured, and why."""
    bests: tuple[Best, ...]
    tolerance: float | None
    telemetry: Telemetry | None = None
    """What the GPUs did meanwhile; None where nobody looked, as on CPUs."""

    @property
    def valid(self) -> bool:
        """Whether everything was measured, and nothing missed its limit."""
        return self.result.valid and bool(self.measured) and not self.problems

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The best rate of each kernel, then rate and latency of each point, then what the GPUs did meanwhile."""
        return tuple(_measurements(self))

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from the planned trial."""
        measured = [one.point for one in self.measured]
        known = {name for name, _ in self.missing}
        points = required(plan, KernelsPlan).points
        others = [point.name for point in points if point not in measured and point.name not in known]
        return [
            *(f"{name} is not measured as planned" for name in others),
            *differing({"seed": (self.result.seed, trial.seed)}),
        ]

    @property
    def problems(self) -> list[str]:
        """What keeps the log from proving that the task was done."""
        below = [best for best in self.bests if best.reached is False]
        return [
            *([] if self.measured or self.missing else [NOTHING_MEASURED]),
            *(f"{name} was not measured: {why}" for name, why in self.missing),
            *(
                f"{best.kernel} reaches {best.measured.rate:,.4g} {best.measured.point.unit}, {_share(best)}"
                for best in below
            ),
        ]


def _share(best: Best) -> str:
    return f"{100 * (best.share_of_limit or 0):.1f} % of the best rate known, {best.measured.point.limit:g}"


def _measurements(result: KernelsResult) -> Iterator[Measurement]:
    for best in result.bests:
        yield _rate(f"{BEST}{best.kernel}", best.measured)
    for one in result.measured:
        yield _rate(one.point.name, one)
        yield Measurement(
            name=f"{one.point.name} latency", unit="us", value=one.latency_us, n=one.n, p10=one.p10_us, p90=one.p90_us
        )
    if result.telemetry is not None:
        yield from of_telemetry(result.telemetry)


def _rate(name: str, one: Measured) -> Measurement:
    low, high = one.rate_at(one.p90_us), one.rate_at(one.p10_us)
    return Measurement(name=name, unit=one.point.unit, value=one.rate, n=one.n, p10=low, p90=high)


def read(log: Log, result: Result) -> KernelsResult:
    """Return what the log of such a task says."""
    asked = log.single(mllog.KERNELS_ASKED)
    assert asked is not None, "the table of kinds knows the log by this record"
    names = [name for name in asked.value if isinstance(name, str)] if isinstance(asked.value, list) else []
    found = {one.point.name: one for one in map(_measured, log.all(mllog.KERNEL_MEASURED)) if one is not None}
    failures = [event for event in log.all(mllog.KERNEL_FAILED) if isinstance(event.value, str)]
    failed = {event.value: event.metadata.get("reason") for event in failures}
    measured = tuple(found[name] for name in names if name in found)
    tolerance = number(asked.metadata.get("tolerance"))
    return KernelsResult(
        result=result,
        measured=measured,
        missing=tuple((name, str(failed.get(name) or "no record")) for name in names if name not in found),
        bests=tuple(_bests(measured, tolerance)),
        tolerance=tolerance,
        telemetry=telemetry.of(log),
    )


def _measured(event: Event) -> Measured | None:
    """Return the measurement of a record; None for one that is damaged."""
    m: dict[str, Any] = event.metadata
    wanted = {field.name: m.get(field.name) for field in fields(Point)} | {"name": event.value}
    times = [number(m.get(key)) for key in ("median_us", "p10_us", "p90_us")]
    n, rank, ran = m.get("n"), m.get("rank"), m.get("ran")
    try:
        point = codec.typed(Point, wanted)
        latency_us, p10_us, p90_us = (float(time_us or 0) for time_us in times)
    except (ValueError, TypeError, KeyError):
        return None
    is_sound = 0 < p10_us <= latency_us <= p90_us and isinstance(n, int) and n >= MIN_RUNS and point.unit in PER_UNIT
    if not is_sound or not isinstance(n, int) or not isinstance(rank, int) or not isinstance(ran, str):
        return None
    return Measured(point=point, n=n, latency_us=latency_us, p10_us=p10_us, p90_us=p90_us, ran=ran, rank=rank)


def _bests(measured: Sequence[Measured], tolerance: float | None) -> Iterator[Best]:
    by_kernel: dict[str, list[Measured]] = {}
    for one in measured:
        by_kernel.setdefault(one.point.kernel, []).append(one)
    for name, points in by_kernel.items():
        best = max(points, key=lambda one: one.rate)
        limit, reached = best.point.limit, None
        if limit is not None and tolerance is not None:
            reached = best.rate >= (1 - tolerance) * limit
        yield Best(kernel=name, measured=best, reached=reached)
