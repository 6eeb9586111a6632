"""Local SGD through the entry points: one group, layouts, resuming, and a killed group."""

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
NESTEROV = tuple(
    f"recipe.local_sgd.{setting}" for setting in ("average=nesterov", "outer_lr=0.7", "outer_momentum=0.9")
)
EVERY_3 = ("recipe.local_sgd.every_steps=3", "task=pretrain_tiny_local_sgd", *NESTEROV, *WORDS)
SAVED = "task.training.checkpoint_every_steps=4"
LORA = """# @package _global_
defaults: [lora_tiny, _self_]
task: {benchmark: null, training: {target_eval_loss: null}}
parallel: {groups: 2}
recipe: {eval_skip: 0, local_sgd: {every_steps: 3, overlap_steps: 1, compress: int8}}
"""
"""A task in a site's config folder."""
MEAN = ("average=parameters", "outer_lr=1", "outer_momentum=0")


def trained(folder: Path, num_ranks: int, *overrides: str) -> Path:
    """Return the log of a trial with num_ranks ranks; the folder may contain checkpoints."""
    plan = ranks.compose(folder.parent, f"cluster.ranks_per_node={num_ranks}", *overrides)
    if not folder.exists():
        ranks.write(plan, folder)
    ranks.run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return folder / "result_0.txt"


def test_one_group_is_plain_training_bit_for_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", 1, "task=pretrain_tiny", *WORDS)
    mean = [f"recipe.local_sgd.{setting}" for setting in MEAN]
    alone = trained(tmp_path / "alone", 1, *EVERY_3, "parallel.groups=1", *mean)
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        assert values(alone, key) == values(plain, key)
    assert [step for step, _ in values(alone, mllog.OUTER_STEP)] == [3, 6, 9, 12]


def test_averaging_after_each_sgd_step_is_plain_data_parallelism(tmp_path: Path) -> None:
    """The outer optimizer is SGD of rate 1 without momentum, and so the inner one must be SGD too."""
    sgd = (*WORDS, *ranks.SGD, "task.training.checkpoint_every_steps=12")
    one = [f"recipe.local_sgd.{setting}" for setting in ("every_steps=1", "average=nesterov", *MEAN[1:])]
    plain = trained(tmp_path / "plain", 2, "task=pretrain_tiny", *sgd)
    local_sgd = trained(tmp_path / "local_sgd", 2, "task=pretrain_tiny_local_sgd", *one, *sgd)
    losses = [loss for _, loss in values(plain, mllog.EVAL_ACCURACY)]
    assert losses[-1] < losses[0] - 0.01, "something was learned"
    expected, got = (weights(log.parent / "checkpoints" / "trial_0" / "step_12") for log in (plain, local_sgd))
    assert sum(weight.numel() for weight in expected.values()) == parse(plain).hyperparameters["trainable_parameters"]
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=TOLERANCE / 10)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the master weights of a training state."""
    reader, tensors = Reader(folder), {}
    for name in (name for name in reader.names() if name.startswith(("embedding", "decoder", "output"))):
        whole = reader.stored(name).whole
        tensors[name] = torch.empty(whole)
        reader.read([Wanted(name, whole, (0,) * len(whole), tensors[name])])
    return tensors


def test_all_groups_start_from_the_same_weights(tmp_path: Path) -> None:
    """With a learning rate near 0 no weight changes, so that the averaged weights equal those of plain training."""
    still = ("recipe.lr=1e-12", "task.training.max_steps=3")
    plain = trained(tmp_path / "plain", 1, "task=pretrain_tiny", *WORDS, *still)
    local_sgd = trained(tmp_path / "local_sgd", 2, *EVERY_3, *still)
    expected, got = (values(log, mllog.EVAL_ACCURACY) for log in (plain, local_sgd))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two groups of one rank, saved after 4, 8 and 12 steps; the first two are between weight averagings."""
    folder = tmp_path_factory.mktemp("local_sgd") / "whole"
    return trained(folder, 2, *EVERY_3, SAVED)


def resumed(folder: Path, whole: Path, num_ranks: int, *words: str) -> Path:
    """Return the log of a run that resumes after 8 steps, two after an averaging, from the checkpoints of another."""
    plan = ranks.compose(folder.parent, f"cluster.ranks_per_node={num_ranks}", *EVERY_3, SAVED, *words)
    shutil.copytree(whole.parent / "checkpoints", ranks.write(plan, folder) / "checkpoints")
    for last in folder.rglob("step_12"):
        shutil.rmtree(last)
    log = trained(folder, num_ranks, *EVERY_3, SAVED, *words)
    assert values(log, mllog.RESUMED) == [(8, 8)]
    return log


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, whole: Path) -> None:
    """Each group resumes from its own weights, and all from the outer weights and momentum of the last averaging."""
    log = resumed(tmp_path / "resumed", whole, 2)
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
    """Groups of two ranks resume from the state of groups of one rank."""
    log = resumed(tmp_path / "split", whole, 4, *split)
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        np.testing.assert_allclose(values(log, key), values(whole, key, after=8), rtol=0, atol=TOLERANCE)


