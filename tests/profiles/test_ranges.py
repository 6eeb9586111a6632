"""Ranges are recorded only while they are enabled."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_pass_inside_the_backward_pass_is_recomputation(use_reentrant: bool) -> None:
    """torch ends a recomputation by an exception after the last saved tensor; each range is closed anyway."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    parts = [(layer, Part.residual), (layer[0], Part.fc1), (layer[2], Part.fc2)]
    with ranges.enabled(parts), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            total = checkpoint(layer, x, use_reentrant=use_reentrant).sum()
            with ranges.profile_range(Phase.backward):
                total.backward()
    events = [event for event in profiler.events() if ranges.parse_label(event.name)]
    counts = Counter(event.name for event in events)
    assert counts["part: residual"] == counts["part: fc1"] == counts["part: fc2"] == 4, "twice in each step"
    recomputed = [event.time_range for event in events if event.name == "phase: recomputation"]
    backward = [event.time_range for event in events if event.name == "phase: backward"]
    assert len(recomputed) == 2 * len(parts), "one for each module"
    for one in recomputed:
        assert any(whole.start <= one.start and one.end <= whole.end for whole in backward)
    products = [event.time_range for event in profiler.events() if event.name == "aten::mm"]
    assert len(products) == 2 * 4, "each linear has two in its backward pass"
    assert not [one for one in products for whole in recomputed if whole.start <= one.start < whole.end]
