"""Training that was killed and goes on: the same curve as without, in the same layout and in others."""

import json
from pathlib import Path

import pytest

from helpers import ranks

pytestmark = pytest.mark.trains

STEPS, EVERY = 12, 4
TINY = (
    "task=pretrain_tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "data.train_rows=64",
    "data.eval_rows=8",
    "data.seq_length=24",
    "model.weights=random",
    f"task.training.max_steps={STEPS}",
    f"task.training.checkpoint_every_steps={EVERY}",
    "recipe.global_batch_size=8",
    "recipe.micro_batch_size=2",
    "recipe.lr_warmup_steps=2",
    "recipe.eval_every_samples=24",
    "recipe.log_every_steps=1",
    "recipe.weight_decay=0.1",
)
LAYOUTS = {
    "dp2": (2,),
    "dp2_whole": (2, "parallel.distributed_optimizer=false"),
    "tp2_sp": (2, "parallel.tp=2", "parallel.sp=true"),
    "pp2_vpp": (2, "parallel.pp=2", "parallel.vpp=1"),
    "single": (1,),
}


def folder_of(tmp: Path, name: str, *overrides: str) -> Path:
    num_ranks, *split = LAYOUTS[name.split(".")[0]]
    made = ranks.compose(tmp, f"cluster.ranks_per_node={num_ranks}", *TINY, *split, *overrides)
    if not (tmp / "cache").exists():
        ranks.run(made, ranks.write(made, tmp / "prepare"), "jobs.tasks.prepare", "plan.json")
    return ranks.write(made, tmp / name)


def trained(folder: Path, *command: str, code: int = 0) -> None:
    made = json.loads((folder / "plan.json").read_text())
    assert made
