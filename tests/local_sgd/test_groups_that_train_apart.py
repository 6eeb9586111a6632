"""Groups of ranks that train apart, through the entry points: alone, in layouts, resumed, and when one is killed."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import numpy as np
import psutil
import pytest
import torch

from bench.contract import mllog
from bench.mlperf import reader
from bench.mlperf.result import Result, parse
from helpers import ranks
from helpers.short_training import WORDS, values
from jobs.weights.checkpoint_reader import Reader, Wanted

pytestmark = pytest.mark.trains

TOLERANCE = 1e-5 if ranks.DEVICE == "cpu" else 1e-4
NESTEROV = tuple(f"recipe.local_sgd.{word}" for word in ("average=nesterov", "outer_lr=0.7", "outer_momentum=0.9"))
EVERY_3 = ("recipe.local_sgd.every_steps=3", "task=pretrain_tiny_apart", *NESTEROV, *WORDS)
SAVED = "task.training.checkpoint_every_steps=4"
LORA = """# @package _global_
defaults: [lora_tiny, _self_]
task: {benchmark: null, training: {target_eval_loss: null}}
parallel: {groups: 2}
recipe: {eval_skip: 0, local_sgd: {every_steps: 3, overlap_steps: 1, compress: int8}}
"""
"""A task of a site."""
MEAN = ("average=parameters", "outer_lr=1", "outer_momentum=0")


def trained(folder: Path, num_ranks: int, *overrides: str) -> Path:
    """Return the log of a trial by so many ranks; the folder may hold checkpoints."""
    made = ranks.compose(folder.parent, f"cluster.ranks_per_node={num_ranks}", *overrides)
    if not folder.exists():
        ranks.write(made, folder)
    ranks.run(made, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return folder / "result_0.txt"


def test_one_group_is_plain_training_bit_for_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", 1, "task=pretrain_tiny", *WORDS)
    mean = [f"recipe.local_sgd.{setting}" for setting in MEAN]
    alone = trained(tmp_path / "alone", 1, *EVERY_3, "parallel.groups=1", *mean)
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        assert values(alone, key) == values(plain, key)
    assert [step for step, _ in values(alone, mllog.OUTER_STEP)] == [3, 6, 9, 12]


def test_a_merge_after_each_step_of_sgd_is_plain_data_parallelism(tmp_path: Path) -> None:
    """The outer optimizer is SGD of rate 1 without momentum, and so the inner one must be SGD too."""
    sgd = (*WORDS, *ranks.SGD, "task.training.checkpoint_every_steps=12")
    one = [f"recipe.local_sgd.{word}" for word in ("every_steps=1", "average=nesterov", *MEAN[1:])]
    plain = trained(tmp_path / "plain", 2, "task=pretrain_tiny", *sgd)
    apart = trained(tmp_path / "apart", 2, "task=pretrain_tiny_apart", *one, *sgd)
    losses = [loss for _, loss in values(plain, mllog.EVAL_ACCURACY)]
    assert losses[-1] < losses[0] - 0.01, "something was learned"
    expected, got = (weights(log.parent / "checkpoints" / "trial_0" / "step_12") for log in (plain, apart))
    assert sum(weight.numel() for weight in expected.values()) == parse(plain).hyperparameters["trainable_parameters"]
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE / 10)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the master weights of a training state."""
    reader, found = Reader(folder), {}
    for name in (name for name in reader.names() if name.startswith(("embedding", "decoder", "output"))):
        whole = reader.stored(name).whole
        found[name] = torch.empty(whole)
        reader.read([Wanted(name, whole, (0,) * len(whole), found[name])])
    return found


