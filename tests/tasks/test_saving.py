"""Checkpoints of one rank with a fake engine: retention, damage and resuming."""

import errno
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract import atomic_files
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError
from helpers import alone, ranks
from jobs.local_sgd import groups
from jobs.local_sgd.groups import Groups
from jobs.tasks import checkpoints, train
from jobs.tasks.checkpoints import Checkpoints

LAST = 10
SAVED = (
    *("task=pretrain_tiny", "cluster.ranks_per_node=1", "task.benchmark=null", "recipe.lr_warmup_steps=2"),
    *("task.training.target_eval_loss=null", "task.training.checkpoint_every_steps=2"),
    f"task.training.max_steps={LAST}",
)


class Engine:
    """A fake engine whose state is a text; it records what it loads."""

    def __init__(self) -> None:
        self.content, self.error, self.waits = "state", None, threading.Event()
        self.loaded: list[tuple[str, int, bool]] = []
        self.is_copy = True
        self.waits.set()

    def state_bytes(self) -> int:
        return 0

    def snapshot(self) -> "Engine":
        return self

    def write(self, folder: Path) -> None:
        self.waits.wait(5)
        if self.error is not None:
            raise self.error
        (folder / "rank_0.distcp").write_text(self.content)
        (folder / "rank_0.json").write_text("{}")

    def complete(self, folder: Path, about: dict[str, Any]) -> None:
        path = folder / "rank_0.distcp"
        files = [{"path": path.name, "sha256": atomic_files.sha256(path)}]
        (folder / "manifest.json").write_text(json.dumps(about | {"files": files}))

    def load_state(self, folder: Path, *, step: int, seed: int, same_layout: bool) -> None:
        self.loaded.append((str(folder), step, same_layout))


@pytest.fixture
def plan() -> Iterator[Plan]:
    with alone.joined():
        yield ranks.compose(Path("unused"), *SAVED)


def saving(plan: Plan, run: Path, log: Any = None) -> tuple[Checkpoints, Any]:
    engine: Any = Engine()
    return Checkpoints(plan, plan.trials[0], engine, run, log or SimpleNamespace(), rank=0), engine


def of_trial(run: Path) -> Path:
    return run / "checkpoints" / "trial_0"


def save_all(plan: Plan, run: Path, *steps: int) -> None:
    own, _ = saving(plan, run)
    own.resume()
    for step in steps:
        own.save(step)
    own.finish()


def names(run: Path) -> list[str]:
    return sorted(path.name for path in of_trial(run).iterdir())


def test_the_last_two_are_kept_and_the_newest_one_is_resumed(plan: Plan, tmp_path: Path) -> None:
    """A checkpoint of the last step is of a finished trial; unfinished folders are removed."""
    save_all(plan, tmp_path, 2, 4, 6)
    assert names(tmp_path) == ["step_4", "step_6"]
    (of_trial(tmp_path) / "step_8.part").mkdir()
    shutil.copytree(of_trial(tmp_path) / "step_6", of_trial(tmp_path) / f"step_{LAST}")
    own, engine = saving(plan, tmp_path)
    assert own.resume() == own.done == 6 and names(tmp_path) == ["step_10", "step_4", "step_6"]
    assert engine.loaded == [(str(of_trial(tmp_path) / "step_6"), 6, True)]
    assert [step for step in range(LAST + 1) if own.is_due(step)] == [0, 2, 4, 6, 8]
    engine.content = "another state"
    own.save(6)
    own.finish()
    assert (of_trial(tmp_path) / "step_6/rank_0.distcp").read_text() == "another state"
    assert names(tmp_path) == ["step_10", "step_6"]


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        ("missing", "rank_0.distcp is missing"),
        ("changed", "rank_0.distcp has another SHA-256"),
        ("unreadable", "the manifest cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str, reason: str
) -> None:
    save_all(plan, tmp_path, 2, 4)
    newest = of_trial(tmp_path) / "step_4"
    if damaged == "missing":
        (newest / "rank_0.distcp").unlink()
    else:
        (newest / {"changed": "rank_0.distcp", "unreadable": "manifest.json"}[damaged]).write_text("x")
    logged: list[Any] = []
    log = SimpleNamespace(event=lambda key, value, **metadata: logged.append((key, value, metadata)))
    own, engine = saving(plan, tmp_path, log)
    assert own.resume() == 2 and [step for _, step, _ in engine.loaded] == [2]
    assert logged == [("damaged_checkpoint", "step_4", {"reason": reason})]
    assert capsys.readouterr().err == f"checkpoint step_4 is damaged ({reason}); trying an older one\n"


