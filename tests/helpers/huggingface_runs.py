"""Runs of engine=huggingface for tests: their plans, their start on two CPU ranks, and what they leave."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.contract.plan import Plan
from bench.mlperf import reader
from helpers import ranks
from helpers.paths import ROOT

STEPS = 10
SHORT_RUN = (
    *("cluster.ranks_per_node=2", "precision=fp32", "task.training.target_eval_loss=null", "model.num_layers=2"),
    *(f"task.training.max_steps={STEPS}", "recipe.global_batch_size=8", "recipe.micro_batch_size=2"),
    *("recipe.lr=0.004", "recipe.lr_warmup_steps=4", "recipe.weight_decay=0.3", "recipe.clip_grad=0.5"),
    *("recipe.log_every_steps=1", "recipe.eval_every_samples=8", f"recipe.eval_skip={STEPS - 1}"),
    *("recipe.warmup_iterations=1", "data.eval_rows=11", "data.train_rows=64", "model.hidden_size=64"),
)
"""Two micro-batches a step on each of two ranks."""
TRAINS = {
    "all": ("task.training.trains=all", "task.training.lora=null", "task.benchmark=null"),
    "lora": ("task.training.lora.dropout=0",),
}
BLOCK = "engine.huggingface"
FSDP2, ZERO = f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.strategy=deepspeed"


def needed() -> None:
    """Skip the module where Hugging Face's libraries are not installed."""
    for name in ("transformers", "accelerate", "peft", "deepspeed", "bitsandbytes"):
        if find_spec(name) is None:  # importing them takes seconds
            pytest.skip(f"{name} is not installed (pip install 'runstop[huggingface]')", allow_module_level=True)


def composed(folder: Path, *overrides: str, huggingface: bool = True) -> Plan:
    """Return a plan of Hugging Face, or of our engine."""
    return ranks.compose(folder, *SHORT_RUN, *(("engine=huggingface",) if huggingface else ()), *overrides)


def made_by_megatron(folder: Path) -> None:
    """Make rows and a base with our engine, and its runs, megatron_all and megatron_lora with its adapters_0."""
    first = ranks.compose(folder, *SHORT_RUN, "cluster.ranks_per_node=1")
    ranks.run(first, ranks.write(first, folder / "prepare"), "jobs.tasks.prepare", "plan.json")
    plans = {trains: composed(folder, *overrides, huggingface=False) for trains, overrides in TRAINS.items()}
    for trains, plan in plans.items():
        run = ranks.write(plan, folder / f"megatron_{trains}")
        ranks.run(plan, run, "jobs.tasks.train", "plan.json", "--trial", "0")


def trained(plans: dict[str, Plan], folder: Path) -> None:
    """Train plans of Hugging Face in one start of their ranks, in folders of their names, one after the other."""
    for name, plan in plans.items():
        if not (folder / name / "plan.json").exists():
            ranks.write(plan, folder / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.huggingface_ranks", *(str(folder / name) for name in plans)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def losses(run: Path) -> list[float]:
    return ranks.train_losses(run / "result_0.txt")


def held(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return what each rank holds of the weights, or updates of them."""
    return [json.loads(path.read_text())[kind] for path in sorted(run.glob("held_*.json"))]


def facts(run: Path) -> dict[str, reader.Event]:
    """Return the last record of each key of a run's log."""
    return {event.key: event for event in reader.read(run / "result_0.txt")[0]}
