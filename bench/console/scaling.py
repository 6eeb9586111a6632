"""Tables of `runstop plan --scale`."""

from bench.prediction.scale import LEAST_GAIN, Point, Range, Scaling, StackName
from bench.report.tables import TextTable
from bench.texts import counted

TITLE = "estimated scaling"
PAGE = "docs/prediction.md"
STACKS = {
    StackName.runstop: "runstop's own engine",
    StackName.reference: "NVIDIA's code for MLPerf (the stack reference)",
}


def sheet(scaling: Scaling, name: str) -> TextTable:
    """Return the table: one row for each number of nodes."""
    has_price = any(one.price for one in scaling.points)
    has_failures = any(one.lost_share is not None for one in scaling.points)
    columns = (
        *("nodes", "GPUs", "batch", "layout", "step (s)", "tokens/s/GPU", "efficiency", "samples", "minutes"),
        *(("lost to failures", "checkpoint every (min)") if has_failures else ()),
        "GPU hours",
        *((f"price ({scaling.currency})",) if has_price else ()),
    )
    rows = [_row(one, has_failures=has_failures, has_price=has_price) for one in scaling.points]
    return TextTable(f"{TITLE} of {name} on {STACKS[scaling.stack]}", rows, columns, _caption(scaling))


TERMS = {
    "GEMMs": "gemm_s",
    "attention": "attention_s",
    "element-wise": "elementwise_s",
    "communication": "communication_s",
    "TP": "tensor_parallel_s",
    "CP": "context_parallel_s",
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


def _row(one: Point, *, has_failures: bool, has_price: bool) -> list[str]:
    start = [str(one.num_nodes), f"{one.num_gpus:,}", f"{one.global_batch_size:,}"]
    if one.step_s is None:
        return [*start, one.why_not, *["-"] * (6 + 2 * has_failures + has_price)]
    assert one.tokens_s_gpu is not None and one.efficiency is not None
    failing = []
    if has_failures:
        interval = one.checkpoint_interval_s
        failing = ["-" if one.lost_share is None else f"{100 * one.lost_share:.1f} %"]
        failing.append("-" if interval is None else number(interval / 60))
    return [
        *start,
        one.layout,
        between(one.step_s),
        between(one.tokens_s_gpu),
        f"{100 * one.efficiency:.0f} %",
        "-" if one.samples is None else f"{one.samples:,.0f}",
        between(one.minutes),
        *failing,
        between(one.gpu_hours),
        *([between(one.price)] if has_price else []),
    ]


def between(value: Range | None) -> str:
    """Return an estimate and its interval, or - if it is unknown."""
    return "-" if value is None else f"{number(value.value)} ({number(value.low)} to {number(value.high)})"


def number(value: float) -> str:
    """Return a number with three digits; below 1, with three decimals."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _caption(scaling: Scaling) -> str:
    intervals = (
        f"{one.num_rows} {one.rows} ({one.low:.2f} to {one.high:.2f} of the prediction)" for one in scaling.intervals
    )
    lines = [
        "Everything here is estimated; nothing was run. In brackets: where nine of ten measured steps would be, by "
        f"{'; '.join(intervals)}. {PAGE} has each of these rows.",
    ]
    if scaling.stack is StackName.runstop:
        lines.append("runstop's engine was measured on one node only: on more nodes, the intervals are too small.")
    lines.append("minutes: training steps only, without start, evaluations and failures.")
    if any(one.lost_share is not None for one in scaling.points):
        lines.append("GPU hours and price contain the time lost to failures and checkpoints (cluster.failures).")
    sources = dict.fromkeys(one.samples_source for one in scaling.points if one.samples_source)
    if sources:
        lines.append(f"samples: to the target, by batch size ({'; '.join(sources)})")
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
