"""Two ranks over gloo that train, of which one is delayed on purpose: the log, `why` and `watch` name it."""

import os
from pathlib import Path

import pytest

from bench.backends.local import free_port
from bench.contract import mllog
from bench.diagnosis import explain
from bench.mlperf import reader
from bench.watch.tracker import Tracker
from helpers import ranks
from helpers.short_training import WORDS

pytestmark = [pytest.mark.trains, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="over gloo")]
TRAINING = (
    *(each for each in WORDS if each.partition("=")[0] not in ("data.train_rows", "recipe.log_every_steps")),
    *("cluster.ranks_per_node=2", "data.train_rows=320", "recipe.log_every_steps=5"),
)


@pytest.mark.parametrize(
    ("what", "rank", "delay_ms", "steps", "cause"),
    [
        ("computation", 1, 250, 70, "computation"),
        pytest.param("rows", 0, 250, 70, "data loading", marks=pytest.mark.slow),
        pytest.param("evaluation", 1, 800, 110, "evaluation", marks=pytest.mark.slow),
    ],
)
def test_a_delayed_rank_is_named(tmp_path: Path, what: str, rank: int, delay_ms: int, steps: int, cause: str) -> None:
    own = (f"task.training.max_steps={steps}", "recipe.eval_every_samples=160", "recipe.eval_skip=0")
    plan = ranks.compose(tmp_path, *TRAINING, *own)
    folder = ranks.write(plan, tmp_path / "run")
    (folder / "rank_logs").mkdir()
    shared = os.environ | plan.environment | {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(each), "LOCAL_RANK": str(each), "SLURMD_NODENAME": f"dgx-{each}"} for each in range(2)]
    command = ("tests.helpers.delayed_rank", what, str(rank), str(delay_ms), "plan.json", "--trial", "0")
    for code, output in ranks.ended_in(folder, command, [shared | place for place in places]):
        assert code == 0, output
    events = reader.read(folder / "result_0.txt")[0]
    [record] = [event for event in events if event.key == mllog.SLOW_RANKS]
    assert (record.value, record.metadata["node"], record.metadata["cause"]) == ([rank], f"dgx-{rank}", cause)
    assert record.metadata["own_ms"] - record.metadata["usual_ms"] == pytest.approx(delay_ms, rel=0.5)
    assert 0 < record.metadata["percent"] < 100
    explanation, tracker = explain([folder]), Tracker()
    tracker.update(events)
    text = f"rank {rank} on dgx-{rank}: slow {cause} ("
    assert explanation.rule is None and str(explanation.evidence).startswith(text)
    assert [warning[: len(text)] for warning in tracker.progress.slow] == [text]
