"""Readmission of a restarted group by the active groups, with a scripted engine."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from bench.backends.local import free_port
from bench.contract.local_sgd import LocalSgd
from jobs.local_sgd import rejoin
from jobs.local_sgd.groups import Groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.local_sgd.engine import LocalSgdTraining

STEPS, LAST_AVERAGING = 32, 30
"""Steps of the run, and the step of its last weight averaging before the end."""


def local_sgd_training(groups: Groups, overlap_steps: int) -> LocalSgdTraining:
    """Return local SGD of groups of one rank, which train five numbers."""
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


@pytest.mark.parametrize(("overlap_steps", "rejoins_after"), [(0, [30]), (1, [31]), (2, []), (3, [])])
def test_a_group_is_readmitted_only_if_it_has_a_step_left(
    monkeypatch: pytest.MonkeyPatch, overlap_steps: int, rejoins_after: list[int]
) -> None:
    """It waits when the averaging of step 30 of 32 starts, which ends overlap_steps later or with the last step."""
    rejoined: list[int] = []
    monkeypatch.setattr(
        rejoin, "send_state", lambda groups, group, header, **rest: rejoined.append(header["step"]) or 0
    )
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    own = Groups(store, 0, 0, 1, 2, active=[0])
    own.set("joining/1", 1)
    training = local_sgd_training(own, overlap_steps)
    for step in range(LAST_AVERAGING, min(LAST_AVERAGING + overlap_steps, STEPS) + 1):
        training.group_rows(np.arange(2))
        if training.is_due(step, is_saved=False):
            training.average(step, torch.zeros(()), is_saved=False)
    assert rejoined == rejoins_after
    assert own.active == [0, *([1] * len(rejoins_after))]
