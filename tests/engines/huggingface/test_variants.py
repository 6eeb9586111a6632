"""What a run may change besides its strategy: 4-bit bases, offloading, recomputation, BF16, checkpoints, adapters."""

from pathlib import Path

import numpy as np
import pytest

from bench.contract import mllog
from helpers import ranks
from helpers.peer_runs import BLOCK, FSDP2, TRAINS, ZERO, composed, facts, losses, needed, trained

needed()
pytestmark = [pytest.mark.trains, pytest.mark.slow, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

BF16 = "precision=bf16"
SAME = {
    "offloaded_activations": ("all", f"{BLOCK}.offload_activations=true"),
    "offloaded_fsdp2": ("all", FSDP2, f"{BLOCK}.offload_parameters=true"),
    "recomputed_ddp": ("all", "recipe.recompute=full"),
    "recomputed_fsdp2": ("lora", FSDP2, "recipe.recompute=full"),
    "recomputed_zero3": ("lora", ZERO, f"{BLOCK}.zero_stage=3", f"{BLOCK}.activation_checkpointing=true"),
    "eager": ("all", f"{BLOCK}.attention=eager"),
}
"""What changes where numbers lie or when they are computed, and none of them."""
CLOSE = {
    "bf16_ddp": ("all", BF16),
    "bf16_fsdp2": ("lora", BF16, FSDP2),
    "bf16_zero0": ("lora", BF16, ZERO),
    "bf16_zero1": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=1"),
    "bf16_zero2": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=2"),
    "bf16_zero3": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=3"),
    "bf16_pure": ("lora", BF16, f"{BLOCK}.bf16=pure"),
    "bf16_pure_fsdp2": ("all", BF16, FSDP2, f"{BLOCK}.bf16=pure"),
}
"""What rounds."""


@pytest.fixture(scope="module")
def folder(runs: Path) -> Path:
    """All of them, trained in one start."""
    plans = {name: composed(runs, *TRAINS[trains], *overrides) for name, (trains, *overrides) in (SAME | CLOSE).items()}
    trained(plans, runs)
    return runs


@pytest.mark.parametrize("name", SAME)
def test_where_numbers_lie_changes_none(name: str, folder: Path) -> None:
    expected = losses(folder / f"megatron_{SAME[name][0]}")
    np.testing.assert_allclose(losses(folder / name), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CLOSE)
def test_bf16_learns_close_to_fp32(name: str, folder: Path) -> None:
    expected, got = losses(folder / f"megatron_{CLOSE[name][0]}"), losses(folder / name)
    assert 1e-4 < np.abs(np.subtract(got, expected)).max() < 0.1
    types = facts(folder / name)[mllog.BF16_MODE]
    wanted = {
        "deepspeed": ("bfloat16", "float32", "float32"),
        "autocast": ("float32", "float32", "float32"),
        "pure": ("bfloat16", "bfloat16", "bfloat16"),
    }
    assert tuple(types.metadata[key] for key in ("weights", "master", "moments")) == wanted[types.value]
