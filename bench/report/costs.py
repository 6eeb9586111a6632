"""Show costs: the estimate of a plan, and what a trial cost; nothing without a price of a GPU hour."""

from collections.abc import Iterable

from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.plan_kinds import training_plan
from bench.contract.schema import DataSource
from bench.planning import projection
from bench.report.tables import Row
from bench.results import cost
from bench.results.measurement import Measurement

TITLES = {cost.RUN: "cost of the run", cost.EPOCH: "cost of an epoch", cost.TOKENS: "cost of a million tokens"}
_REMARKS = {
    cost.RUN: "GPU hours from run_start to run_stop x price; without start-up",
    cost.EPOCH: "training only",
    cost.TOKENS: "at the measured throughput",
}


def amount(value: float) -> str:
    """Return an amount of money: with two decimals, and below 1 with three significant digits."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def result_rows(measured: Iterable[Measurement]) -> list[Row]:
    """Return one row for each cost among some measurements."""
    rows = []
    for one in measured:
        prefix, _, last = one.name.rpartition(" ")
        if last in TITLES:
            title = f"{TITLES[last]}{f', {prefix}' if prefix else ''} ({one.unit})"
            rows.append((title, amount(one.value), _REMARKS[last]))
    return rows


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the estimated cost of a plan, by the estimated time of its steps and by its time limit."""
    cluster = plan.config.cluster
    price = cluster.price_per_gpu_hour
    if price is None:
        return []
    num_gpus = plan.world.num_nodes * plans.gpus_per_node(plan)
    per_s, currency = price * num_gpus / 3600, cluster.currency
    parts = []
    trained = training_plan(plan)
    projected = projection.training_time(trained) if trained is not None else None
    if trained is not None and projected is not None:
        step_s = projected.step_s
        run = per_s * projected.steps * step_s
        parts.append(f"{amount(run)} {currency} (estimate) for {projected.steps:,} steps of a trial")
        gbs, data = trained.batch.global_batch_size, trained.data
        if data.source is not DataSource.random and data.num_train_rows >= gbs:
            parts.append(f"{amount(per_s * (data.num_train_rows // gbs) * step_s)} for an epoch")
        parts.append(f"{amount(1e6 * per_s * step_s / trained.batch.tokens_per_step)} for a million tokens")
    if plan.walltime_min is not None:
        parts.append(f"at most {amount(60 * per_s * plan.walltime_min)} {currency} until the time limit")
    rate = f"{num_gpus} GPUs at {amount(price)} {currency} per GPU hour"
    return [("cost", "; ".join([*parts, rate]))]
