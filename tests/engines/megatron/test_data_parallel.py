"""The overlapped schedule of gradients and weights over replicas has the bits of the plain one, in every layout."""

import json
from pathlib import Path

import pytest

from helpers import ranks

pytestmark = pytest.mark.trains

COMMON = (
    *("task=pretrain_tiny", "recipe.log_every_steps=1", "recipe.micro_batch_size=2", "recipe.lr=0.01"),
    *("recipe.lr_warmup_steps=0", "data.train_rows=128", "data.eval_rows=16", "data.seq_length=16"),
    *("task.training.max_steps=6", "recipe.eval_every_samples=96", "recipe.eval_skip=0"),
)
LAYOUTS = {
    "dp2": (2,),
    "dp2 fp8": (2, "precision=fp8"),
    "dp2 bf16, moments": (2, "precision=bf16", "recipe.moments=bf16", "recipe.offload_moments=true"),
    "dp2 unsharded": (2, "parallel.distributed_optimizer=false"),
    "dp2 recomputed": (2, "recipe.recompute=full"),
    "dp2 activations on the host": (2, "recipe.offload_activations=true"),
    "dp2 adapters": (2, "task=lora_tiny", "recipe.global_batch_size=16", "precision=fp8"),
    "dp2 gpt3": (2, "model={norm: LayerNorm, activation: gelu, position: learned, bias: true, tied_embeddings: true}"),
    "cp2": (2, "parallel.cp=2"),
    "dp2 ep2": (2, "model=tiny_moe", "parallel.ep=2"),
    "tp2 dp2 fp8": (4, "parallel.tp=2", "parallel.sp=true", "precision=fp8"),
    "pp2 dp2": (4, "parallel.pp=2"),
    "pp2 vpp2 dp2": (4, "parallel.pp=2", "parallel.vpp=2"),
}
IN_GATE = ("dp2 fp8", "tp2 dp2 fp8")
MARKED = [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize("layout", MARKED)
def test_overlapped_steps_have_the_bits_of_plain_steps(tmp_path: Path, layout: str) -> None:
    """Losses, an evaluation between two steps, weights and optimizer states, also after resuming."""
    num_ranks, *split = LAYOUTS[layout]
    if not ranks.have(num_ranks):
        pytest.skip(f"{num_ranks} GPUs needed")
    plan = ranks.compose(tmp_path, *COMMON, f"cluster.ranks_per_node={num_ranks}", *split)
    assert plan.batch.gradient_accumulation_steps > 1
    folder = ranks.write(plan, tmp_path / "run")
    for code, output in ranks.ended(plan, folder, "tests.helpers.overlap", "plan.json"):
        assert code == 0, output
        plain, overlapped = json.loads(output.splitlines()[-1])
        num_groups = overlapped["groups"]
        assert (plain["reduced_early"], plain["arrive_late"], plain["groups"]) == (0, 0, num_groups)
        assert overlapped["reduced_early"] == num_groups
        assert overlapped["arrive_late"] == (num_groups if plan.config.parallel.distributed_optimizer else 0)
        assert overlapped["losses"] == plain["losses"] and len(set(plain["losses"])) == 7
        assert overlapped["sha256"] == plain["sha256"]
