"""The engine through its entry points: the same losses in every layout, adapters only, honest endings."""

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
SHORT = (
    f"task.training.max_steps={STEPS}",
    f"recipe.eval_every_samples={8 * STEPS}",
    "recipe.eval_skip=0",
    "recipe.log_every_steps=1",
    "recipe.micro_batch_size=2",
    "task.training.lora.dropout=0",
    "task.training.target_eval_loss=null",
)
LAYOUTS = {
    "dp2": (2,),
    "tp2_sp": (2, "parallel.tp=2", "parallel.sp=true"),
    "cp2": (2, "parallel.cp=2"),
    "pp2_vpp2_recompute": (2, "parallel.pp=2", "parallel.vpp=2", "recipe.recompute=full"),
    "tp2_pp2": (4, "parallel.tp=2", "parallel.pp=2", "parallel.distributed_optimizer=false"),
}


@pytest.fixture(scope="module")
def single(prepared: Path) -> Path:
    """The run folder of one process, to which every layout is compared."""
    made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT)
    folder = ranks.write(made, prepared / "single")
    ranks.run(made, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return folder


def trained(prepared: Path, layout: str) -> Path:
    """Return the run folder of a layout, which is trained once."""
    num_ranks, *split = LAYOUTS[layout]
    folder = prepared / layout
    if not ranks.have(num_ranks):
        pytest.skip(f"{num_ranks} GPUs needed")
    if not folder.exists():
        made = ranks.compose(prepared, f"cluster.ranks_per_node={num_ranks}", *split, *SHORT)
        ranks.run(made, ranks.write(made, folder), "jobs.tasks.train", "plan.json", "--trial", "0")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_single_process_losses(prepared: Path, single: Path, layout: str) -> None:
    folder = trained(prepared, layout)
    expected, got = ranks.train_losses(single / "result_0.txt"), ranks.train_losses(folder / "result_0.txt")
    assert len(got) == STEPS
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    assert got[-1] < got[0] - 0.1, "the adapters must have learned something"
    evaluations = [parse(run / "result_0.txt").eval_final for run in (single, folder)]
    np.testing.assert_allclose(evaluations[1], evaluations[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["tp2_pp2", "pp2_vpp2_recompute"])
def test_adapters_of_any_layout_load_into_a_single_process(prepared: Path, layout: str) -> None:
    folder = trained(prepared, layout)
    made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT)
    alone = ranks.write(made, prepared / f"reload_{layout}")
    command = ("tests.helpers.probe", "evaluate", "plan.json", str(folder / "adapters_0"))
    ((code, output),) = ranks.ended(made, alone, *command)
    assert code == 0, output
    loss = float(output.split("eval loss")[-1])
    assert loss == pytest.approx(parse(folder / "result_0.txt").eval_final, abs=TOLERANCE)


def test_training_leaves_the_base_bit_identical(prepared: Path) -> None:
    made = ranks.compose(prepared, "parallel.tp=2", *SHORT, "task.training.lora.dropout=0.1")
    ranks.run(made, ranks.write(made, prepared / "frozen"), "tests.helpers.probe", "frozen", "plan.json", "unused")


def test_the_warm_up_leaves_no_trace(prepared: Path) -> None:
    """With dropout, a trace in weights, optimizer or generators would show in the losses, bit for bit."""
    losses = []
    for iterations in (0, 3):
        warm_up = ("task.training.lora.dropout=0.1", f"recipe.warmup_iterations={iterations}")
        made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT, *warm_up)
        folder = ranks.write(made, prepared / f"warm_up_{iterations}")
        ranks.run(made, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
        losses.append(ranks.train_losses(folder / "result_0.txt"))
    assert losses[0] == losses[1]


def test_bf16_with_full_recompute_stays_close_to_fp32(prepared: Path, single: Path) -> None:
    made = ranks.compose(
        prepared, "parallel.tp=2", "parallel.sp=true", "recipe.recompute=full", "precision=bf16", *SHORT
    )
    folder = ranks.write(made, prepared / "bf16")
    ranks.run(made, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    expected, got = ranks.train_losses(single / "result_0.txt"), ranks.train_losses(folder / "result_0.txt")
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05)


def test_a_gpt3_shape_trains_from_scratch_the_same_on_a_pipeline(tmp_path: Path) -> None:
    """LayerNorm, GELU, biases, learned positions and tied embeddings; from one checkpoint, in two layouts."""
    shape = "model={norm: LayerNorm, activation: gelu, position: learned, bias: true, tied_embeddings: true}"
    whole = ranks.compose(tmp_path, "cluster.ranks_per_node=1", shape, *SHORT)
    ranks.run(whole, ranks.write(whole, tmp_path / "whole"), "jobs.tasks.prepare", "plan.json")
    split = ranks.compose(tmp_path, "parallel.pp=2", shape, *SHORT)
    ranks.write(split, tmp_path / "split")
    for made, name in ((whole, "whole"), (split, "split")):
        ranks.run(made, tmp_path / name, "jobs.tasks.train", "plan.json", "--trial", "0")
    expected, got = (ranks.train_losses(tmp_path / name / "result_0.txt") for name in ("whole", "split"))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def train_alone(folder: Path) -> tuple[int, str]:
    """Start one rank of trial 0, whatever the plan in the folder says; return its exit code and output."""
    alone = ranks.compose(folder, "cluster.ranks_per_node=1")
    ((code, output),) = ranks.ended(alone, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    return code, output


def test_broken_requests_end_with_the_reason_and_an_honest_log(prepared: Path) -> None:
    def attempt(name: str, made: Plan) -> tuple[int, str, list[reader.Event]]:
        folder = ranks.write(made, prepared / name)
        code, output = train_alone(folder)
        assert json.loads((folder / "rank_logs" / "trial_0_rank_0.error").read_text())["exit_code"] == code
        assert "\n  fix:   " in output
        return code, output, reader.read(folder / "result_0.txt")[0]

    made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT)
    made.config.data.train_rows = 5
    code, output, events = attempt("other_rows", made)
    assert (code, events[-1].key, events[-1].metadata["status"]) == (2, "run_stop", "aborted")
    assert "the plan says (5, 96)" in output and "Traceback" not in output

    made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT, "recipe.lr=1e30")
    code, output, events = attempt("explodes", made)
    assert (code, events[-1].metadata["status"]) == (1, "aborted")
    assert "the training loss is nan at step" in output

    made = ranks.compose(prepared, "cluster.ranks_per_node=1", "parallel.cp=1", *SHORT, "model.num_layers=2")
    code, output, events = attempt("other_model", replace(made, base_dir=ranks.compose(prepared).base_dir))
    assert (code, events[-1].key) == (2, "software"), "the clock never started"
    assert "not a checkpoint of tiny" in output

    code, output, events = attempt("too_few", ranks.compose(prepared, *SHORT))
    assert code == 1 and "1 ranks were started, and the plan is for 2" in output


def test_a_log_is_never_written_twice(single: Path) -> None:
    before = (single / "result_0.txt").read_bytes()
    code, output = train_alone(single)
    assert code == 2 and "CFG-05: this trial has a log already" in output
    assert (single / "result_0.txt").read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_ends_the_trial_with_the_reason(prepared: Path, tmp_path: Path) -> None:
    made = ranks.compose(prepared, "cluster.ranks_per_node=1", *SHORT)
    with ranks.mounted(tmp_path / "small", "size=20k"):
        folder = ranks.write(made, tmp_path / "small" / "run")
        code, output = train_alone(folder)
    assert code == 1 and "cannot write: No space left on device" in output and "make room" in output
