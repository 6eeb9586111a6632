"""The measurements of a profile of modules: time by phase and by part, matrix products, communication, copies."""

from collections.abc import Iterator

from bench.contract.modules import ATTENTION, MLP, NOT_COMPUTED, TITLES, ModuleTimes, Part, Phase, TimeRow
from bench.mlperf.result import Result
from bench.results.measurement import Measurement

PHASES = (Phase.forward, Phase.backward, Phase.optimizer)
OVERLAPPED = {"communication": Part.communication, "copies": Part.copies}
"""What may run beside kernels that compute: how its measurements are called."""
GROUPS = {"attention": ("attention", ATTENTION), "mlp": ("MLP", MLP)}
"""Parts that are measured together, too: the name of their measurements, their title, and which they are."""
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
"""Of all measurements that a profile may have; it has none of a part that does not occur."""


def of_modules(times: ModuleTimes) -> Iterator[Measurement]:
    """Yield what a profile measured, in milliseconds a step and in shares of the step or of a phase."""

    def measured(name: str, unit: str, value: float) -> Measurement:
        return Measurement(name=name, unit=unit, value=value, n=times.num_steps)

    yield measured("profiled_step_time", "ms", times.step_ms)
    for phase in PHASES:
        rows = [row for row in times.rows if row.phase is phase]
        yield measured(f"time_{phase}", "ms", sum(row.time_ms for row in rows))
        computed_ms = sum(row.time_ms for row in rows if row.part not in NOT_COMPUTED)
        yield measured(f"compute_time_{phase}", "ms", computed_ms)
    for name, parts in _SHOWN.items():
        found = [row for row in times.rows if row.part in parts]
        if found:
            yield measured(f"time_{name}", "ms", sum(row.time_ms for row in found))
        for phase in PHASES:
            if in_phase := [row for row in found if row.phase is phase]:
                yield measured(f"time_{phase}_{name}", "ms", sum(row.time_ms for row in in_phase))
    for name, unit, value in (*_shares(times), *_overlapped(times)):
        yield measured(name, unit, value)


def _shares(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield which share of the step, and of each phase, is matrix products."""
    yield "gemm_share", "", sum(row.gemm_ms for row in times.rows) / times.step_ms
    for phase in PHASES:
        rows = [row for row in times.rows if row.phase is phase]
        total_ms = sum(row.time_ms for row in rows)
        if total_ms > 0:
            yield f"gemm_share_{phase}", "", sum(row.gemm_ms for row in rows) / total_ms


def _overlapped(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield all time of communication and of copies, what of it nothing hides, and the share of all of it in a step."""
    for name, part in OVERLAPPED.items():
        rows = [row for row in times.rows if row.part is part]
        total_ms = sum(row.busy_ms for row in rows)
        yield f"{name}_total", "ms", total_ms
        yield f"{name}_exposed", "ms", sum(row.time_ms for row in rows)
        yield f"{name}_share", "", total_ms / times.step_ms


COLUMNS = ("part", *(f"{phase} (ms)" for phase in PHASES), "all (ms)", "step (%)", "GEMM (ms)", "launches")
Line = tuple[str, ...]


def lines(times: ModuleTimes) -> list[Line]:
    """Return the cells of each part, of groups of parts below their last one, and of the whole step."""
    found = [part for part in Part if any(row.part is part for row in times.rows)]
    shown = [line for part in found for line in (_line(TITLES[part], (part,), times), *_group(part, found, times))]
    return [*shown, _line("the whole step", tuple(Part), times)]


def _group(part: Part, found: list[Part], times: ModuleTimes) -> Iterator[Line]:
    """Yield the line of a group, if the part is the last one of several that it has here."""
    for title, parts in GROUPS.values():
        here = [one for one in found if one in parts]
        if len(here) > 1 and part is here[-1]:
            yield _line(f"{title}: all of it", parts, times)


def _line(title: str, parts: tuple[Part, ...], times: ModuleTimes) -> Line:
    """Return the cells of some parts; what lies outside of the three phases is part of all."""
    rows = [row for row in times.rows if row.part in parts]
    by_phase = [[row for row in rows if row.phase is phase] for phase in PHASES]
    total_ms, gemm_ms = _time_ms(rows), sum(row.gemm_ms for row in rows)
    return (
        title,
        *(f"{_time_ms(found):,.3f}" if found else "" for found in by_phase),
        f"{total_ms:,.3f}",
        f"{100 * total_ms / times.step_ms:.1f}",
        f"{gemm_ms:,.3f}" if gemm_ms else "",
        f"{sum(row.launches for row in rows):,.0f}",
    )


def _time_ms(rows: list[TimeRow]) -> float:
    return sum(row.time_ms for row in rows)


def notes(result: Result, times: ModuleTimes) -> list[str]:
    """Return how the table was measured, and how far the profiled steps are from the timed ones."""
    said = [f"Rank 0, mean of {times.num_steps} profiled warm-up steps; each moment counts once."]
    if times.device == "cpu":
        said.append("On a CPU the operations of the thread that trains stand for kernels.")
    if times.is_eager:
        said.append("The host launched every kernel: those of the run's CUDA graph cannot be told apart.")
    if result.step_time_ms is not None:
        timed_ms = result.step_time_ms.median
        more = f"{100 * (times.step_ms / timed_ms - 1):+.1f} %"
        said.append(f"A profiled step took {times.step_ms:,.1f} ms, a timed one {timed_ms:,.1f} (median): {more}.")
    return said
