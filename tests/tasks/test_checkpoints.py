"""Checkpoints of several ranks and of several groups, with scripted engines."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.errors import ConfigError
from helpers import ranks
from jobs.local_sgd import groups
from jobs.local_sgd.groups import Groups
from jobs.tasks.checkpoints import Checkpoints

LAST = 6
SAVED = (
    *("task.benchmark=null", "task.training.target_eval_loss=null", "task.training.checkpoint_every_steps=2"),
    *(f"task.training.max_steps={LAST}", "recipe.lr_warmup_steps=2"),
)


@pytest.mark.trains
def test_all_ranks_wait_if_one_has_no_memory_for_a_copy(tmp_path: Path) -> None:
    """The ranks see different amounts of free memory."""
    planned = ranks.compose(tmp_path, "cluster.ranks_per_node=2", *SAVED)
    folder = ranks.write(planned, tmp_path / "run")
    ranks.run(planned, folder, "tests.helpers.uneven_room", "plan.json")
    assert sorted(path.name for path in (folder / "checkpoints" / "trial_0").iterdir()) == ["step_2", "step_4"]


STATE = 1000
"""Bytes of a group's training state: two groups need disk space for six of them."""
OfGroup = Callable[[int], Checkpoints]


@pytest.fixture
def of_two_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OfGroup]:
    """Make this process the one rank of a group; two states of each group are in the run folder."""
    plan = ranks.compose(tmp_path, "task=pretrain_tiny_local_sgd", "cluster.ranks_per_node=2", *SAVED)
    folder, store = tmp_path / "checkpoints" / "trial_0", torch.distributed.HashStore()
    for group in (folder, folder / "group_1"):
        (group / f"step_{LAST}").mkdir(parents=True)
        (group / f"step_{LAST}" / "rank_0.distcp").write_bytes(bytes(2 * STATE))
    engine: Any = SimpleNamespace(state_bytes=lambda: STATE)
    no_log: Any = SimpleNamespace()

    def checkpoints(number: int) -> Checkpoints:
        own = Groups(store, number, number, 1, 2, [0, 1])
        monkeypatch.setattr(groups, "current", lambda: own)
        return Checkpoints(plan, plan.trials[0], engine, tmp_path, no_log, rank=number)

    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield checkpoints
    torch.distributed.destroy_process_group()


def test_existing_checkpoints_of_all_groups_count_as_free_space(
    of_two_groups: OfGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, is_enough in ((2 * STATE, True), (2 * STATE - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(0, 0, free))
        for number in range(2):
            saving = of_two_groups(number)
            if is_enough:
                assert saving.resume() == 0
                continue
            with pytest.raises(ConfigError, match="3 checkpoints of .* do not fit"):
                saving.resume()


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_free_space_is_counted_while_another_group_removes_a_checkpoint(
    of_two_groups: OfGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    removed, real = tmp_path / "checkpoints" / "trial_0" / "group_1" / f"step_{LAST}", getattr(os, call)

    def raise_missing(path: Any, **options: Any) -> Any:
        if str(removed) in str(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, **options)

    monkeypatch.setattr(os, call, raise_missing)
    assert of_two_groups(0).resume() == 0
