"""List the layouts that a plan could take, with what each would need and how long its step would be."""

import dataclasses
from typing import Any

from bench.console.plan import STEP_PARTS
from bench.console.sheet import Sheet
from bench.contract.plan import Plan, Recomputed
from bench.planning import apart, layouts
from bench.planning.layouts import Layout

COLUMNS = ("dp", "tp", "pp", "cp", "sp", "recomputed layers", "GiB", "fits", "step (s)")
_SHORT = {
    "communication": "comm.",
    "recomputation": "recompute",
    "pipeline bubble": "bubble",
    "waiting for host": "host",
}
_PART_COLUMNS = tuple(f"{_SHORT.get(name, name)} (s)" for name in STEP_PARTS)


def sheet(plan: Plan) -> Sheet:
    """Return every legal layout of the plan's ranks as a table, best first; sizes that the config gives are kept."""
    ranked = layouts.ranked(apart.of_one_group(plan.config))
    rows = [_row(layout, plan.config.model.num_layers) for layout in ranked]
    fitting = sum(layout.memory.fits is not False for layout in ranked)
    caption = (
        f"{len(ranked)} legal layouts, {fitting} that fit, the fastest first. GiB of a GPU's memory, the time of a "
        "step and its parts are estimates; a layer is recomputed as a whole, or only its output of qkv or fc1"
    )
    title = f"{plan.name}, {plan.config.precision.name}"
    return Sheet(title, rows, (*COLUMNS, *_PART_COLUMNS), caption, num_optional=len(_PART_COLUMNS))


def to_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the layouts as objects of strict JSON, best first."""
    return [dataclasses.asdict(layout) for layout in layouts.ranked(apart.of_one_group(plan.config))]


def _row(layout: Layout, num_layers: int) -> tuple[str, ...]:
    w, cost = layout.world, layout.cost
    seconds = [cost.step_s, *(getattr(cost, field) for field in STEP_PARTS.values())] if cost else []
    return (
        *(str(size) for size in (w.dp, w.tp, w.pp, w.cp)),
        "on" if w.sp else "off",
        _recomputed(layout.recompute, num_layers // w.pp),
        f"{layout.memory.total_gib:.1f}",
        {True: "yes", False: "no", None: ""}[layout.memory.fits],
        *(f"{value:.2f}" for value in seconds),
        *[""] * (len(STEP_PARTS) + 1 - len(seconds)),
    )


def _recomputed(recomputed: Recomputed, num_layers: int) -> str:
    """Return which of a rank's layers are recomputed, short enough for a column."""
    counts = {"qkv": recomputed.qkv_layers, "fc1": recomputed.fc1_layers, "offloaded": recomputed.offloaded_layers}
    parts = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"all {num_layers}" if recomputed.full else f"{parts} of {num_layers}" if parts else "none"
