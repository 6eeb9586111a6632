"""When a group that was started again is let in by those that train, with a scripted engine."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from bench.backends.local import free_port
from bench.contract.local_sgd import LocalSgd
from jobs.local_sgd import joining
from jobs.local_sgd.groups import Groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.local_sgd.engine import LocalSgdTraining

STEPS, LAST_MERGE = 32, 30
"""Steps of the run, and the last one at which a merge is due before the end."""


def apart(groups: Groups, overlap_steps: int) -> LocalSgdTraining:
    """Return what merges groups of one rank, which train five numbers."""
    local_sgd = LocalSgd(every_steps=10, overlap_steps=overlap_steps, time_limit_s=1)
    plan: Any = SimpleNamespace(
        recipe=SimpleNamespace(averaging=local_sgd),
        world=SimpleNamespace(dp=1),
        batch=SimpleNamespace(micro_batch_size=1),
        evaluation=SimpleNamespace(at_steps=[STEPS]),
        max_steps=STEPS,
    )
    state = SimpleNamespace(master=torch.zeros(5), exp_avg=torch.zeros(5), exp_avg_sq=torch.zeros(5))
    optimizer = SimpleNamespace(states=lambda: [state], num_steps=0, resume=lambda step: None)
    parts = SimpleNamespace(optimizer=optimizer, refresh_weights=lambda: None)
    engine: Any = SimpleNamespace(parts=parts, mean_loss=lambda share: 1.0, outer=None)
    return LocalSgdTraining(engine, plan, groups)


@pytest.mark.parametrize(("overlap_steps", "enters_after"), [(0, [30]), (1, [31]), (2, []), (3, [])])
def test_a_group_is_let_in_only_where_a_step_is_left_for_it(
    monkeypatch: pytest.MonkeyPatch, overlap_steps: int, enters_after: list[int]
) -> None:
    """It waits when the merge of step 30 of 32 begins, which ends so many steps later, or with the last one."""
    entered: list[int] = []
    monkeypatch.setattr(joining, "give", lambda groups, group, about, **rest: entered.append(about["step"]) or 0)
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    own = Groups(store, 0, 0, 1, 2, living=[0])
    own.tell("joining/1", 1)
    training = apart(own, overlap_steps)
    for step in range(LAST_MERGE, min(LAST_MERGE + overlap_steps, STEPS) + 1):
        training.mine(np.arange(2))
        if training.is_due(step, is_saved=False):
            training.after(step, torch.zeros(()), is_saved=False)
    assert entered == enters_after
    assert own.living == [0, *([1] * len(enters_after))]
