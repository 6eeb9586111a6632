"""Rows of a table of measurements: what was measured, its value, and a remark."""

from bench.mlperf.result import PeakMemory
from bench.mlperf.speed import Spread

Row = tuple[str, str, str]
"""What was measured, its value, and a remark."""
TRAINING_ONLY = "training only: loading, checkpoints and evaluations excluded"


def memory_row(peak: PeakMemory | None) -> Row:
    """Return what the fullest GPU held at most, beside the plan's estimate."""
    name = "peak memory (GiB)"
    if peak is None:
        return name, "", "not measured on GPUs"
    reserved = "" if peak.reserved is None else f"{peak.reserved:,.1f} reserved"
    estimated = "" if peak.estimated is None else f"the plan estimated {peak.estimated:,.1f}"
    return name, f"{peak.allocated:,.1f}", "; ".join(filter(None, ("fullest GPU", reserved, estimated)))


def spread_row(name: str, s: Spread | None, what: str) -> Row:
    if s is None:
        return name, "", "not timed"
    spread_text = f"median of {s.count} {what}s; p10 {s.p10:,.4g}, p90 {s.p90:,.4g}" if s.count > 1 else f"one {what}"
    return name, f"{s.median:,.1f}" if s.median >= 1000 else f"{s.median:,.4g}", spread_text


def measured_rows(*rows: tuple[str, float | None, str, str]) -> list[Row]:
    """Return the rows (name, number, its form, remark) whose number was measured."""
    return [(name, form.format(number), remark) for name, number, form, remark in rows if number is not None]


def value_text(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)
