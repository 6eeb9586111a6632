"""The measurements of a module profile: time by phase and part, GEMMs, communication, copies."""

from collections.abc import Iterator

from bench.contract.modules import ATTENTION, MLP, NOT_COMPUTED, TITLES, ModuleTimes, Part, Phase, TimeRow
from bench.mlperf.result import Result
from bench.results.measurement import Measurement

PHASES = (Phase.forward, Phase.backward, Phase.optimizer)
OVERLAPPED = {"communication": Part.communication, "copies": Part.copies}
"""Parts that may overlap with compute kernels, by the prefix of their measurements."""
GROUPS = {"attention": ("attention", ATTENTION), "mlp": ("MLP", MLP)}
"""Groups of parts: the name of the measurements, the title, and the parts."""
_SHOWN: dict[str, tuple[Part, ...]] = {
    **{part.name: (part,) for part in Part if part not in OVERLAPPED.values()},
    **{name: parts for name, (_, parts) in GROUPS.items()},
}
NAMES = (
    "profiled_step_time",
    *(f"{kind}_{phase}" for phase in PHASES for kind in ("time", "compute_time", "gemm_share")),
    *(f"time_{name}" for name in _SHOWN),
    *(f"time_{phase}_{name}" for phase in PHASES for name in _SHOWN),
    "gemm_share",
    *(f"{name}_{what}" for name in OVERLAPPED for what in ("total", "exposed", "share")),
)
"""The names of all measurements that a profile may have; parts that do not occur have none."""


def of_modules(times: ModuleTimes) -> Iterator[Measurement]:
    """Yield the measurements of a profile, in milliseconds per step and as shares of the step or a phase."""

    def measured(name: str, unit: str, value: float) -> Measurement:
        return Measurement(name=name, unit=unit, value=value, n=times.num_steps)

    yield measured("profiled_step_time", "ms", times.step_ms)
    for phase in PHASES:
        rows = [row for row in times.rows if row.phase is phase]
        yield measured(f"time_{phase}", "ms", sum(row.time_ms for row in rows))
        computed_ms = sum(row.time_ms for row in rows if row.part not in NOT_COMPUTED)
        yield measured(f"compute_time_{phase}", "ms", computed_ms)
    for name, parts in _SHOWN.items():
        of_parts = [row for row in times.rows if row.part in parts]
        if of_parts:
            yield measured(f"time_{name}", "ms", sum(row.time_ms for row in of_parts))
        for phase in PHASES:
            if in_phase := [row for row in of_parts if row.phase is phase]:
                yield measured(f"time_{phase}_{name}", "ms", sum(row.time_ms for row in in_phase))
    for name, unit, value in (*_shares(times), *_overlapped(times)):
        yield measured(name, unit, value)


def _shares(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield the share of GEMMs in the step and in each phase."""
    yield "gemm_share", "", sum(row.gemm_ms for row in times.rows) / times.step_ms
    for phase in PHASES:
        rows = [row for row in times.rows if row.phase is phase]
        total_ms = sum(row.time_ms for row in rows)
        if total_ms > 0:
            yield f"gemm_share_{phase}", "", sum(row.gemm_ms for row in rows) / total_ms


def _overlapped(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield the total and the exposed time of communication and of copies, and the share of the total in the step."""
    for name, part in OVERLAPPED.items():
        rows = [row for row in times.rows if row.part is part]
        total_ms = sum(row.busy_ms for row in rows)
        yield f"{name}_total", "ms", total_ms
        yield f"{name}_exposed", "ms", sum(row.time_ms for row in rows)
        yield f"{name}_share", "", total_ms / times.step_ms


COLUMNS = ("part", *(f"{phase} (ms)" for phase in PHASES), "all (ms)", "step (%)", "GEMM (ms)", "launches")
Line = tuple[str, ...]


def lines(times: ModuleTimes) -> list[Line]:
    """Return the table rows of each part, of each group below its last part, and of the whole step."""
    parts = [part for part in Part if any(row.part is part for row in times.rows)]
    shown = [line for part in parts for line in (_line(TITLES[part], (part,), times), *_group(part, parts, times))]
    return [*shown, _line("the whole step", tuple(Part), times)]


def _group(part: Part, occurring: list[Part], times: ModuleTimes) -> Iterator[Line]:
    """Yield the row of a group if the part is the last of several parts of the group that occur."""
    for title, parts in GROUPS.values():
        here = [one for one in occurring if one in parts]
        if len(here) > 1 and part is here[-1]:
            yield _line(f"{title}: total", parts, times)


def _line(title: str, parts: tuple[Part, ...], times: ModuleTimes) -> Line:
    """Return the table row of some parts; the total includes time outside the three phases."""
    rows = [row for row in times.rows if row.part in parts]
    by_phase = [[row for row in rows if row.phase is phase] for phase in PHASES]
    total_ms, gemm_ms = _time_ms(rows), sum(row.gemm_ms for row in rows)
    return (
        title,
        *(f"{_time_ms(of_phase):,.3f}" if of_phase else "" for of_phase in by_phase),
        f"{total_ms:,.3f}",
        f"{100 * total_ms / times.step_ms:.1f}",
        f"{gemm_ms:,.3f}" if gemm_ms else "",
        f"{sum(row.launches for row in rows):,.0f}",
    )


def _time_ms(rows: list[TimeRow]) -> float:
    return sum(row.time_ms for row in rows)


def notes(result: Result, times: ModuleTimes) -> list[str]:
    """Return notes on how the table was measured, and on the overhead of profiling."""
    texts = [f"Rank 0, mean over {times.num_steps} profiled warm-up steps. Overlapping kernels are not counted twice."]
    if times.device == "cpu":
        texts.append("On a CPU, the operations of the training thread are listed in place of kernels.")
    if times.is_eager:
        texts.append("The profiled steps ran without a CUDA graph, in which kernels cannot be attributed to modules.")
    if result.step_time_ms is not None:
        timed_ms = result.step_time_ms.median
        more = f"{100 * (times.step_ms / timed_ms - 1):+.1f} %"
        texts.append(
            f"Profiled step: {times.step_ms:,.1f} ms; timed step: {timed_ms:,.1f} ms (median); difference: {more}."
        )
    return texts