def test_training_continues_while_a_copy_is_written_and_waits_without_one(plan: Plan, tmp_path: Path) -> None:
    own, engine = saving(plan, tmp_path)
    own.resume()
    engine.waits.clear()
    own.save(2)
    assert names(tmp_path) == ["step_2.part"]
    engine.waits.set()
    engine.is_copy = False
    own.save(4)
    assert names(tmp_path) == ["step_2", "step_4"] and own._thread is None


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ValueError("x"), r"ValueError\('x'\)"),
    ],
)
def test_a_write_error_is_raised_in_the_main_thread(plan: Plan, tmp_path: Path, error: Exception, why: str) -> None:
    own, engine = saving(plan, tmp_path)
    own.resume()
    engine.error = error
    own.save(2)
    for ask in (own.finish, lambda: own.is_due(3)):
        with pytest.raises(BenchError, match=f"^CFG-08: a checkpoint cannot be written: {why}\n") as raised:
            ask()
        assert raised.value.where == str(of_trial(tmp_path)) and raised.value.__cause__ is error


def test_a_write_error_of_another_rank_is_raised(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = saving(plan, tmp_path)
    own.resume()
    own.save(2)
    monkeypatch.setattr(checkpoints, "_sum", lambda value: 1 + value)
    with pytest.raises(BenchError, match="^CFG-08: another rank could not write its part of a checkpoint\n"):
        own.finish()


def test_saving_is_worth_it_if_repeating_the_steps_since_the_last_checkpoint_takes_longer(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing the checkpoint of step 2 took 3 s."""
    own, _ = saving(plan, tmp_path)
    own.resume()
    assert own.is_worth_saving(1, step_s=0.1), "there is no checkpoint to go back to"
    seconds = iter([10.0, 13.0])
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    own.save(2)
    own.finish()
    assert [own.is_worth_saving(step, step_s=1.0) for step in (3, 4, 5, 6)] == [False, False, True, True]


def test_rank_0_waits_for_the_files_of_all_ranks(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = saving(plan, tmp_path)
    own.resume()
    own._num_ranks = 2
    part, slept = of_trial(tmp_path) / "step_2.part", []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        (part / "rank_1.json").write_text("{}")

    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter))
    own.save(2)
    own.finish()
    assert slept == [0.05] and names(tmp_path) == ["step_2"]


def test_a_group_resumes_from_its_own_state_or_from_group_0s(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group's state does not count as the same layout; without any state it cannot resume."""
    save_all(plan, tmp_path, 2, 4)
    store = torch.distributed.HashStore()
    first, second = (Groups(store, number, number, 1, 2, [0, 1]) for number in range(2))
    monkeypatch.setattr(groups, "current", lambda: first)
    own, _ = saving(plan, tmp_path)
    assert own.resume() == 4
    monkeypatch.setattr(groups, "current", lambda: second)
    own, engine = saving(plan, tmp_path)
    assert own.resume() == own.done == 4 and engine.loaded == [(str(of_trial(tmp_path) / "step_4"), 4, False)]
    shutil.copytree(of_trial(tmp_path) / "step_4", of_trial(tmp_path) / "group_1/step_4")
    own, engine = saving(plan, tmp_path)
    assert own.resume() == 4 and engine.loaded == [(str(of_trial(tmp_path) / "group_1/step_4"), 4, True)]
    shutil.rmtree(of_trial(tmp_path) / "group_1/step_4")
    (of_trial(tmp_path) / "step_4/rank_0.distcp").write_text("x")
    own, _ = saving(plan, tmp_path)
    with pytest.raises(ConfigError, match="group 0 resumes from step 4, but this group has no checkpoint of this step"):
        own.resume()


def test_saving_and_weight_averaging_are_logged_between_steps(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    moments = iter((10.0, 12.5))
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    log = SimpleNamespace(event=lambda key, value, **metadata: calls.append((key, value, metadata)))
    local_sgd = SimpleNamespace(
        is_due=lambda step, is_saved: step == 3 or is_saved,
        average=lambda step, share, is_saved: [("outer_step", step, {"share": share, "is_saved": is_saved})],
    )
    loop: Any = SimpleNamespace(
        plan=plan,
        log=log,
        local_sgd=local_sgd,
        alive=lambda phase, step, end: calls.append((phase, step, end)),
        saving=SimpleNamespace(save=lambda step: calls.append(("saved", step))),
    )
    at = {"samples_count": 3 * plan.batch.global_batch_size, "step": 3}
    train.save(loop, 3)
    assert calls == [("saving", 3, None), ("saved", 3), ("checkpoint", 2.5, at), ("training", 3, None)]
    calls.clear()
    train.average_weights(loop, "share", 2, is_saved=False)
    assert calls == []
    train.average_weights(loop, "share", 3, is_saved=False)
    metadata = {"share": "share", "is_saved": False} | at
    assert calls == [("weight averaging", 3, None), ("outer_step", 3, metadata), ("training", 3, None)]
    loop.local_sgd = None
    train.average_weights(loop, "share", 3, is_saved=True)
    assert len(calls) == 3
