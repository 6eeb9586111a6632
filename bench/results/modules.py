"""The measurements of a module profile: time by phase and part, GEMMs, communication, copies."""

from collections.abc import Iterator, Sequence

from bench.contract.modules import ATTENTION, MLP, NOT_COMPUTED, TITLES, ModuleTimes, Part, Phase, TimeRow
from bench.mlperf.result import Result
from bench.results.measurement import Measurement

PHASES = (Phase.forward, Phase.backward, Phase.recomputation, Phase.optimizer)
WITH_RECOMPUTATION = "backward_with_recomputation"
"""The backward phase as the published tables count it: with the forward passes that run again inside it."""
_TOTALS: dict[str, tuple[Phase, ...]] = {
    **{phase.name: (phase,) for phase in PHASES},
    WITH_RECOMPUTATION: (Phase.backward, Phase.recomputation),
}
"""The phases of each total, by the end of the names of its measurements."""
OVERLAPPED = {"communication": Part.communication, "copies": Part.copies}
"""Parts that may overlap with compute kernels, by the prefix of their measurements."""
GROUPS = {"attention": ("attention", ATTENTION), "mlp": ("MLP", MLP)}
"""Groups of parts: the name of the measurements, the title, and the parts."""
ATTENTION_MODULE = (Part.qkv, Part.rope, *ATTENTION, Part.output, Part.adapters)
"""The parts of a layer's self-attention module, from the QKV to the output projection, with their adapters."""
_SHOWN: dict[str, tuple[Part, ...]] = {
    **{part.name: (part,) for part in Part if part not in OVERLAPPED.values()},
    **{name: parts for name, (_, parts) in GROUPS.items()},
}
NAMES = (
    "profiled_step_time",
    *(f"{kind}_{total}" for total in _TOTALS for kind in ("time", "compute_time", "relative_time", "gemm_share")),
    *(f"time_{name}" for name in _SHOWN),
    *(f"time_{phase}_{name}" for phase in PHASES for name in _SHOWN),
    *(f"relative_time_{phase}_{name}" for phase in PHASES for name in (*_SHOWN, *OVERLAPPED)),
    *(f"attention_module_{phase}" for phase in PHASES),
    "gemm_share",
    *(f"{name}_{what}" for name in OVERLAPPED for what in ("total", "exposed", "share")),
)
"""The names of all measurements that a profile may have; parts that do not occur have none."""


def of_modules(times: ModuleTimes) -> Iterator[Measurement]:
    """Yield the measurements of a profile, in milliseconds per step and as shares of the step or a phase."""

    def measured(name: str, unit: str, value: float) -> Measurement:
        return Measurement(name=name, unit=unit, value=value, n=times.num_steps)

    yield measured("profiled_step_time", "ms", times.step_ms)
    for total, rows in _rows_of_totals(times):
        yield measured(f"time_{total}", "ms", _time_ms(rows))
        computed_ms = sum(row.time_ms for row in rows if row.part not in NOT_COMPUTED)
        yield measured(f"compute_time_{total}", "ms", computed_ms)
    for name, parts in _SHOWN.items():
        of_parts = [row for row in times.rows if row.part in parts]
        if of_parts:
            yield measured(f"time_{name}", "ms", sum(row.time_ms for row in of_parts))
        for phase in PHASES:
            if in_phase := [row for row in of_parts if row.phase is phase]:
                yield measured(f"time_{phase}_{name}", "ms", sum(row.time_ms for row in in_phase))
    for name, unit, value in (*_shares(times), *_overlapped(times), *_attention_module(times)):
        yield measured(name, unit, value)


def _rows_of_totals(times: ModuleTimes) -> Iterator[tuple[str, list[TimeRow]]]:
    """Yield the rows of each total; a step without recomputation has no total of it."""
    for total, phases in _TOTALS.items():
        rows = [row for row in times.rows if row.phase in phases]
        if rows or phases != (Phase.recomputation,):
            yield total, rows


def _shares(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield the share of GEMMs in the step and in each total, of each total in the step, and of parts in a phase."""
    yield "gemm_share", "", sum(row.gemm_ms for row in times.rows) / times.step_ms
    for total, rows in _rows_of_totals(times):
        yield f"relative_time_{total}", "", _time_ms(rows) / times.step_ms
        if (total_ms := _time_ms(rows)) > 0:
            yield f"gemm_share_{total}", "", sum(row.gemm_ms for row in rows) / total_ms
    for phase in PHASES:
        rows = [row for row in times.rows if row.phase is phase]
        phase_ms = _time_ms(rows)
        for name, parts in (_SHOWN | {name: (part,) for name, part in OVERLAPPED.items()}).items():
            of_parts = [row for row in rows if row.part in parts]
            if of_parts and phase_ms > 0:
                yield f"relative_time_{phase}_{name}", "", _time_ms(of_parts) / phase_ms


def _attention_module(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield the time of the self-attention module of one layer in each phase."""
    for phase in PHASES:
        rows = [row for row in times.rows if row.phase is phase and row.part in ATTENTION_MODULE]
        if rows and times.num_layers:
            yield f"attention_module_{phase}", "ms", _time_ms(rows) / times.num_layers


def _overlapped(times: ModuleTimes) -> Iterator[tuple[str, str, float]]:
    """Yield the total and the exposed time of communication and of copies, and the share of the total in the step."""
    for name, part in OVERLAPPED.items():
        rows = [row for row in times.rows if row.part is part]
        total_ms = sum(row.busy_ms for row in rows)
        yield f"{name}_total", "ms", total_ms
        yield f"{name}_exposed", "ms", sum(row.time_ms for row in rows)
        yield f"{name}_share", "", total_ms / times.step_ms


Line = tuple[str, ...]


def phases(times: ModuleTimes) -> list[Phase]:
    """Return the phases to show; recomputation only if there is any."""
    return [phase for phase in PHASES if phase is not Phase.recomputation or any(r.phase is phase for r in times.rows)]


def columns(times: ModuleTimes) -> Line:
    """Return the headings of the table."""
    return "part", *(f"{phase} (ms)" for phase in phases(times)), "all (ms)", "step (%)", "GEMM (ms)", "launches"


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
    """Return the table row of some parts; the total includes time outside of all phases."""
    rows = [row for row in times.rows if row.part in parts]
    by_phase = [[row for row in rows if row.phase is phase] for phase in phases(times)]
    total_ms, gemm_ms = _time_ms(rows), sum(row.gemm_ms for row in rows)
    return (
        title,
        *(f"{_time_ms(of_phase):,.3f}" if of_phase else "" for of_phase in by_phase),
        f"{total_ms:,.3f}",
        f"{100 * total_ms / times.step_ms:.1f}",
        f"{gemm_ms:,.3f}" if gemm_ms else "",
        f"{sum(row.launches for row in rows):,.0f}",
    )


def _time_ms(rows: Sequence[TimeRow]) -> float:
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
