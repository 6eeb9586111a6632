"""The engine through its entry points: the same losses in every layout, frozen base weights, errors in the log."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.contract.plan import Plan
from bench.mlperf import reader
from bench.mlperf.result import parse
from helpers import ranks

pytestmark = pytest.mark.trains

STEPS = 8
TOLERANCE = 1e-5 if ranks.DEVICE == "cpu" else 1e-4
SHORT_RUN = (
    f"task.training.max_steps={STEPS}",
    f"recipe.eval_every_samples={8 * STEPS}",
    "recipe.eval_skip=0",
    "recipe.log_every_steps=1",
    "recipe.micro_batch_size=2",
    "task.training.lora.dropout=0",
    "recipe.adam_eps=1e-3",  # an update depends on the size of the clipped gradient, not on its sign alone
    "task.training.target_eval_loss=null",
)
LAYOUTS = {
    "dp2": (2,),
    "tp2_sp": (2, "parallel.tp=2", "parallel.sp=true"),
    "cp2": (2, "parallel.cp=2"),
    "pp2_vpp2_recompute": (2, "parallel.pp=2", "parallel.vpp=2", "recipe.recompute=full"),
    "dp2_cp2_unsharded": (4, "parallel.cp=2", "parallel.distributed_optimizer=false"),
    "tp2_pp2": (4, "parallel.tp=2", "parallel.pp=2", "parallel.distributed_optimizer=false"),
}


@pytest.fixture(scope="module")
def single(prepared: Path) -> Path:
    """The run folder of a single rank, with which every layout is compared."""
    plan = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT_RUN)
    folder = ranks.write(plan, prepared / "single")
    ranks.run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return folder


def trained(prepared: Path, layout: str) -> Path:
    """Return the run folder of a layout; each layout is trained once."""
    num_ranks, *split = LAYOUTS[layout]
    folder = prepared / layout
    if not ranks.have(num_ranks):
        pytest.skip(f"{num_ranks} GPUs needed")
    if not folder.exists():
        plan = ranks.compose(prepared, f"cluster.ranks_per_node={num_ranks}", *split, *SHORT_RUN)
        ranks.run(plan, ranks.write(plan, folder), "jobs.tasks.train", "plan.json", "--trial", "0")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_single_process_losses(prepared: Path, single: Path, layout: str) -> None:
    folder = trained(prepared, layout)
    expected, got = ranks.train_losses(single / "result_0.txt"), ranks.train_losses(folder / "result_0.txt")
    assert len(got) == STEPS
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    assert got[-1] < got[0] - 0.1, "the loss must have fallen"
    evaluations = [parse(run / "result_0.txt").eval_final for run in (single, folder)]
    np.testing.assert_allclose(evaluations[1], evaluations[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["tp2_pp2", "pp2_vpp2_recompute"])
def test_adapters_of_any_layout_load_into_a_single_process(prepared: Path, layout: str) -> None:
    folder = trained(prepared, layout)
    plan = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT_RUN)
    alone = ranks.write(plan, prepared / f"reload_{layout}")
    command = ("tests.helpers.probe", "evaluate", "plan.json", str(folder / "adapters_0"))
    ((code, output),) = ranks.ended(plan, alone, *command)
    assert code == 0, output
    loss = float(output.split("eval loss")[-1])
    assert loss == pytest.approx(parse(folder / "result_0.txt").eval_final, abs=TOLERANCE)


def test_training_leaves_the_base_bit_identical(prepared: Path) -> None:
    plan = ranks.compose(prepared, "parallel.tp=2", *SHORT_RUN, "task.training.lora.dropout=0.1")
    ranks.run(plan, ranks.write(plan, prepared / "frozen"), "tests.helpers.probe", "frozen", "plan.json", "unused")


def test_warm_up_restores_all_state(prepared: Path) -> None:
    """With dropout, any change of weights, optimizer or generators would change the losses."""
    losses = []
    for iterations in (0, 3):
        warm_up = ("task.training.lora.dropout=0.1", f"recipe.warmup_iterations={iterations}")
        plan = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT_RUN, *warm_up)
        folder = ranks.write(plan, prepared / f"warm_up_{iterations}")
        ranks.run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
        losses.append(ranks.train_losses(folder / "result_0.txt"))
    assert losses[0] == losses[1]


def test_bf16_with_full_recompute_stays_close_to_fp32(prepared: Path, single: Path) -> None:
    plan = ranks.compose(
        prepared, "parallel.tp=2", "parallel.sp=true", "recipe.recompute=full", "precision=bf16", *SHORT_RUN
    )
    folder = ranks.write(plan, prepared / "bf16")
    ranks.run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    expected, got = ranks.train_losses(single / "result_0.txt"), ranks.train_losses(folder / "result_0.txt")
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05)


def test_a_gpt3_shape_trains_from_scratch_the_same_on_a_pipeline(tmp_path: Path) -> None:
    """LayerNorm, GELU, biases, learned positions and tied embeddings; from one checkpoint, in two layouts."""
    shape = "model={norm: LayerNorm, activation: gelu, position: learned, bias: true, tied_embeddings: true}"
    whole = ranks.compose(tmp_path, "cluster.ranks_per_node=1", shape, *SHORT_RUN)
    ranks.run(whole, ranks.write(whole, tmp_path / "whole"), "jobs.tasks.prepare", "plan.json")
    split = ranks.compose(tmp_path, "parallel.pp=2", shape, *SHORT_RUN)
    ranks.write(split, tmp_path / "split")
    for plan, name in ((whole, "whole"), (split, "split")):
        ranks.run(plan, tmp_path / name, "jobs.tasks.train", "plan.json", "--trial", "0")
    expected, got = (ranks.train_losses(tmp_path / name / "result_0.txt") for name in ("whole", "split"))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def train_alone(folder: Path) -> tuple[int, str]:
    """Start one rank of trial 0 with the plan of the folder; return its exit code and output."""
    alone = ranks.compose(folder, "cluster.ranks_per_node=1")
    ((code, output),) = ranks.ended(alone, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return code, output


def test_failed_trials_have_a_reason_and_an_aborted_log(prepared: Path) -> None:
    def attempt(name: str, plan: Plan) -> tuple[int, str, list[reader.Event]]:
        folder = ranks.write(plan, prepared / name)
        code, output = train_alone(folder)
        assert json.loads((folder / "rank_logs" / "trial_0_rank_0.error").read_text())["exit_code"] == code
        assert "\n  fix:   " in output
        return code, output, reader.read(folder / "result_0.txt")[0]

    plan = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT_RUN)
    plan.config.data.train_rows = 5
    code, output, events = attempt("other_rows", plan)
    assert (code, events[-1].key, events[-1].metadata["status"]) == (2, "run_stop", "aborted")
    assert "the plan needs the shape (5, 96)" in output and "Traceback" not in output

    plan = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT_RUN, "recipe.lr=1e30")
    code, output, events = attempt("explodes", plan)
    assert (code, events[-1].metadata["status"]) == (1, "aborted")
    assert "the training loss is nan at step" in output

    plan = ranks.compose(prepared, "cluster.ranks_per_node=1", "parallel.cp=1", *SHORT_RUN, "model.num_layers=2")
    code, output, events = attempt("other_model", replace(plan, base_dir=ranks.compose(prepared).base_dir))
    assert code == 2 and "run_start" not in {event.key for event in events}
    assert "not a checkpoint of tiny" in output

    code, output, events = attempt("too_few", ranks.compose(prepared, *SHORT_RUN))
    assert code == 1 and "1 ranks were started, but the plan needs 2" in output


def test_a_log_is_never_written_twice(single: Path) -> None:
    before = (single / "result_0.txt").read_bytes()
    code, output = train_alone(single)
    assert code == 2 and "CFG-05: this trial already has a log" in output
    assert (single / "result_0.txt").read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_ends_the_trial_with_the_reason(prepared: Path, tmp_path: Path) -> None:
    plan = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT_RUN)
    with ranks.mounted(tmp_path / "small", "size=20k"):
        folder = ranks.write(plan, tmp_path / "small" / "run")
        code, output = train_alone(folder)
    assert code == 1 and "cannot write: No space left on device" in output and "free disk space" in output
