"""Ranges are recorded only while they are enabled."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bench.contract.modules import Part, Phase
from jobs.profiles import ranges


def recorded(work: Callable[[], object]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return {event.name for event in profiler.events() if ranges.parse_label(event.name) or event.name == ranges.STEP}


def test_ranges_are_recorded_while_enabled() -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)

    def work() -> None:
        with ranges.step(), ranges.profile_range(Phase.forward), ranges.profile_range(Part.qkv):
            linear(x)

    assert recorded(work) == set()
    with ranges.enabled([(linear, Part.head)]):
        assert recorded(work) == {"step", "phase: forward", "part: qkv", "part: head"}
    with ranges.enabled([(linear, Part.head)]), profile(activities=[ProfilerActivity.CPU]) as profiler:
        linear(linear(x))
    first, second = (event.time_range for event in profiler.events() if event.name == "part: head")
    assert min(first.end, second.end) <= max(first.start, second.start), (
        "the first range is closed before the second opens"
    )
    assert recorded(work) == set() and not linear._forward_pre_hooks and not linear._forward_hooks
    assert ranges.profile_range(Part.qkv) is ranges.step(), "without a profile no range is created"
