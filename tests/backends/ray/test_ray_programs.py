"""engine=command on a real Ray: two ranks of one program on two nodes."""

import json

import pytest
from ray_user import RayUser, Run

from helpers import programs

pytestmark = [pytest.mark.trains, pytest.mark.slow]


def test_ranks_on_two_nodes_train_and_one_that_fails_explains_the_run(user: RayUser) -> None:
    words = ("cluster=ray_test", "launch.wait=true")
    fine, failed = user.home / "fine", user.home / "failed"
    for folder, failing, code in ((fine, -1, 0), (failed, 1, 1)):
        program = programs.words(user.home, failing=failing)
        user.types(*program, *words, f"launch.folder={folder}", module="bench.launch", code=code)
    first = (fine / "rank_logs/trial_0_rank_1.out").read_text().splitlines()[0]
    assert first == "rank 1 of 2, local rank 0, node 1"
    assert json.loads((fine / "status.json").read_text())["outcome"] == "valid"
    cause = user.why(Run(failed, ""))
    assert "ValueError: rank 1 has no rows" in cause["evidence"], cause
    assert Run(failed, "").status["outcome"] == "failed"
