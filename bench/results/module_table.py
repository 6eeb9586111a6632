"""The table of a profile of modules, for a terminal and for a page: one line per part, which add up to the step."""

from collections.abc import Iterator

from bench.contract.modules import TITLES, ModuleTimes, Part, TimeRow
from bench.mlperf.result import Result
from bench.results.modules import GROUPS, PHASES

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
