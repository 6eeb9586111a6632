"""Tables of `runstop plan --scale`."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.prediction.scale import LEAST_GAIN, Point, Range, Scaling, StackName
from bench.report.tables import TextTable
from bench.texts import counted

TITLE = "estimated scaling"
PAGE = "docs/prediction.md"
STACKS = {
    StackName.runstop: "runstop's own engine",
    StackName.reference: "NVIDIA's code for MLPerf (the stack reference)",
    StackName.reference_fp4: "NVIDIA's code for MLPerf in NVFP4 (the stack reference-fp4)",
}


UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column; an optional one is shown only if a point has it."""

    title: str
    text: Callable[[Point], str]
    is_optional: bool = False


def _columns(scaling: Scaling) -> dict[str, list[str]]:
    """Return the cells of each column that is shown, by title."""
    columns = [
        _Column(title="nodes", text=lambda one: str(one.num_nodes)),
        _Column(title="GPUs", text=lambda one: f"{one.num_gpus:,}"),
        _Column(title="batch", text=lambda one: f"{one.global_batch_size:,}"),
        _Column(title="layout", text=lambda one: one.layout or one.why_not),
        _Column(title="step (s)", text=lambda one: between(one.step_s)),
        _Column(title="tokens/s/GPU", text=lambda one: between(one.tokens_s_gpu)),
        _Column(
            title="efficiency", text=lambda one: UNKNOWN if one.efficiency is None else f"{100 * one.efficiency:.0f} %"
        ),
        _Column(title="samples", text=_samples),
        _Column(title="minutes", text=lambda one: between(one.minutes)),
        _Column(
            title="lost to failures",
            text=lambda one: UNKNOWN if one.lost_share is None else f"{100 * one.lost_share:.1f} %",
            is_optional=True,
        ),
        _Column(
            title="checkpoint every (min)",
            text=lambda one: UNKNOWN if one.checkpoint_interval_s is None else number(one.checkpoint_interval_s / 60),
            is_optional=True,
        ),
        _Column(title="days", text=lambda one: between(one.days), is_optional=True),
        _Column(title="GPU hours", text=lambda one: between(one.gpu_hours)),
        _Column(title="energy (kWh)", text=lambda one: between(one.energy_kwh), is_optional=True),
        _Column(title=f"price ({scaling.currency})", text=lambda one: between(one.price), is_optional=True),
    ]
    cells = [(each, list(map(each.text, scaling.points))) for each in columns]
    return {each.title: texts for each, texts in cells if not each.is_optional or set(texts) != {UNKNOWN}}


def sheet(scaling: Scaling, name: str) -> TextTable:
    """Return the table: one row for each number of nodes."""
    columns = _columns(scaling)
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return TextTable(f"{TITLE} of {name} on {STACKS[scaling.stack]}", rows, tuple(columns), _caption(scaling))


def _samples(one: Point) -> str:
    if one.samples is None:
        return UNKNOWN
    is_spread = one.samples_low is not None and one.samples_high is not None
    return f"{one.samples:,.0f}" + (f" ({one.samples_low:,.0f} to {one.samples_high:,.0f})" if is_spread else "")


TERMS = {
    "GEMMs": "gemm_s",
    "attention": "attention_s",
    "element-wise": "elementwise_s",
    "communication": "communication_s",
    "TP": "tensor_parallel_s",
    "CP": "context_parallel_s",
    "experts": "expert_parallel_s",
    "recomputation": "recompute_s",
    "head": "head_s",
    "host": "host_s",
    "bubble": "bubble_s",
    "slowest GPU": "wait_s",
    "sends": "sends_s",
    "gradients": "gradients_s",
    "update": "update_s",
}
"""The terms of a step, and their names in the prediction. Not every stack has each of them."""


def terms_sheet(scaling: Scaling) -> TextTable:
    """Return the table of what takes the seconds of a step."""
    known = [one for one in scaling.points if one.terms]
    present = {title: key for title, key in TERMS.items() if any(key in (one.terms or {}) for one in known)}
    rows = [
        [str(one.num_nodes), *(number((one.terms or {}).get(key, 0.0)) for key in present.values())] for one in known
    ]
    return TextTable("estimated seconds of a step", rows, ("nodes", *present))


def between(value: Range | None) -> str:
    """Return an estimate and its interval, or - if it is unknown."""
    if value is None:
        return UNKNOWN
    if value.low is None or value.high is None:
        return number(value.value)
    return f"{number(value.value)} ({number(value.low)} to {number(value.high)})"


def number(value: float) -> str:
    """Return a number with three digits; below 1, with three decimals."""
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"


def _caption(scaling: Scaling) -> str:
    intervals = (
        f"{one.num_rows} {one.rows} ({one.low:.2f} to {one.high:.2f} of the prediction)" for one in scaling.intervals
    )
    lines = ["Everything here is estimated; nothing was run."]
    if scaling.not_calibrated:
        lines[0] += f" Not calibrated, so without intervals: {scaling.not_calibrated}. {PAGE} says what is known."
    else:
        lines[0] += " In brackets: where nine of ten measured steps would be, by "
        lines[0] += f"{'; '.join(intervals)}. {PAGE} has each of these rows."
    if scaling.stack is StackName.runstop:
        lines.append("runstop's engine was measured on one node only: on more nodes, the intervals are too small.")
    lines.append("minutes: training steps only, without start, evaluations and failures.")
    if any(one.lost_share is not None for one in scaling.points):
        what = "days, GPU hours, energy and price contain the time lost to failures and checkpoints (cluster.failures)"
        lines.append(f"{what}. The interval of days is that of minutes, and of which nodes fail when.")
    if scaling.power_source:
        lines.append(f"energy: {scaling.power_source}; without hosts, network and cooling, unless these are in it.")
    sources = dict.fromkeys(one.samples_source for one in scaling.points if one.samples_source)
    if sources:
        spread = any(one.samples_low is not None for one in scaling.points)
        what = f"samples: to the target, by batch size ({'; '.join(sources)})"
        lines.append(what + ("; in brackets the middle 90 % of runs" if spread else ""))
    if scaling.pays_until is not None:
        lines.append(_pays(scaling, scaling.pays_until))
    return "\n".join(lines)


def _pays(scaling: Scaling, num_nodes: int) -> str:
    """Return up to how many nodes scaling pays; beyond the largest number of nodes, nothing is known."""
    estimated = [one.num_nodes for one in scaling.points if one.step_s is not None]
    share = f"{100 * LEAST_GAIN:.0f} % of what a GPU brings on {counted(estimated[0], 'node')}"
    up_to = f"Scaling pays up to {counted(num_nodes, 'node')}"
    if num_nodes == estimated[-1]:
        return f"{up_to}, the most in this table: an added GPU brings at least {share}."
    return f"{up_to}: beyond that, an added GPU brings less than {share}."
