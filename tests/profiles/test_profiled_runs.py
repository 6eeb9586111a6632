"""Profiles of real ranks by module; with RUNSTOP_TEST_DEVICE=cuda on GPUs."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog, run_files
from bench.contract.modules import MLP, Part, Phase
from bench.mlperf import reader
from bench.mlperf.result import parse
from bench.results.modules import of_modules
from helpers import ranks

pytestmark = pytest.mark.trains
SHORT_RUN = ("model.weights=random", "task.training.max_steps=2", "data.eval_rows=8", "launch.profile=modules")
LINEARS = (Part.qkv, Part.output, Part.fc1, Part.fc2, Part.head)
LAYER = (Part.norm, Part.rope, Part.attention, Part.activation, *LINEARS)
UPDATE = {(Phase.optimizer, part) for part in (Part.zero_gradients, Part.gradient_norm, Part.adamw)}
REDUCED = (Phase.backward, Part.communication)
RUNS = {
    "adapters in megatron-core's layers": ("cluster.ranks_per_node=2",),
    "adapters in hand-written layers": ("cluster.ranks_per_node=1", "precision=fp8"),
    "a pipeline": ("cluster.ranks_per_node=2", "parallel.pp=2"),
    "all weights": ("cluster.ranks_per_node=2", "task=pretrain_tiny", "recipe.lr_warmup_steps=0"),
}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    plan = ranks.compose(tmp_path, *overrides, *SHORT_RUN)
    if not ranks.have(plan.world.num_ranks):
        pytest.skip("not as many GPUs as ranks")
    folder = ranks.write(plan, tmp_path / "run")
    ranks.run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    result = parse(folder / "result_0.txt")
    times = result.module_times
    assert result.valid and len(result.step_times_ms) == 2, "the profiled steps are not timed"
    assert times is not None and (times.num_steps, times.device, times.is_eager) == (2, ranks.DEVICE, False)
    assert sum(row.time_ms for row in times.rows) == pytest.approx(times.step_ms, abs=1e-6 * len(times.rows))
    rows = {(row.phase, row.part): row for row in times.rows}
    both = {(phase, part) for phase in (Phase.forward, Phase.backward) for part in LAYER}
    if plan.world.pp > 1:  # rank 0 has no head
        both = {place for place in both if place[1] is not Part.head}
    assert both | UPDATE <= set(rows)
    assert all(rows[place].time_ms > 0 for place in both | UPDATE)
    assert [part.name for (_, part), row in rows.items() if part is Part.unnamed and row.gemm_ms] == []
    assert ((Phase.forward, Part.adapters) in rows) is (plan.config.task.training.lora is not None)
    assert times.num_layers == plan.config.model.num_layers // plan.world.pp
    assert Phase.recomputation not in {phase for phase, _ in rows}, "nothing is recomputed"
    if plan.world.num_ranks > 1:
        assert rows[REDUCED].busy_ms >= rows[REDUCED].time_ms > 0
    check_files(folder)


ALL_WEIGHTS = ("task=pretrain_tiny", "recipe.lr_warmup_steps=0", "cluster.ranks_per_node=1")
HUGGINGFACE = ("engine=huggingface", "engine.huggingface.strategy=ddp")
RECOMPUTED = {
    "megatron, full": pytest.param("full", ()),
    "huggingface, full": pytest.param("full", HUGGINGFACE),
    "huggingface, none": pytest.param(
        "none", (*HUGGINGFACE, "engine.huggingface.attention=eager"), marks=pytest.mark.slow
    ),
}


@pytest.mark.parametrize(("recompute", "engine"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_recomputation_is_a_phase_of_its_own(tmp_path: Path, recompute: str, engine: tuple[str, ...]) -> None:
    """With recompute=full, it has as many GEMMs of each linear as the forward pass, except the head, which is outside
    of the layers; torch stops before the last linear if nothing of its output is saved."""
    plan = ranks.compose(tmp_path, *ALL_WEIGHTS, f"recipe.recompute={recompute}", *engine, *SHORT_RUN)
    folder = ranks.write(plan, tmp_path / "run")
    ranks.run(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    times = parse(folder / "result_0.txt").module_times
    assert times is not None
    assert sum(row.time_ms for row in times.rows) == pytest.approx(times.step_ms, abs=1e-6 * len(times.rows))
    rows = {(row.phase, row.part): row for row in times.rows}
    recomputed = {part: row for (phase, part), row in rows.items() if phase is Phase.recomputation}
    kernels = json.loads((folder / run_files.module_times(0)).read_text())["kernels"]
    if recompute == "none":
        assert not recomputed
        check_unfused_attention(kernels, plan.config.model.num_layers)
        return
    assert {*LAYER, Part.residual} - {Part.head, Part.fc2} <= set(recomputed) and Part.head not in recomputed
    for part in (Part.qkv, Part.output, Part.fc1):
        forward, recomputed_gemms = (gemms(kernels, phase, part) for phase in (Phase.forward, Phase.recomputation))
        assert forward == recomputed_gemms > 0, part
    names = {one.name: one.value for one in of_modules(times)}
    both = names["time_backward"] + names["time_recomputation"]
    assert names["time_backward_with_recomputation"] == pytest.approx(both)


def check_unfused_attention(kernels: list[dict[str, Any]], num_layers: int) -> None:
    """Each layer has one product in scores and one in values; the backward pass has two of each."""
    for phase, count in ((Phase.forward, 1), (Phase.backward, 2)):
        names = {one["part"] for one in kernels if one["phase"] == phase.name}
        assert {"rope", "scores", "softmax", "values"} <= names and "attention" not in names
        assert gemms(kernels, phase, Part.scores) == gemms(kernels, phase, Part.values) == count * num_layers
        assert gemms(kernels, phase, Part.softmax) == gemms(kernels, phase, Part.rope) == 0


def gemms(kernels: list[dict[str, Any]], phase: Phase, part: Part) -> float:
    """Return the GEMMs of a part in one step, without the operations around them."""
    mine = [one for one in kernels if (one["phase"], one["part"]) == (phase.name, part.name)]
    return sum(one["launches"] for one in mine if one["kernel"] in ("aten::mm", "aten::bmm"))


def check_files(folder: Path) -> None:
    """Table and trace are attached to the log, and the trace has the three profiled steps."""
    attached = [event.value for event in reader.read(folder / "result_0.txt")[0] if event.key == mllog.ATTACHED_FILE]
    assert attached == [run_files.module_times(0), run_files.trace(0)]
    kernels = json.loads((folder / attached[0]).read_text())["kernels"]
    assert {Part[one["part"]] for one in kernels} >= {*LINEARS[:2], *MLP}
    with gzip.open(folder / attached[1]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert names.count("step") == 3
