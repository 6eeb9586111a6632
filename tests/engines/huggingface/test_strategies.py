"""engine=huggingface against ours: the same losses in every strategy, and shards where a strategy says so.

Ours is compared with transformers, PEFT and torch's AdamW in tests/engines. Both start from the base that ours has
prepared for lora_tiny.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.contract import mllog
from bench.contract.plan import Plan
from bench.mlperf import reader
from helpers import ranks
from helpers.paths import ROOT

for name in ("transformers", "accelerate", "peft", "deepspeed", "bitsandbytes"):
    pytest.importorskip(name, reason="pip install 'runstop[peer]'")

pytestmark = [pytest.mark.trains, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

STEPS = 20
SHORT = (
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
ZERO = {f"zero{stage}": (f"{BLOCK}.strategy=deepspeed", f"{BLOCK}.zero_stage={stage}") for stage in range(4)}
STRATEGIES = {"ddp": (), "fsdp2": (f"{BLOCK}.strategy=fsdp2",)} | ZERO
SHARDED = {"fsdp2", "zero3"}
"""Where a rank holds half of the weights; with ZeRO 1 and 2 it updates half of what is trained."""


def composed(folder: Path, *overrides: str, peer: bool = True) -> Plan:
    """Return a plan of the peer, or of our engine."""
    return ranks.compose(folder, *SHORT, *(("engine=huggingface",) if peer else ()), *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache holds rows and a base that our engine has trained, and our engine's runs."""
    made = tmp_path_factory.mktemp("peer")
    first = ranks.compose(made, *SHORT, "cluster.ranks_per_node=1")
    ranks.run(first, ranks.write(first, made / "prepare"), "jobs.tasks.prepare", "plan.json")
    plans = {trains: composed(made, *overrides, peer=False) for trains, overrides in TRAINS.items()}
    runs = [ranks.write(plan, made / f"megatron_{trains}") for trains, plan in plans.items()]
    ranks.run(plans["all"], made, "tests.helpers.curves", *map(str, runs))
    return made


def trained(plans: dict[str, Plan], folder: Path) -> None:
    """Train plans of the peer in one start of two ranks, in folders of their names."""
    runs = [
        folder / name if (folder / name).exists() else ranks.write(plan, folder / name) for name, plan in plans.items()
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.peer", *map(str, runs)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """The runs of every strategy, whole and LoRA, in one start."""
    plans = {
        f"{strategy}_{trains}": composed(folder, *TRAINS[trains], *overrides)
        for strategy, overrides in STRATEGIES.items()
        for trains in TRAINS
    }
    trained(plans, folder)
    return folder


def losses(run: Path) -> list[float]:
    return ranks.train_losses(run / "result_0.txt")


def held(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return what each rank holds of the weights, or updates of them."""
    return [json.loads((run / f"held_{rank}.json").read_text())[kind] for rank in range(2)]


def facts(run: Path) -> dict[str, reader.Event]:
    return {event.key: event for event in reader.read(run / "result_0.txt")[0]}


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_as_our_engine_does(strategy: str, trains: str, runs: Path) -> None:
    expected, got = losses(runs / f"megatron_{trains}"), losses(runs / f"{strategy}_{trains}")
    assert len(got) == STEPS and expected[-1] < expected[0] - 0.1, "it must have learned"
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_hold_and_update_what_their_strategy_says(strategy: str, trains: str, runs: Path) -> None:
    """A strategy whose ranks all hold the whole model would learn the same and measure something else."""
    run, whole = runs / f"{strategy}_{trains}", runs / f"ddp_{trains}"
    (numbers, _), updated = held(whole, "held"), sum(held(whole, "updated")[0].values())
    share = 2 if strategy in SHARDED else 1
    for own in held(run, "held"):
        assert own.keys() == numbers.keys()
        assert all(size == numbers[name] / share for name, size in own.items())
    assert {flag for own in held(run, "is_dtensor") for flag in own.values()} == {strategy == "fsdp2"}
    is_update_split = strategy not in ("ddp", "zero0")
    assert [sum(own.values()) for own in held(run, "updated")] == [updated / (2 if is_update_split else 1)] * 2
    logged = facts(run)[mllog.STRATEGY]
    assert logged.value == ("deepspeed" if strategy in ZERO else strategy)
    assert logged.metadata["rank_bytes"] == [4 * sum(own.values()) for own in held(run, "held")]
    assert facts(run)[mllog.ATTENTION_BACKEND].value == "flash"
