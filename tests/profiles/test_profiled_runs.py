"""Profiles of real ranks by module; with RUNSTOP_TEST_DEVICE=cuda on GPUs."""

import gzip
import json
from pathlib import Path

import pytest

from bench.contract import mllog, run_files
from bench.contract.modules import MLP, Part, Phase
from bench.mlperf import reader
from bench.mlperf.result import parse
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
    if plan.world.num_ranks > 1:
        assert rows[REDUCED].busy_ms >= rows[REDUCED].time_ms > 0
    check_files(folder)


def check_files(folder: Path) -> None:
    """Table and trace are attached to the log, and the trace has the three profiled steps."""
    attached = [event.value for event in reader.read(folder / "result_0.txt")[0] if event.key == mllog.ATTACHED_FILE]
    assert attached == [run_files.module_times(0), run_files.trace(0)]
    kernels = json.loads((folder / attached[0]).read_text())["kernels"]
    assert {Part[one["part"]] for one in kernels} >= {*LINEARS[:2], *MLP}
    with gzip.open(folder / attached[1]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert names.count("step") == 3
