"""All rules of all benchmarks, as numbers: a golden file, and the goals and schedules of the rules' text by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.mlperf import benchmarks
from bench.mlperf.benchmarks import BENCHMARKS, DISCLOSED, PRECISIONS, Benchmark, Goal, Schedule
from helpers import golden

RULES = Path(__file__).with_name("benchmark_rules.yaml")
BATCHES = (1, 8, 256, 1000, 1152, 16384)
"""Global batch sizes, or other values from which a rule derives its own."""


def values(formula: Callable[[int], float]) -> list[float]:
    return [formula(batch) for batch in BATCHES]


def described(known: Benchmark) -> dict[str, Any]:
    """Return the fields of a benchmark, with the values of each formula."""
    plain: dict[str, Any] = {name: getattr(known, name) for name in known.__dataclass_fields__}
    plain["goals"] = [f"{goal}, above {goal.least:g}" for goal in known.goals]
    plain["fixed"] = {key: [*value] if isinstance(value, tuple) else value for key, value in known.fixed.items()}
    plain["relations"] = [
        f"{one.key} of {one.base}: {one.expected}, ± {one.tolerance:g}, rulesets {one.since}–{one.until}: "
        f"{', '.join(f'{value:.10g}' for value in values(one.formula))}"
        for one in known.relations
    ]
    plain["ranges"] = [
        f"{one.key} of {one.base}: {one.expected}: "
        f"{', '.join(f'{low:.10g}–{high:.10g}' for low, high in zip(values(one.low), values(one.high), strict=True))}"
        for one in known.ranges
    ]
    plain["order"] = [" before ".join(keys) for keys in known.order]
    if (grid := known.grid) is not None:
        plain["grid"] = {"first": values(grid.first), "since": grid.since, "may_skip": grid.may_skip}
        plain["grid"]["every"] = values(grid.every) if grid.every else None
    if (due := known.schedule) is not None:
        plain["schedule"] = {name: values(getattr(due, name)) for name in ("interval", "skipped", "first")}
    return {
        name: [*value] if isinstance(value, tuple) else value
        for name, value in plain.items()
        if value is not None and value is not False and value not in ((), [], {})
    }


def test_the_rules_of_every_benchmark_are_those_of_the_golden_file() -> None:
    rules = {name: described(known) for name, known in BENCHMARKS.items()}
    rules["all"] = {"disclosed": [*DISCLOSED], "precisions": [*PRECISIONS]}
    text = yaml.safe_dump(rules, sort_keys=False, width=120, allow_unicode=True, default_flow_style=None)
    golden.require(text, RULES, variable="WRITE_RULES")


@pytest.mark.parametrize(
    ("goal", "shown", "reached", "missed"),
    [
        (Goal(3.3), "≤ 3.3", (0.001, 3.3), (0.0, -1.0, 3.31, float("nan"))),
        (Goal(2.69, least=2.6), "≤ 2.69", (2.61, 2.69), (2.6, 2.7)),
        (Goal(0.72, higher_is_better=True), "≥ 0.72", (0.72, 0.9), (0.71, float("nan"))),
        (Goal(0.69, higher_is_better=True, is_exclusive=True), "> 0.69", (0.691,), (0.69, 0.5)),
        (Goal(90.0, metric="FID"), "FID ≤ 90", (90.0, 1.0), (0.0, 91.0)),
    ],
)
def test_a_goal_is_reached_up_to_its_value(
    goal: Goal, shown: str, reached: tuple[float, ...], missed: tuple[float, ...]
) -> None:
    assert str(goal) == shown
    assert all(goal.is_reached_by(value) for value in reached)
    assert not any(goal.is_reached_by(value) for value in missed)


@pytest.mark.parametrize(
    ("schedule", "batch", "expected"),
    [
        (Schedule(384, skip_per_gbs=0.125, skip=2), 8, (384, 3, 1536)),
        (Schedule(384, skip_per_gbs=0.125, skip=2), 15, (390, 3, 1560)),
        (Schedule(384, skip_per_gbs=0.125, skip=2), 16, (384, 4, 1920)),
        (Schedule(12288), 1000, (13000, 0, 13000)),
    ],
)
def test_evaluations_are_due_after_whole_global_batches(
    schedule: Schedule, batch: int, expected: tuple[int, int, int]
) -> None:
    assert (schedule.interval(batch), schedule.skipped(batch), schedule.first(batch)) == expected


def test_a_logged_target_replaces_the_value_of_the_only_goal() -> None:
    bert, diffusion = BENCHMARKS["bert"], BENCHMARKS["stable_diffusion"]
    assert benchmarks.goals(bert, 0.8) == (Goal(0.8, higher_is_better=True),)
    assert benchmarks.goals(bert, None) == bert.goals
    assert benchmarks.goals(None, 0.8) == (Goal(0.8),) and benchmarks.goals(None, None) == ()
    assert benchmarks.goals(diffusion, 80.0) == diffusion.goals
    assert [name for name, known in BENCHMARKS.items() if benchmarks.has_lora(known)] == ["llama2_70b_lora"]
    assert benchmarks.has_lora(None) is False
