"""Training with FP8 layers: in FP32 compared with autograd, then in FP8 through the entry point."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.contract.plan import Recomputed
from bench.planning.estimates.memory import NOTHING
from helpers import ranks

pytestmark = pytest.mark.trains

STEPS = 8
SHORT_RUN = (
    f"task.training.max_steps={STEPS}",
    "recipe.eval_every_samples=64",
    "recipe.eval_skip=0",
    "recipe.log_every_steps=1",
    "recipe.micro_batch_size=2",
    "task.training.target_eval_loss=null",
)
ON_GPU = ranks.DEVICE == "cuda"
STAGES = 2 if ON_GPU else 4
"""Stages of a pipeline: with more than two, some have neither the embedding nor the head."""
LAYOUTS = {
    "single": (1,),
    "tp2": (2, "parallel.tp=2"),
    "tp2_sp": (2, "parallel.tp=2", "parallel.sp=true"),
    "cp2": (2, "parallel.cp=2"),
    "pp_full": (STAGES, f"parallel.pp={STAGES}", "recipe.recompute=full"),
}
NO_DROPOUT = "task.training.lora.dropout=0"
ALGEBRA = pytest.mark.skipif(ON_GPU, reason="FP32 numbers in the place of FP8's are for CPUs")


def losses(
    prepared: Path,
    name: str,
    *overrides: str,
    program: tuple[str, ...] = ("jobs.tasks.train", "plan.json", "--trial", "0"),
    layout: str = "single",
    recompute: Recomputed = NOTHING,
) -> list[float]:
    """Train and return the losses of all steps."""
    num_ranks, *split = LAYOUTS[layout]
    if not ranks.have(num_ranks):
        pytest.skip(f"{num_ranks} GPUs needed")
    plan = ranks.compose(prepared, f"cluster.ranks_per_node={num_ranks}", *split, *SHORT_RUN, *overrides)
    if recompute is not NOTHING:
        plan = replace(plan, recompute=recompute)
    folder = ranks.write(plan, prepared / name)
    ranks.run(plan, folder, *program)
    return ranks.train_losses(folder / "result_0.txt")


@pytest.fixture(scope="module")
def fp32(prepared: Path) -> list[float]:
    return losses(prepared, "fp32", NO_DROPOUT)


@ALGEBRA
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_hand_written_passes_match_autograd_in_every_layout(prepared: Path, fp32: list[float], layout: str) -> None:
    program = ("tests.helpers.exact", "plan.json", "--train")
    exact = losses(prepared, f"exact_{layout}", NO_DROPOUT, "precision=fp8", program=program, layout=layout)
    np.testing.assert_allclose(exact, fp32, rtol=0, atol=1e-4)
    assert len(exact) == STEPS and exact[-1] < exact[0] - 0.1, "the loss must have fallen"


@ALGEBRA
def test_gradients_with_dropout_are_the_slopes_of_the_loss(prepared: Path) -> None:
    plan = ranks.compose(
        prepared, "cluster.ranks_per_node=1", *SHORT_RUN, "precision=fp8", "task.training.lora.dropout=0.4"
    )
    folder = ranks.write(plan, prepared / "slope")
    [(code, output)] = ranks.ended(plan, folder, "tests.helpers.exact", "plan.json", "--slope")
    assert code == 0, output
    slopes = [line.split()[1:] for line in output.splitlines() if line.startswith("slope")]
    assert len(slopes) == 4
    for kind, by_gradient, by_losses in slopes:
        assert float(by_losses) == pytest.approx(float(by_gradient), rel=0.01), kind


@pytest.mark.parametrize("layout", LAYOUTS if ON_GPU else ["single"])
def test_fp8_has_losses_close_to_fp32_with_and_without_recomputation(
    prepared: Path, fp32: list[float], layout: str
) -> None:
    fp8 = losses(prepared, f"fp8_{layout}", NO_DROPOUT, "precision=fp8", layout=layout)
    np.testing.assert_allclose(fp8, fp32, rtol=0, atol=0.1)
    assert np.abs(np.subtract(fp8, fp32)).max() > 1e-4, "FP8 must change the losses"
    recomputed = Recomputed(full=False, qkv_layers=3, fc1_layers=1)
    recomputed_losses = losses(
        prepared, f"recomputed_{layout}", NO_DROPOUT, "precision=fp8", layout=layout, recompute=recomputed
    )
    assert recomputed_losses == fp8
