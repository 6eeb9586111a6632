"""Settings besides the strategy: offloading, recomputation, compilation, BF16, hybrid sharding, checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.contract import mllog
from bench.mlperf.result import parse
from helpers import ranks
from helpers.huggingface_runs import BLOCK, FSDP2, TRAINS, ZERO, composed, facts, held, losses, needed, trained
from jobs.data.micro_batches import targets
from jobs.tasks import convert

needed()
pytestmark = [pytest.mark.trains, pytest.mark.slow, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

BF16 = "precision=bf16"
COMPILED = (f"{BLOCK}.compile=true", "recipe.warmup_iterations=2")
SAME = {
    "offloaded_activations": ("all", f"{BLOCK}.offload_activations=true"),
    "offloaded_fsdp2": ("all", FSDP2, f"{BLOCK}.offload_parameters=true"),
    "recomputed_ddp": ("all", "recipe.recompute=full"),
    "recomputed_fsdp2": ("lora", FSDP2, "recipe.recompute=full"),
    "recomputed_zero3": ("lora", ZERO, f"{BLOCK}.zero_stage=3", f"{BLOCK}.activation_checkpointing=true"),
    "offloaded_zero2": ("all", ZERO, f"{BLOCK}.zero_stage=2", f"{BLOCK}.offload_optimizer=true"),
    "offloaded_zero3": (
        *("all", ZERO, f"{BLOCK}.zero_stage=3"),
        *(f"{BLOCK}.offload_optimizer=true", f"{BLOCK}.offload_parameters=true"),
    ),
    "eager": ("all", f"{BLOCK}.attention=eager"),
    "compiled_ddp": ("lora", *COMPILED),
    "compiled_fsdp2": ("all", FSDP2, "recipe.recompute=full", *COMPILED),
    "compiled_zero3": ("all", ZERO, f"{BLOCK}.zero_stage=3", *COMPILED),
}
"""Settings that change where or when tensors are computed, but not their values."""
CLOSE = {
    "bf16_ddp": ("all", BF16),
    "bf16_fsdp2": ("lora", BF16, FSDP2),
    "bf16_zero0": ("lora", BF16, ZERO),
    "bf16_zero1": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=1"),
    "bf16_zero2": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=2"),
    "bf16_zero3": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=3"),
    "bf16_pure": ("lora", BF16, f"{BLOCK}.bf16=pure"),
    "bf16_pure_fsdp2": ("all", BF16, FSDP2, f"{BLOCK}.bf16=pure"),
    "bf16_pure_zero1": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=1", f"{BLOCK}.bf16=pure"),
    "bf16_pure_zero3": ("all", BF16, ZERO, f"{BLOCK}.zero_stage=3", f"{BLOCK}.bf16=pure"),
    "bf16_pure_offloaded_zero2": (
        *("all", BF16, ZERO, f"{BLOCK}.zero_stage=2"),
        *(f"{BLOCK}.bf16=pure", f"{BLOCK}.offload_optimizer=true"),
    ),
}
"""Settings that change rounding."""
SEPARATE = {"separate_ddp": (), "separate_fsdp2": (FSDP2,), "separate_zero3": (ZERO, f"{BLOCK}.zero_stage=3")}
"""Adapters with their own A, which tests/engines/huggingface/test_separate_adapters.py compares with PEFT's."""


@pytest.fixture(scope="module")
def folder(runs: Path) -> Path:
    """All variants, trained in one start of the ranks."""
    plans = {name: composed(runs, *TRAINS[trains], *overrides) for name, (trains, *overrides) in (SAME | CLOSE).items()}
    own_a = (*TRAINS["lora"], "task.training.lora.shared_a=false")
    plans |= {name: composed(runs, *own_a, *overrides) for name, overrides in SEPARATE.items()}
    trained(plans, runs)
    return runs


@pytest.mark.parametrize("name", SAME)
def test_offloading_and_recomputation_do_not_change_losses(name: str, folder: Path) -> None:
    expected = losses(folder / f"megatron_{SAME[name][0]}")
    np.testing.assert_allclose(losses(folder / name), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in SAME if name.startswith("compiled")])
def test_compile_time_is_logged_separately(name: str, folder: Path) -> None:
    """These ranks fail if anything is compiled after the warm-up."""
    log = facts(folder / name)
    assert log[mllog.COMPILE_TIME].value > 1 and log[mllog.STRATEGY].metadata["compile"] is True
    assert mllog.COMPILE_TIME not in facts(folder / "eager")


