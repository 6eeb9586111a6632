"""Real ranks measure tiny kernels over gloo to a log that proves it, or says what could not be measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract.plan_kinds import KernelsPlan
from bench.mlperf import result as results
from bench.planning import compose
from bench.results import kind as trial_results
from bench.runs import trial as trials
from helpers import ranks

pytestmark = [
    pytest.mark.trains,
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the sizes are those of a CPU; docs/kernels.md has a GPU's"),
]
SHORT = ("task.kernels.repeats=3", "task.kernels.point_s=0.01", "task.kernels.sustained_s=0.05")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelsPlan, Path]:
    """The plan of two ranks with a point that nothing here computes, and their run folder."""
    plan = compose.compose(["task=kernels_tiny", *SHORT])
    assert isinstance(plan, KernelsPlan)
    flash = next(point for point in plan.points if point.variant == "flash")
    plan = replace(plan, points=[*plan.points, replace(flash, name="impossible", variant="cudnn")])
    folder = ranks.write(plan, tmp_path_factory.mktemp("kernels") / "run")
    ranks.run(plan, folder, "jobs.tasks.kernels", "plan.json", "--trial", "0")
    return plan, folder


def test_every_point_is_measured_but_the_one_that_nothing_computes(measured: tuple[KernelsPlan, Path]) -> None:
    plan, folder = measured
    found = trial_results.read(folder / "result_0.txt").of_kind
    assert found is not None
    assert [one.point for one in found.measured] == plan.points[:-1], "in the order of the plan, as planned"
    ((name, reason),) = found.missing
    assert name == "impossible" and reason.startswith("rank ")
    judged = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert judged.result.valid and list(judged.differences) == [] and not judged.valid


def test_the_log_proves_what_can_be_measured(measured: tuple[KernelsPlan, Path], tmp_path: Path) -> None:
    """The same log without the impossible point, which neither its plan nor itself then names."""
    plan, folder = measured
    lines = (folder / "result_0.txt").read_text().splitlines(keepends=True)
    kept = [line.replace(', "impossible"]', "]") for line in lines if "kernel_failed" not in line]
    log = tmp_path / "result_0.txt"
    log.write_text("".join(kept))
    judged = trials.judge(log, replace(plan, points=plan.points[:-1]), plan.trials[0])
    assert judged.valid and judged.result.minutes is not None


def test_the_log_says_who_computed_what_and_on_what(measured: tuple[KernelsPlan, Path]) -> None:
    _, folder = measured
    found, result = trial_results.read(folder / "result_0.txt").of_kind, results.parse(folder / "result_0.txt")
    assert found is not None
    ran = {one.point.name: one.ran for one in found.measured}
    assert ran["all-reduce of 2 ranks 64 KiB"] == "gloo; bus bandwidth = 2 (n - 1) / n x size / time"
    assert "flash" in ran["attention forward flash 1 x 256, 4 heads of 32, 2 of keys"]
    assert ran["attention forward math 1 x 256, 4 heads of 32, 2 of keys"] == "math: several operators"
    assert {one.rank for one in found.measured} <= {0, 1}
    assert (result.hyperparameters["num_ranks"], result.hyperparameters["accelerator"]) == (2, "cpu")
    assert "torch" in result.software and result.status == "success" and result.has_target is False


def test_a_kernel_that_hangs_ends_the_trial_with_the_line_where_it_stands(tmp_path: Path) -> None:
    plan = compose.compose(["task=kernels_tiny", *SHORT, "launch.stall.floor_s=2"])
    assert isinstance(plan, KernelsPlan)
    before = next(number for number, point in enumerate(plan.points) if point.family == "gemm")
    folder = ranks.write(plan, tmp_path / "run")
    (folder / "rank_logs").mkdir()  # as a launcher does
    ended = ranks.ended(plan, folder, "tests.helpers.hanging_kernels", "plan.json", "--trial", "0")
    assert [code for code, _ in ended][0] == 1, ended
    said = ended[0][1]
    assert "rank 1 on " in said and "stood at tests/helpers/hanging_kernels.py" in said and "time.sleep(600)" in said
    assert f"in measuring after point {before}, where 0.0625 s is usual" in said
    assert results.parse(folder / "result_0.txt").status == "aborted"
