"""The result of a kernels trial, from its log: every requested point, and the best ones compared with limits."""

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
from bench.results.measurement import BEST, NOTHING_MEASURED, SHARE_OF_PEAK, Measurement, of_telemetry

MIN_RUNS = 3
PER_UNIT = {"TFLOP/s": 1e12, "GB/s": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured point. Times are those of the slowest rank."""

    point: Point
    n: int
    """The number of timed runs; of a sustained point, the number of uninterrupted series of runs."""
    latency_us: float
    """The time of one call, as the median over the runs."""
    p10_us: float
    p90_us: float
    implementation: str
    """The kernel or algorithm that computed it; empty if unknown."""
    rank: int
    """The slowest rank."""

    @property
    def rate(self) -> float:
        """The work of the point divided by the median time, in the unit of the point."""
        return self.rate_at(self.latency_us)

    def rate_at(self, latency_us: float) -> float:
        return self.point.work / (latency_us / 1e6) / PER_UNIT[self.point.unit]

    @property
    def share_of_peak(self) -> float | None:
        return None if self.point.peak is None else self.rate / self.point.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best point of a kernel: a GEMM in one precision, a copy, a collective on a number of ranks, attention."""

    kernel: str
    measured: Measured
    reached: bool | None
    """Whether its rate is at least the limit minus the tolerance; None without a limit or tolerance."""

    @property
    def share_of_limit(self) -> float | None:
        limit = self.measured.point.limit
        return None if limit is None else self.measured.rate / limit


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsResult:
    """The result of a kernels trial."""

    result: Result
    measured: tuple[Measured, ...]
    missing: tuple[tuple[str, str], ...]
    """Name of each requested point that was not measured, with the reason."""
    bests: tuple[Best, ...]
    tolerance: float | None
    telemetry: Telemetry | None = None
    """GPU telemetry during the trial; None without it, as on CPUs."""

    @property
    def valid(self) -> bool:
        """Whether every requested point was measured, and no best rate missed its limit."""
        return self.result.valid and bool(self.measured) and not self.problems

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The best rate of each kernel, then rate, latency and share of the data sheet's peak of each point, then GPU
        telemetry."""
        return tuple(_measurements(self))

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from the planned trial."""
        measured = [one.point for one in self.measured]
        known = {name for name, _ in self.missing}
        points = required(plan, KernelsPlan).points
        others = [point.name for point in points if point not in measured and point.name not in known]
        return [
            *(f"{name} is missing in the log, or has other settings than in the plan" for name in others),
            *differing({"seed": (self.result.seed, trial.seed)}),
        ]

    @property
    def problems(self) -> list[str]:
        """Why the trial is not valid, in addition to the findings of the log."""
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
    return f"{100 * (best.share_of_limit or 0):.1f} % of the best known rate, {best.measured.point.limit:g}"


def _measurements(result: KernelsResult) -> Iterator[Measurement]:
    for best in result.bests:
        yield _rate(f"{BEST}{best.kernel}", best.measured)
    for one in result.measured:
        yield _rate(one.point.name, one)
        yield Measurement(
            name=f"{one.point.name} latency", unit="us", value=one.latency_us, n=one.n, p10=one.p10_us, p90=one.p90_us
        )
        if (share := one.share_of_peak) is not None:
            yield Measurement(name=f"{one.point.name}{SHARE_OF_PEAK}", unit="", value=share, n=one.n)
    if result.telemetry is not None:
        yield from of_telemetry(result.telemetry)


def _rate(name: str, one: Measured) -> Measurement:
    low, high = one.rate_at(one.p90_us), one.rate_at(one.p10_us)
    return Measurement(name=name, unit=one.point.unit, value=one.rate, n=one.n, p10=low, p90=high)


def read(log: Log, result: Result) -> KernelsResult:
    """Return the result of a kernels log."""
    request = log.single(mllog.KERNELS_REQUESTED)
    assert request is not None, "the kind of a log is identified by this record"
    names = [name for name in request.value if isinstance(name, str)] if isinstance(request.value, list) else []
    by_name = {one.point.name: one for one in map(_measured, log.all(mllog.KERNEL_MEASURED)) if one is not None}
    failures = [event for event in log.all(mllog.KERNEL_FAILED) if isinstance(event.value, str)]
    failed = {event.value: event.metadata.get("reason") for event in failures}
    measured = tuple(by_name[name] for name in names if name in by_name)
    tolerance = number(request.metadata.get("tolerance"))
    return KernelsResult(
        result=result,
        measured=measured,
        missing=tuple((name, str(failed.get(name) or "no record")) for name in names if name not in by_name),
        bests=tuple(_bests(measured, tolerance)),
        tolerance=tolerance,
        telemetry=telemetry.read(log),
    )


def _measured(event: Event) -> Measured | None:
    """Return the measurement of a record; None if the record is damaged."""
    m: dict[str, Any] = event.metadata
    raw_point = {field.name: m.get(field.name) for field in fields(Point)} | {"name": event.value}
    times = [number(m.get(key)) for key in ("median_us", "p10_us", "p90_us")]
    n, rank, implementation = m.get("n"), m.get("rank"), m.get("implementation")
    try:
        point = codec.typed(Point, raw_point)
        latency_us, p10_us, p90_us = (float(time_us or 0) for time_us in times)
    except (ValueError, TypeError, KeyError):
        return None
    is_sound = 0 < p10_us <= latency_us <= p90_us and isinstance(n, int) and n >= MIN_RUNS and point.unit in PER_UNIT
    if not is_sound or not isinstance(n, int) or not isinstance(rank, int) or not isinstance(implementation, str):
        return None
    return Measured(
        point=point,
        n=n,
        latency_us=latency_us,
        p10_us=p10_us,
        p90_us=p90_us,
        implementation=implementation,
        rank=rank,
    )


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
