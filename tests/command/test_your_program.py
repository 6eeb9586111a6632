"""The page docs/your-program.md, done as a user does it: its script, its task, its study, its placeholders."""

import hashlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.contract.program import GROUPS, PLACEHOLDERS
from bench.planning import compose
from helpers import answers
from helpers.paths import ROOT

PAGE = (ROOT / "docs/your-program.md").read_text()
ONE_RANK = "cluster.ranks_per_node=1"
SCRIPT = ROOT / "jobs/command/examples/plain_torch.py"


def test_the_page_shows_the_script_and_lists_every_placeholder_and_group() -> None:
    [shown] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert shown == SCRIPT.read_text()
    rows = dict(re.findall(r"^\| `\{(\w+)\}` \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows == PLACEHOLDERS
    assert all(f"`{group}`" in PAGE for group in GROUPS)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain_torch.py", "trl_sft.py"])
def test_the_examples_start_from_the_weights_of_engine_huggingface(name: str) -> None:
    """They copy its rule, because a user's script imports nothing of runstop; here their own lines are executed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jobs.engines.huggingface.weights import RandomWeights

    seed, plan = 5, compose.compose(["task=finetune_tiny_dolly", "cluster=local", "engine=huggingface"])
    [lines] = re.findall(
        r"^sizes = .*?^for .*?\n(?=\S|\n)", SCRIPT.with_name(name).read_text(), re.DOTALL | re.MULTILINE
    )
    own: dict[str, Any] = {"seed": seed, "hashlib": hashlib, "math": math, "torch": torch}
    own |= {"LlamaConfig": LlamaConfig, "LlamaForCausalLM": LlamaForCausalLM}
    exec(lines, own)
    theirs = RandomWeights(plan, seed, torch.device("cpu"))
    for weight_name, weight in own["model"].named_parameters():
        assert torch.equal(weight, theirs.read(weight_name, weight.shape)), weight_name


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with the files that the page tells the reader to write."""
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        if name := re.search(r"^# (site/\S+)", block, re.MULTILINE):
            path = tmp_path / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
    return tmp_path


def types(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    paths = {name: str(home / name.lower()) for name in ("DATADIR", "MODEL", "LOGDIR")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | paths | {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "bench", *words], cwd=home, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.trains
def test_the_same_fine_tuning_by_runstop_and_by_the_script_is_in_one_study(home: Path) -> None:
    plan = types(home, "plan", "--config-dir", "site", "task=finetune_tiny_dolly", "engine=plain", ONE_RANK)
    assert plan.returncode == 0, plan.stderr
    assert "not estimated: runstop does not know the memory of a program" in plan.stdout
    assert str(home / "train.py") in plan.stdout, "a file of this folder, because the program starts in another one"
    done = types(home, "study", "two_programs", "--config-dir", "site", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = answers.one(done.stdout)
    cells = {row["labels"]["program"]: row["cells"] for row in result["rows"]}
    losses = {arm: [cell["values"] for key, cell in own.items() if "loss" in key] for arm, own in cells.items()}
    assert sorted(losses) == ["plain PyTorch", "runstop"]
    [[ours], [theirs]] = losses["runstop"], losses["plain PyTorch"]
    assert ours == pytest.approx(theirs, rel=0.25), "the same rows, sizes, initial spread and rates, other weights"
    assert result["differences"][0]["comparison"]["verdict"] != "not compared"
    assert result["statements"][0]["verdict"] in ("holds", "undecided")
