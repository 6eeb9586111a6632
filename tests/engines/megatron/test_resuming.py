"""Training that is killed and resumes: bitwise the same losses in the same layout, and close losses in others."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.contract import mllog
from helpers import ranks
from helpers.short_training import WORDS, values

pytestmark = pytest.mark.trains

EVERY = 4
TOLERANCE = 1e-5 if ranks.DEVICE == "cpu" else 1e-4
TRAINING = (
    *WORDS,
    "task.benchmark=null",
    "task.training.target_eval_loss=null",
    f"task.training.checkpoint_every_steps={EVERY}",
    "recipe.eval_skip=0",
    "recipe.weight_decay=0.1",
)
ALL = ("task=pretrain_tiny", *TRAINING)
GPT3 = "model={norm: LayerNorm, activation: gelu, position: learned, bias: true, tied_embeddings: true}"
KINDS = {
    "dp2": ("cluster.ranks_per_node=2", *ALL, "precision=bf16"),
    "tp2_sp": ("cluster.ranks_per_node=2", "parallel.tp=2", "parallel.sp=true", *ALL),
    "lora": ("cluster.ranks_per_node=2", "task=lora_tiny", *TRAINING, "task.training.lora.dropout=0.3"),
}
"""A run of each kind is killed. They cover FP32 master weights of BF16 weights, weights split by TP, and dropout."""
OTHERS = {
    "tp2_sp to dp2": (KINDS["tp2_sp"], ("cluster.ranks_per_node=2", *ALL)),
    "dp2 to pp2_vpp2 gpt3": (
        ("cluster.ranks_per_node=2", *ALL, GPT3),
        ("cluster.ranks_per_node=2", "parallel.pp=2", "parallel.vpp=1", *ALL, GPT3),
    ),
}


def folder_of(path: Path, *overrides: str) -> Path:
    return ranks.write(ranks.compose(path.parent, *overrides), path)


def trained(folder: Path, *overrides: str) -> Path:
    """Train trial 0 and return its log; an existing log is renamed first, as the ledger does."""
    log = folder / "result_0.txt"
    if log.exists():
        log.rename(folder / "before.txt")
    ranks.run(ranks.compose(folder.parent, *overrides), folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return log


@pytest.mark.parametrize("kind", KINDS)
def test_run_killed_while_writing_a_checkpoint_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    plan = ranks.compose(tmp_path, *KINDS[kind])
    whole = trained(folder_of(tmp_path / "whole", *KINDS[kind]), *KINDS[kind])
    folder = folder_of(tmp_path / "killed", *KINDS[kind])
    ended = ranks.ended(plan, folder, "tests.helpers.killed", "plan.json", "8")
    assert [code for code, _ in ended] == [-9, -9], ended
    saved = folder / "checkpoints" / "trial_0"
    assert sorted(path.name for path in saved.iterdir()) == ["step_4", "step_8.part"]
    assert list((saved / "step_8.part").glob("*.tmp")), "a partly written file"

    log = trained(folder, *KINDS[kind])
    assert values(log, mllog.RESUMED) == [(4, 4)]
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        assert values(log, key) == values(whole, key, after=4)
    assert [step for step, _ in values(log, mllog.EVAL_ACCURACY)] == [6, 9, 12]
    assert sorted(path.name for path in saved.iterdir()) == ["step_12", "step_8"]


@pytest.mark.parametrize("kind", OTHERS)
def test_another_layout_resumes_with_the_same_losses(tmp_path: Path, kind: str) -> None:
    before, after = OTHERS[kind]
    log = trained(folder_of(tmp_path / "before", *before), *before)
    folder = folder_of(tmp_path / "after", *after)
    shutil.copytree(tmp_path / "before" / "checkpoints", folder / "checkpoints")
    resumed = trained(folder, *after)
    assert values(resumed, mllog.RESUMED) == [(8, 8)]
    for key in (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY):
        expected, got = values(log, key, after=8), values(resumed, key)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
