"""engine=huggingface against ours: the same losses in every strategy, and shards where a strategy says so.

Ours is compared with transformers, PEFT and torch's AdamW in tests/engines. Both start from the base that ours has
prepared for lora_tiny.
"""

from pathlib import Path

import numpy as np
import pytest

from bench.contract import mllog
from helpers import ranks
from helpers.peer_runs import BLOCK, FSDP2, STEPS, TRAINS, ZERO, composed, facts, held, losses, needed, trained

needed()
pytestmark = [pytest.mark.trains, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

STRATEGIES = {"ddp": (), "fsdp2": (FSDP2,)} | {
    f"zero{stage}": (ZERO, f"{BLOCK}.zero_stage={stage}") for stage in range(4)
}
SHARDED = {"fsdp2", "zero3"}
"""Where a rank holds half of the weights; with ZeRO 1 and 2 it updates half of what is trained."""


@pytest.fixture(scope="module")
def folder(runs: Path) -> Path:
    """Every strategy, whole and LoRA, trained in one start."""
    plans = {
        f"{strategy}_{trains}": composed(runs, *TRAINS[trains], *overrides)
        for strategy, overrides in STRATEGIES.items()
        for trains in TRAINS
    }
    trained(plans, runs)
    return runs


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_as_our_engine_does(strategy: str, trains: str, folder: Path) -> None:
    expected, got = losses(folder / f"megatron_{trains}"), losses(folder / f"{strategy}_{trains}")
    assert len(got) == STEPS and expected[-1] < expected[0] - 0.1, "it must have learned"
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_hold_and_update_what_their_strategy_says(strategy: str, trains: str, folder: Path) -> None:
    """A strategy whose ranks all hold the whole model would learn the same and measure something else."""
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