def test_adapters_are_averaged_while_training_continues(tmp_path: Path) -> None:
    site = tmp_path / "site" / "task"
    site.mkdir(parents=True)
    (site / "lora_local_sgd.yaml").write_text(LORA)
    words = (
        f"hydra.searchpath=['file://{site.parent}']",
        "task=lora_local_sgd",
        *WORDS,
        "recipe.eval_every_samples=48",
    )
    log = trained(tmp_path / "lora", 2, *words)
    result = parse(log)
    assert result.valid and result.local_sgd is not None
    assert (result.local_sgd.groups, result.local_sgd.averagings, result.local_sgd.left) == (2, 4, {})
    averagings = [event for event in reader.read(log)[0] if event.key == mllog.OUTER_STEP]
    assert [(e.metadata["merge_step"], e.metadata["step"]) for e in averagings] == [(3, 4), (6, 6), (9, 10), (12, 12)]
    trainable = parse(log).hyperparameters["trainable_parameters"]
    assert trainable <= averagings[0].metadata["rank_bytes"] <= 1.1 * trainable + 1024, "INT8, and two groups"


def killed_in_the_middle(tmp_path: Path, spawn: Callable[..., "Popen[str]"], *words: str) -> tuple[str, Result]:
    """Return the output and the result of a run whose rank 1 was killed after two weight averagings."""
    run = tmp_path / "run"
    settings = ("task=pretrain_tiny_local_sgd", *WORDS, "recipe.local_sgd.time_limit_s=3", *words)
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
    assert json.loads((run / "status.json").read_text())["outcome"] == "valid"
    result = parse(log)
    assert result.valid and result.status == mllog.SUCCESS and result.local_sgd is not None
    return output, result


@pytest.mark.starts
def test_the_other_groups_finish_when_a_group_is_killed(tmp_path: Path, spawn: Callable[..., "Popen[str]"]) -> None:
    steps, log = 60, tmp_path / "run" / "result_0.txt"
    output, result = killed_in_the_middle(tmp_path, spawn, f"task.training.max_steps={steps}", EVERY_3[0])
    assert "group 1 LEFT after step" in output
    assert result.local_sgd is not None and list(result.local_sgd.left) == ["1"]
    assert [finding.rule for finding in result.findings if finding.rule == "RUN-19"] == ["RUN-19"]
    last = [event for event in reader.read(log)[0] if event.key == mllog.OUTER_STEP][-1]
    assert (last.metadata["merge_step"], last.metadata["groups"]) == (steps, [0])
    assert last.metadata["samples_count"] == 8 * steps, "the other group trained on the rows of the group that left"


@pytest.mark.starts
@pytest.mark.slow
def test_a_killed_group_is_restarted_and_rejoins(tmp_path: Path, spawn: Callable[..., "Popen[str]"]) -> None:
    """The other groups usually wait until it was restarted; if not, it rejoins at a later averaging."""
    steps, log = 400, tmp_path / "run" / "result_0.txt"
    settings = ("restarts=1", "every_steps=20", "time_limit_s=25")
    words = [*(f"recipe.local_sgd.{setting}" for setting in settings), "recipe.micro_batch_size=1"]
    rows = ("model.weights=checkpoint", "data.seq_length=96", f"data.train_rows={8 * steps}")
    ends = (f"task.training.max_steps={steps}", f"recipe.eval_every_samples={8 * steps}", "recipe.log_every_steps=20")
    output, result = killed_in_the_middle(tmp_path, spawn, *NESTEROV, *words, *rows, *ends)
    assert result.local_sgd is not None and list(result.local_sgd.left) == list(result.local_sgd.joined) == ["1"]
    left, joined = result.local_sgd.left["1"], result.local_sgd.joined["1"]
    assert left is not None and joined is not None and 40 < left <= joined < steps
    assert f"group 1 LEFT after step {left}; group 1 rejoined after step {joined}" in output
    events = reader.read(log)[0]
    averagings = [event.metadata for event in events if event.key == mllog.OUTER_STEP]
    assert all(one["groups"] == ([0] if left <= one["merge_step"] <= joined else [0, 1]) for one in averagings)
    (entry,) = (event.metadata for event in events if event.key == mllog.GROUP_JOINED)
    trainable = result.hyperparameters["trainable_parameters"]
    sizes = entry["rank_bytes"] / (4 * trainable)
    assert 5 <= sizes < 5.1, "weights, two moments, outer weights and their momentum, with padding"
    after = next(one["losses"] for one in averagings if one["merge_step"] == joined + 20)
    assert after["0"] < 3 and abs(after["1"] - after["0"]) < 0.5, "it resumes from the trained state"
    assert result.findings and all(finding.severity == "warning" for finding in result.findings)