@pytest.mark.parametrize("name", CLOSE)
def test_bf16_learns_close_to_fp32(name: str, folder: Path) -> None:
    expected, got = losses(folder / f"megatron_{CLOSE[name][0]}"), losses(folder / name)
    assert 1e-4 < np.abs(np.subtract(got, expected)).max() < 0.1
    types = facts(folder / name)[mllog.BF16_MODE]
    expected_types = {
        "deepspeed": ("bfloat16", "float32", "float32"),
        "autocast": ("float32", "float32", "float32"),
        "pure": ("bfloat16", "bfloat16", "bfloat16"),
    }
    assert tuple(types.metadata[key] for key in ("weights", "master", "moments")) == expected_types[types.value]


@pytest.mark.parametrize("name", [name for name in SEPARATE if name != "separate_ddp"])
def test_separate_adapters_have_the_same_losses_if_they_are_sharded(name: str, folder: Path) -> None:
    expected, shared = losses(folder / "separate_ddp"), losses(folder / "megatron_lora")
    np.testing.assert_allclose(losses(folder / name), expected, rtol=0, atol=1e-4)
    assert expected[0] == pytest.approx(shared[0], abs=1e-4), "B is zero, so the first step sees the base alone"
    assert abs(expected[-1] - shared[-1]) > 1e-3


def test_hybrid_shards_inside_a_node_and_replicates_across_nodes(folder: Path) -> None:
    """Two nodes of two ranks: each rank holds and updates half of every weight, as with FSDP2 on one node."""
    nodes = ("cluster=dgx2", "cluster.ranks_per_node=2", f"{BLOCK}.strategy=fsdp2_hybrid")
    trained({"hybrid": composed(folder, *TRAINS["all"], *nodes)}, folder)
    np.testing.assert_allclose(losses(folder / "hybrid"), losses(folder / "megatron_all"), rtol=0, atol=1e-4)
    whole, shards = held(folder / "eager", "held")[0], held(folder / "hybrid", "held")
    assert len(shards) == 4
    assert all(own == {name: size / 2 for name, size in whole.items()} for own in shards)
    assert {flag for own in held(folder / "hybrid", "is_dtensor") for flag in own.values()} == {True}
    updated = [sum(own.values()) for own in held(folder / "hybrid", "updated")]
    assert updated == [sum(whole.values()) / 2] * 4


RESUMED_WITH = {
    "fsdp2": (FSDP2,),
    "zero3": (ZERO, f"{BLOCK}.zero_stage=3"),
    "zero2": (ZERO, f"{BLOCK}.zero_stage=2"),
    "ddp": (),
    "zero1": (ZERO, f"{BLOCK}.zero_stage=1"),
    "zero0": (ZERO,),
}
"""Each strategy resumes at step 8 from a checkpoint of FSDP2 or ZeRO 3."""


@pytest.fixture(scope="module")
def resumed(runs: Path) -> Path:
    """Complete runs of FSDP2 and ZeRO 3 that save checkpoints, and runs of every strategy that resume from them."""
    saving = ("task.training.checkpoint_every_steps=4", *TRAINS["all"])
    plans = {f"on_{name}": composed(runs, *saving, *overrides) for name, overrides in RESUMED_WITH.items()}
    plans = {
        "saved": composed(runs, *saving, FSDP2),
        "saved_zero3": composed(runs, *saving, *RESUMED_WITH["zero3"]),
    } | plans
    for name, plan in plans.items():
        ranks.write(plan, runs / name)
    for name in ("on_fsdp2", "on_zero3", "on_zero2"):
        (runs / name / "checkpoints").symlink_to(runs / "saved" / "checkpoints")
    for name in ("on_ddp", "on_zero1", "on_zero0"):
        (runs / name / "checkpoints").symlink_to(runs / "saved_zero3" / "checkpoints")
    trained(plans, runs)
    return runs


@pytest.mark.parametrize("name", RESUMED_WITH)
def test_every_strategy_resumes_from_a_checkpoint(name: str, resumed: Path) -> None:
    """Both saved runs end at step 10 and keep the checkpoints of steps 8 and 10; a run resumes from step 8 only."""
    expected, log = losses(resumed / "megatron_all"), facts(resumed / f"on_{name}")
    assert log[mllog.RESUMED].value == 8
    np.testing.assert_allclose(losses(resumed / f"on_{name}"), expected[8:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["saved", "saved_zero3"])
def test_a_checkpoint_becomes_a_hugging_face_folder(name: str, resumed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from jobs.data import rows as rows_of

    step = resumed / name / "checkpoints" / "trial_0" / "step_10"
    assert convert.main(["export", str(step), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rows = rows_of.load(composed(resumed, *TRAINS["all"]), "eval")
    tokens, labels, weights, _ = targets(rows, np.arange(11))
    with torch.no_grad():
        each = torch.nn.functional.cross_entropy(model(tokens).logits.transpose(1, 2), labels, reduction="none")
    assert (each * weights).sum().item() / 11 == pytest.approx(
        parse(resumed / name / "result_0.txt").eval_final, abs=1e-4
    )
