"""engine=huggingface compared with engine=megatron: the same losses in every strategy, and the shards of the strategy.

engine=megatron is compared with transformers, PEFT and torch's AdamW in tests/engines/megatron. Both start from the
base that engine=megatron has prepared for lora_tiny.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from bench.contract import mllog
from bench.mlperf.result import parse
from helpers import ranks
from helpers.chosen import chosen
from helpers.huggingface_runs import BLOCK, FSDP2, STEPS, TRAINS, ZERO, composed, facts, held, losses, needed, trained

needed()
pytestmark = [pytest.mark.trains, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

STRATEGIES = {"ddp": (), "fsdp2": (FSDP2,)} | {
    f"zero{stage}": (ZERO, f"{BLOCK}.zero_stage={stage}") for stage in range(4)
}
OF_TESTS = [
    pytest.param(name, marks=pytest.mark.slow if name in ("zero0", "zero1", "zero2") else ()) for name in STRATEGIES
]
QLORA = ("task.training.trains=qlora", "precision=bf16")
ROWS = {"all": 2, "lora": 4}
"""Micro-batch sizes with two and with one micro-batch a step: the losses do not depend on it."""
SHARDED = {"fsdp2", "zero3"}
"""Strategies in which a rank holds half of the weights. With ZeRO 1 and 2 it updates half of the trained weights."""


@pytest.fixture(scope="module")
def folder(runs: Path, request: pytest.FixtureRequest) -> Path:
    """Every strategy of the chosen tests, full fine-tuning and LoRA, trained in one start of the ranks."""
    plans = {
        f"{strategy}_{trains}": composed(runs, *TRAINS[trains], *overrides, f"recipe.micro_batch_size={ROWS[trains]}")
        for strategy, overrides in STRATEGIES.items()
        if (strategy,) in chosen(request, "strategy")
        for trains in TRAINS
    }
    plans |= {"from_megatron": composed(runs, *TRAINS["lora"]), "qlora": composed(runs, *TRAINS["lora"], *QLORA)}
    shutil.copytree(
        runs / "megatron_lora" / "adapters_0", ranks.write(plans["from_megatron"], runs / "from_megatron") / "given"
    )
    trained(plans, runs)
    return runs


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("strategy", OF_TESTS)
def test_every_strategy_has_the_losses_of_megatron(strategy: str, trains: str, folder: Path) -> None:
    expected, got = losses(folder / f"megatron_{trains}"), losses(folder / f"{strategy}_{trains}")
    assert len(got) == STEPS and expected[-1] < expected[0] - 0.1, "the loss must have fallen"
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("strategy", OF_TESTS)
def test_ranks_hold_and_update_the_parts_of_their_strategy(strategy: str, trains: str, folder: Path) -> None:
    """If all ranks held the full model, the losses would be the same, but another strategy would be measured."""
    run, whole = folder / f"{strategy}_{trains}", folder / f"ddp_{trains}"
    (numbers, _), updated = held(whole, "held"), sum(held(whole, "updated")[0].values())
    share = 2 if strategy in SHARDED else 1
    for own in held(run, "held"):
        assert own.keys() == numbers.keys()
        assert all(size == numbers[name] / share for name, size in own.items())
    assert {flag for own in held(run, "is_dtensor") for flag in own.values()} == {strategy == "fsdp2"}
    is_update_split = strategy not in ("ddp", "zero0")
    assert [sum(own.values()) for own in held(run, "updated")] == [updated / (2 if is_update_split else 1)] * 2
    logged = facts(run)[mllog.STRATEGY]
    assert logged.value == ("deepspeed" if strategy.startswith("zero") else strategy)
    assert logged.metadata["rank_bytes"] == [4 * sum(own.values()) for own in held(run, "held")]
    assert facts(run)[mllog.ATTENTION_BACKEND].value == "flash"


def test_adapters_of_megatron_load_in_huggingface(folder: Path) -> None:
    before = parse(folder / "megatron_lora" / "result_0.txt").eval_final
    assert before < losses(folder / "megatron_lora")[0] - 0.1, "the loss has fallen"
    assert [float((folder / "from_megatron" / f"given_{rank}.txt").read_text()) for rank in range(2)] == pytest.approx(
        [before, before], abs=1e-4
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_adapters_of_huggingface_load_in_megatron_and_in_peft(strategy: str, folder: Path) -> None:
    run = folder / f"{strategy}_lora"
    plan = composed(folder, *TRAINS["lora"], "parallel.tp=2", huggingface=False)
    alone = ranks.write(plan, folder / f"reload_{strategy}")
    outputs = ranks.ended(plan, alone, "tests.helpers.probe", "evaluate", "plan.json", str(run / "adapters"))
    eval_losses = [float(output.split("eval loss")[-1]) for code, output in outputs if code == 0]
    assert eval_losses == pytest.approx([parse(run / "result_0.txt").eval_final] * 2, abs=1e-4), outputs
    content = load_file(run / "adapters" / "adapter_model.safetensors")
    assert len(content) == 2 * 4 * 2, "A and B of four projections in two layers"
    assert json.loads((run / "adapters" / "adapter_config.json").read_text())["r"] == plan.config.training.lora.rank


def test_adapters_on_a_4_bit_base_learn(folder: Path) -> None:
    got, expected = losses(folder / "qlora"), losses(folder / "megatron_lora")
    assert 1e-3 < abs(got[0] - expected[0]) < 0.2, "4 bits change the base's output slightly"
    assert got[-1] < got[0] - 0.5
    (whole, _), (frozen, _) = held(folder / "ddp_lora", "bytes"), held(folder / "qlora", "bytes")
    assert frozen < whole / 2
    assert facts(folder / "qlora")[mllog.BF16_MODE].value == "autocast"
