"""Give a prediction its interval: how far measured steps were from predictions of rows like it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from bench.contract.schema import Config
from bench.planning import compose
from bench.planning.estimates import memory, step_time
from bench.planning.parallelism import split
from bench.prediction import grade, published
from bench.prediction.step import slowest_of


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
        and not one.row.is_seen
        and one.row.is_lora == is_lora
        and (not is_lora or one.row.is_one_node == is_one_node)
    ]
    where = "one node" if is_one_node else "several nodes"
    what = f"published LoRA steps on {where}" if is_lora else "published steps of pre-training"
    return interval(like, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStep:
    """A measured step of runstop's own engine, and its prediction."""

    layout: str
    measured_s: float
    predicted_s: float


@cache
def own_steps() -> tuple[OwnStep, ...]:
    """Return the measured steps of runstop's own engine on eight H200 of one node."""
    config = compose.unplanned(("task=lora70b", "cluster=dgxh200", "precision=fp8", "model.weights=random"))
    return tuple(_own_step(config, row) for row in published.table("measured_runstop.csv"))


def _own_step(config: Config, row: dict[str, str]) -> OwnStep:
    tp, pp, cp, sp = int(row["tp"]), int(row["pp"]), int(row["cp"]), row["sp"] == "true"
    chosen = replace(config, parallel=replace(config.parallel, tp=tp, pp=pp, cp=cp, sp=sp))
    world = split(chosen, tp=tp, pp=pp, cp=cp, sp=sp)
    cost = step_time.estimate(chosen, world, memory.recompute(chosen, world))
    assert cost is not None
    sizes = {"dp": world.dp, "tp": tp, "pp": pp, "cp": cp}
    return OwnStep(
        layout=" ".join(f"{name} {size}" for name, size in sizes.items() if size > 1),
        measured_s=float(row["step_time_s"]),
        predicted_s=cost.step_s * waiting(world.num_ranks, tp * pp * cp),
    )


HOSTS = (67 / step_time.SHARED_LAUNCH_US, 64 / 47)
"""The fastest and the slowest measured host, in the time of a launch that the estimate has: 67 us with several ranks,
64 us with one rank alone. Source: docs/results/2026-11-26-four-gpus.md."""


@cache
def of_runstop(*, waits_for_host: bool) -> Interval:
    """Return the interval of runstop's own engine, from its measured steps.

    waits_for_host: the estimated step waits for the host, and hosts differ more than these steps.
    """
    ratios = [one.measured_s / one.predicted_s for one in own_steps()]
    steps = interval(ratios, "measured steps of 70B LoRA on eight GPUs of one node")
    if not waits_for_host:
        return steps
    slowest, fastest = max(steps.high, HOSTS[1]), min(steps.low, HOSTS[0])
    return replace(steps, low=fastest, high=slowest, rows=f"{steps.rows}, and measured hosts")


def waiting(num_gpus: int, num_model_parallel: int) -> float:
    """Return what the slowest of all GPUs adds to runstop's estimate of a step.

    The estimate has the wait of ranks that hold one replica of the model, but none for other replicas.
    """
    return slowest_of(num_gpus) / slowest_of(min(num_gpus, max(1, num_model_parallel)))