def test_all_groups_start_from_the_same_weights(tmp_path: Path) -> None:
    """A learning rate of nearly nothing changes none, so that merged weights are those of plain training."""
    still = ("recipe.lr=1e-12", "task.training.max_steps=3")
    plain = trained(tmp_path / "plain", 1, "task=pretrain_tiny", *WORDS, *still)
    apart = trained(tmp_path / "apart", 2, *EVERY_3, *still)
    expected, got = (values(log, mllog.EVAL_ACCURACY) for log in (plain, apart))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two groups of one rank, saved after 4, 8 and 12 steps, of which the first two lie between merges."""
    folder = tmp_path_factory.mktemp("apart") / "whole"
    return trained(folder, 2, *EVERY_3, SAVED)


def gone_on(folder: Path, whole: Path, num_ranks: int, *words: str) -> Path:
    """Return the log of a run that goes on after 8 steps, two after a merge, from the checkpoints of another one."""
    made = ranks.compose(folder.parent, f"cluster.ranks_per_node={num_ranks}", *EVERY_3, SAVED, *words)
    shutil.copytree(whole.parent / "checkpoints", ranks.write(made, folder) / "checkpoints")
    for last in folder.rglob("step_12"):
        shutil.rmtree(last)
    log = trained(folder, num_ranks, *EVERY_3, SAVED, *words)
    assert values(log, mllog.RESUMED) == [(8, 8)]
    return log


def test_a_run_that_goes_on_is_the_run_without_a_break(tmp_path: Path, whole: Path) -> None:
    """Each group goes on from its own weights, and all from the outer weights and momentum of the last merge."""
    log = gone_on(tmp_path / "resumed", whole, 2)
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        assert values(log, key) == values(whole, key, after=8)
    assert losses_by_group(log) == losses_by_group(whole)[-2:]


def losses_by_group(log: Path) -> list[dict[str, float]]:
    return [event.metadata["losses"] for event in reader.read(log)[0] if event.key == mllog.OUTER_STEP]


@pytest.mark.parametrize(
    "split",
    [
        ("parallel.tp=2",),
        pytest.param(("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.slow),
    ],
)
def test_a_group_may_be_any_layout(tmp_path: Path, whole: Path, split: tuple[str, ...]) -> None:
    """Two ranks a group, that go on from the states of one a group."""
    log = gone_on(tmp_path / "split", whole, 4, *split)
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        np.testing.assert_allclose(values(log, key), values(whole, key, after=8), rtol=0, atol=TOLERANCE)


def test_adapters_are_merged_while_training_goes_on(tmp_path: Path) -> None:
    site = tmp_path / "site" / "task"
    site.mkdir(parents=True)
    (site / "lora_apart.yaml").write_text(LORA)
    words = (f"hydra.searchpath=['file://{site.parent}']", "task=lora_apart", *WORDS, "recipe.eval_every_samples=48")
    log = trained(tmp_path / "lora", 2, *words)
    result = parse(log)
    assert result.valid and result.apart is not None
    assert (result.apart.groups, result.apart.merges, result.apart.left) == (2, 4, {})
    merges = [event for event in reader.read(log)[0] if event.key == mllog.OUTER_STEP]
    assert [(e.metadata["merge_step"], e.metadata["step"]) for e in merges] == [(3, 4), (6, 6), (9, 10), (12, 12)]
    trainable = parse(log).hyperparameters["trainable_parameters"]
    assert trainable <= merges[0].metadata["rank_bytes"] <= 1.1 * trainable + 1024, "INT8, and two groups"


def killed_in_the_middle(tmp_path: Path, spawn: Callable[..., "Popen[str]"], *words: str) -> tuple[str, Result]:
    """Return what a run printed whose rank 1 was killed after two merges, and its result."""
    run = tmp_path / "run"
    settings = ("task=pretrain_tiny_apart", *WORDS, "recipe.local_sgd.time_limit_s=3", *words)
    command = [sys.executable, "-m", "bench.launch", *settings, f"launch.folder={run}"]
    process = spawn(command, {"DATADIR": str(tmp_path), "LOGDIR": str(tmp_path)})
    log = run / "result_0.txt"
    while not log.exists() or log.read_text().count(mllog.OUTER_STEP) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    killed = next(p for p in children if "jobs.tasks.train" in p.cmdline() and p.environ().get("RANK") == "1")
    os.kill(killed.pid, signal.SIGKILL)
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    assert json.loads((run / "status.json").read_text())["outcome"] == "proven"
    result = parse(log)
    assert result.valid and result.status == mllog.SUCCESS and result.apart is not None
    return output, result


@pytest.mark.starts
def test_the_others_finish_when_a_group_is_killed(tmp_path: Path, spawn: Callable[..., "Popen[str]"]) -> None:
    steps, log = 60, tmp_path / "run" / "result_0.txt"
    output, result = killed_in_the_middle(tmp_path, spawn, f"task.training.max_steps={steps}", EVERY_3[0])
    assert "group 1 LEFT after step" in output
    assert result.apart is not None and list(result.apart.left) == ["1"]
    assert [finding.rule for finding in result.findings if finding.rule == "RUN-19"] == ["RUN-19"]
    last = [event for event in reader.read(log)[0] if event.key == mllog.OUTER_STEP][-1]
    assert (last.metadata["merge_step"], last.metadata["groups"]) == (steps, [0])
    assert last.metadata["samples_count"] == 8 * steps, "the rows of the group that left were trained on by the other"


@pytest.mark.starts
@pytest.mark.slow
def test_a_group_that_was_killed_is_started_again_and_joins(tmp_path: Path, spawn: Callable[..., "Popen[str]"]) -> None:
    """The others wait for it so long that it has been started again meanwhile; if not, it joins at a later merge."""
    steps, log = 400, tmp_path / "run" / "result_0.txt"
    settings = ("restarts=1", "every_steps=20", "time_limit_s=25")
    words = [*(f"recipe.local_sgd.{setting}" for setting in settings), "recipe.micro_batch_size=1"]
    rows = ("model.weights=checkpoint", "data.seq_length=96", f"data.train_rows={8 * steps}")
    ends = (f"task.training.max_steps={steps}", f"recipe.eval_every_samples={8 * steps}", "recipe.log_every_steps=20")
    output, result = killed_in_the_middle(tmp_path, spawn, *NESTEROV, *words, *rows, *ends)
    assert result.apart is not None and list(result.apart.left) == list(result.apart.joined) == ["1"]
    left, joined = result.apart.left["1"], result.apart.joined["1"]
    assert left is not None and joined is not None and 40 < left <= joined < steps
    assert f"group 1 LEFT after step {left}; group 1 joined again after step {joined}" in output
    events = reader.read(log)[0]
    merges = [event.metadata for event in events if event.key == mllog.OUTER_STEP]
    assert all(merge["groups"] == ([0] if left <= merge["merge_step"] <= joined else [0, 1]) for merge in merges)
    (entry,) = (event.metadata for event in events if event.key == mllog.GROUP_JOINED)
    trainable = result.hyperparameters["trainable_parameters"]
    sizes = entry["rank_bytes"] / (4 * trainable)
    assert 5 <= sizes < 5.1, "weights, two moments, outer weights and their momentum, a little filled up"
    after = next(merge["losses"] for merge in merges if merge["merge_step"] == joined + 20)
    assert after["0"] < 3 and abs(after["1"] - after["0"]) < 0.5, "it goes on from what was learned"
    assert result.findings and all(finding.severity == "warning" for finding in result.findings)
