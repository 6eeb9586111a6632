"""Checkpoints of several ranks and of several groups, with scripted engines."""

from pathlib import Path

import pytest

from helpers import ranks

SAVED = (
    *("task.benchmark=null", "task.training.target_eval_loss=null", "task.training.checkpoint_every_steps=2"),
    "task.training.max_steps=6",
)


@pytest.mark.trains
def test_all_ranks_wait_where_one_has_no_room_for_a_copy(tmp_path: Path) -> None:
    """Each looks at its own node's free memory, and sees another one."""
    made = ranks.compose(tmp_path, "cluster.ranks_per_node=2", *SAVED)
    folder = ranks.write(made, tmp_path / "run")
    ranks.run(made, folder, "tests.helpers.uneven_room", "plan.json")
    assert sorted(path.name for path in (folder / "checkpoints" / "trial_0").iterdir()) == ["step_2", "step_4"]
