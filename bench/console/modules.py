"""Show where the time of a profiled step went."""

from bench.console.sheet import Sheet
from bench.contract.modules import MLP, TITLES, ModuleTimes, Part, TimeRow
from bench.mlperf.result import Result
from bench.results.modules import PHASES

COLUMNS = ("part", *(f"{phase} (ms)" for phase in PHASES), "all (ms)", "step (%)", "GEMM (ms)", "launches")


def sheet(result: Result, times: ModuleTimes) -> Sheet:
    """Return one line per part, of the profile in a trial's log."""
    found = [part for part in Part if any(row.part is part for row in times.rows)]
    lines = [_line(TITLES[part], [row for row in times.rows if row.part is part], times) for part in found]
    place = 1 + max((number for number, part in enumerate(found) if part in MLP), default=-1)
    if place:
        lines.insert(place, _line("MLP: all of it", [row for row in times.rows if row.part in MLP], times))
    lines.append(_line("the whole step", times.rows, times))
    title = f"where the time of a step goes: {result.file}"
    return Sheet(title, lines, columns=COLUMNS, caption=_caption(result, times), num_optional=2)


def _line(title: str, rows: list[TimeRow], times: ModuleTimes) -> tuple[str, ...]:
    """Return the cells of some rows; what lies outside of the three phases is part of all."""
    by_phase = [[row for row in rows if row.phase is phase] for phase in PHASES]
    total_ms, gemm_ms = sum(row.time_ms for row in rows), sum(row.gemm_ms for row in rows)
    return (
        title,
        *(f"{sum(row.time_ms for row in found):,.3f}" if found else "" for found in by_phase),
        f"{total_ms:,.3f}",
        f"{100 * total_ms / times.step_ms:.1f}",
        f"{gemm_ms:,.3f}" if gemm_ms else "",
        f"{sum(row.launches for row in rows):,.0f}",
    )


def _caption(result: Result, times: ModuleTimes) -> str:
    """Return how the table was measured, and how far the profiled steps are from the timed ones."""
    lines = [f"Rank 0, mean of {times.num_steps} profiled warm-up steps; each moment counts once."]
    if times.device == "cpu":
        lines.append("On a CPU the operations of the thread that trains stand for kernels.")
    if times.is_eager:
        lines.append("The host launched every kernel: those of the run's CUDA graph cannot be told apart.")
    if result.step_time_ms is not None:
        timed_ms = result.step_time_ms.median
        more = f"{100 * (times.step_ms / timed_ms - 1):+.1f} %"
        lines.append(f"A profiled step took {times.step_ms:,.1f} ms, a timed one {timed_ms:,.1f} (median): {more}.")
    return "\n".join(lines)
