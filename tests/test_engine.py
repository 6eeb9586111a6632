"""The engine through its entry points: the same losses in every layout, adapters only, honest endings."""

from pathlib import Path

import numpy as np
import pytest
import ranks

from bench.parse import parse

pytestmark = pytest.mark.trains

STEPS = 12
SHORT = (
    f"recipe.max_steps={STEPS}",
    "recipe.eval_every_samples=96",
    "recipe.eval_skip=0",
    "recipe.log_every_steps=1",
    "recipe.micro_batch_size=2",
    "task.lora.dropout=0",
    "task.target_eval_loss=null",
)
LAYOUTS = {
    "dp2": (2,),
    "tp2_sp": (2, "parallel.tp=2", "parallel.sp=true"),
    "cp2": (2, "parallel.cp=2"),
    "pp2_vpp2_recompute": (2, "parallel.pp=2", "parallel.vpp=2", "recipe.recompute=full"),
    "tp2_pp2": (4, "parallel.tp=2", "parallel.pp=2", "parallel.distributed_optimizer=false"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache holds rows and a barely trained base."""
    tmp = tmp_path_factory.mktemp("engine")
    made = ranks.compose(tmp, "cluster.ranks_per_node=1")
    ranks.run(made, ranks.write(made, tmp / "prepare"), "jobs.prepare", "plan.json")
    return tmp


@pytest.fixture(scope="module")
def single(prepared: Path) -> Path:
    """The run folder of one process, to which every layout is compared."""
    made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT)
    folder = ranks.write(made, prepared / "single")
    ranks.run(made, folder, "jobs.train", "plan.json", "--trial", "0")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_single_process_losses(prepared: Path, single: Path, layout: str) -> None:
    num_ranks, *split = LAYOUTS[layout]
    made = ranks.compose(prepared, f"cluster.ranks_per_node={num_ranks}", *split, *SHORT)
    folder = ranks.write(made, prepared / layout)
    ranks.run(made, folder, "jobs.train", "plan.json", "--trial", "0")
    expected, got = ranks.train_losses(single / "result_0.txt"), ranks.train_losses(folder / "result_0.txt")
    assert len(got) == STEPS
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert got[-1] < got[0] - 0.1, "the adapters must have learned something"
    evaluations = [parse(run / "result_0.txt").eval_final for run in (single, folder)]
    np.testing.assert_allclose(evaluations[1], evaluations[0], rtol=0, atol=1e-5)
