"""A rank that stays slow ends the attempt on all ranks, which name its node; the next attempt resumes from there."""

import os
from pathlib import Path

import pytest

from bench.backends.local import free_port
from bench.contract import checkpoint, mllog, run_files
from bench.contract.plan import Plan
from bench.mlperf import reader
from helpers import ranks
from helpers.short_training import WORDS
from jobs.ranks.replacement import Replacement
from jobs.ranks.slow_ranks import Slow

SLURM = (
    *("task=pretrain_tiny", "cluster=slurm_test", "container=none", "cluster.num_nodes=2", "cluster.ranks_per_node=1"),
    *("cluster.health.busbw_gbs=1", "launch.replace_slow=true", "cluster.spare_nodes=1"),
)
TRAINING = (
    *(each for each in WORDS if each.partition("=")[0] not in ("data.train_rows", "recipe.log_every_steps")),
    *("data.train_rows=80000", "recipe.log_every_steps=5", "recipe.eval_every_samples=80000", "recipe.eval_skip=0"),
    *("task.training.max_steps=10000", "task.training.checkpoint_every_steps=70", "launch.telemetry=false"),
)
SLOW = Slow("dgx-1", (1,), "computation", 1.2, 1.0, 10.0, (), excess_s=0.2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def planned(tmp_path: Path, *words: str) -> Plan:
    return ranks.compose(tmp_path, *SLURM, *TRAINING, *words)


@pytest.mark.long
def test_a_node_is_replaced_only_with_a_spare_and_checkpoints(tmp_path: Path, run: Path) -> None:
    plan = planned(tmp_path)
    assert Replacement.of_trial(plan, run) is None, "no spare is known"
    (run / run_files.SPARE_NODES).write_text("\n")
    assert Replacement.of_trial(plan, run) is None, "all spares are used"
    (run / run_files.SPARE_NODES).write_text("dgx-2\n")
    assert Replacement.of_trial(plan, run) is not None
    assert Replacement.of_trial(planned(tmp_path, "task.training.checkpoint_every_steps=null"), run) is None
    no_spares = planned(tmp_path, "launch.replace_slow=false", "cluster.spare_nodes=0")
    assert Replacement.of_trial(no_spares, run) is None


def test_a_node_is_replaced_only_if_the_rest_of_the_trial_wins_back_the_cost(run: Path) -> None:
    """Each step would be 0.2 s shorter, and the start took 30 s: 300 steps win back twice as much."""
    replacement = Replacement(run, max_steps=1000, start_s=30.0)
    assert replacement.is_worth(SLOW, step=699)
    assert not replacement.is_worth(SLOW, step=701)


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="over gloo")
def test_the_ranks_save_their_state_and_end_when_a_rank_stays_slow(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    folder = ranks.write(plan, tmp_path / "run")
    (folder / run_files.RANK_LOGS).mkdir()
    (folder / run_files.SPARE_NODES).write_text("dgx-2\n")
    shared = os.environ | plan.environment | {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(each), "LOCAL_RANK": "0", "SLURMD_NODENAME": f"dgx-{each}"} for each in range(2)]
    command = ("tests.helpers.delayed_rank", "computation", "1", "150", "plan.json", "--trial", "0")
    ended = ranks.ended_in(folder, command, [shared | place for place in places])
    assert [code for code, _ in ended] == [1, 1], ended
    assert "RUN-26: rank 1 on dgx-1 stayed slow (" in ended[0][1]
    node, why = (folder / run_files.SLOW_NODE).read_text().splitlines()
    assert node == "dgx-1" and why.startswith("RUN-26: rank 1 on dgx-1 stayed slow (")
    events = reader.read(folder / "result_0.txt")[0]
    [record] = [event for event in events if event.key == mllog.SLOW_RANKS]
    saved = [event.metadata["step"] for event in events if event.key == mllog.CHECKPOINT]
    newest = checkpoint.steps(folder / run_files.checkpoints(0))[0]
    last = max(event.metadata["step"] for event in events if event.key == mllog.TRAIN_LOSS)
    assert record.metadata["step"] < newest == saved[-1] <= last < 10_000
