"""Give a prediction its interval: how far measured steps were from predictions of rows like it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from bench.contract.schema import Precision
from bench.planning import compose
from bench.planning.estimates import memory, step_time
from bench.planning.parallelism import split
from bench.prediction import grade, published
from bench.prediction.step import slowest_of

FEWEST = 5
"""Rows that an interval needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Measured over predicted seconds of similar rows."""

    low: float
    high: float
    num_rows: int
    rows: str
    """What the rows are."""


def interval(ratios: Sequence[float], rows: str) -> Interval:
    """Return the middle 90 % of ratios; with fewer than 20 rows these are all."""
    ordered = sorted(ratios)
    cut = len(ordered) // 20
    return Interval(low=ordered[cut], high=ordered[-1 - cut], num_rows=len(ordered), rows=rows)


@cache
def of_reference(*, is_lora: bool, is_one_node: bool) -> Interval:
    """Return the interval of the stack `reference`, from published rows that set no constant."""
    like = [
        1 / (1 + one.error)
        for one in grade.graded()
        if one.error is not None
        and not one.sets
        and one.row.round != published.SEEN
        and (one.row.benchmark in published.ADAPTER_WEIGHTS) == is_lora
        and (not is_lora or one.row.is_one_node == is_one_node)
    ]
    where = "one node" if is_one_node else "several nodes"
    what = f"published LoRA steps on {where}" if is_lora else "published steps of pre-training"
    return interval(like, what)


@cache
def of_runstop() -> Interval:
    """Return the interval of runstop's own engine, from its measured steps on eight GPUs of one node."""
    overrides = ("task=lora70b", "cluster=dgxh200", "precision=fp8", "model.weights=random")
    config = compose.unplanned(overrides)
    assert config.precision is Precision.fp8
    ratios = []
    for row in published.table("measured_runstop.csv"):
        tp, pp, cp, sp = int(row["tp"]), int(row["pp"]), int(row["cp"]), row["sp"] == "true"
        chosen = replace(config, parallel=replace(config.parallel, tp=tp, pp=pp, cp=cp, sp=sp))
        world = split(chosen, tp=tp, pp=pp, cp=cp, sp=sp)
        cost = step_time.estimate(chosen, world, memory.recompute(chosen, world))
        assert cost is not None
        ratios.append(float(row["step_time_s"]) / (cost.step_s * waiting(world.num_ranks, tp * pp * cp)))
    return interval(ratios, "measured steps of 70B LoRA on eight GPUs of one node")


def waiting(num_gpus: int, num_model_parallel: int) -> float:
    """Return what the slowest of all GPUs adds to runstop's estimate of a step.

    The estimate has the wait of ranks that hold one replica of the model, but none for other replicas.
    """
    return slowest_of(num_gpus) / slowest_of(min(num_gpus, max(1, num_model_parallel)))
