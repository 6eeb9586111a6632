"""List the layouts that a plan could take, with what each would need and how long its step would be."""

from bench.console.plan import COST_PARTS, recompute_words
from bench.console.sheet import Sheet
from bench.contract.plan import Plan
from bench.planning import layouts
from bench.planning.layouts import Layout

COLUMNS = ("dp", "tp", "pp", "cp", "sp", "recompute", "GiB", "fits", "step (s)", *COST_PARTS)


def sheet(plan: Plan) -> Sheet:
    """Return every legal layout of the plan's ranks as a table, best first; sizes that the config gives are kept."""
    ranked = layouts.ranked(plan.config)
    rows = [_row(one, plan.config.model.num_layers) for one in ranked]
    fitting = sum(one.memory.fits is not False for one in ranked)
    caption = f"{len(ranked)} legal layouts, {fitting} that fit; GiB of a GPU's memory and seconds are estimates"
    return Sheet(f"{plan.name}, {plan.config.precision.name}", rows, columns=COLUMNS, caption=caption)


def _row(one: Layout, num_layers: int) -> tuple[str, ...]:
    w, cost = one.world, one.cost
    seconds = [cost.step_s, *(getattr(cost, field) for field in COST_PARTS.values())] if cost else []
    return (
        *(str(size) for size in (w.dp, w.tp, w.pp, w.cp)),
        "yes" if w.sp else "no",
        recompute_words(one.recompute, num_layers // w.pp),
        f"{one.memory.total_gib:.1f}",
        {True: "yes", False: "no", None: ""}[one.memory.fits],
        *(f"{value:.2f}" for value in seconds),
        *[""] * (len(COST_PARTS) + 1 - len(seconds)),
    )
