"""Real ranks measure tiny kernels over gloo; the log has the results, and the points that could not be measured."""

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
SHORT_RUN = ("task.kernels.repeats=3", "task.kernels.point_s=0.01", "task.kernels.sustained_s=0.05")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelsPlan, Path]:
    """The plan of two ranks with a point that no backend here supports, and their run folder."""
    plan = compose.compose(["task=kernels_tiny", *SHORT_RUN])
    assert isinstance(plan, KernelsPlan)
    flash = next(point for point in plan.points if point.variant == "flash")
    plan = replace(plan, points=[*plan.points, replace(flash, name="impossible", variant="cudnn")])
    folder = ranks.write(plan, tmp_path_factory.mktemp("kernels") / "run")
    ranks.run(plan, folder, "jobs.tasks.kernels", "plan.json", "--trial", "0")
    return plan, folder


def test_every_supported_point_is_measured(measured: tuple[KernelsPlan, Path]) -> None:
    plan, folder = measured
    actual = trial_results.read(folder / "result_0.txt").of_kind
    assert actual is not None
    assert [one.point for one in actual.measured] == plan.points[:-1], "in the order of the plan, as planned"
    ((name, reason),) = actual.missing
    assert name == "impossible" and reason.startswith("rank ")
    judged = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert judged.result.valid and list(judged.differences) == [] and not judged.valid


def test_a_complete_log_is_valid(measured: tuple[KernelsPlan, Path], tmp_path: Path) -> None:
    """The same log and plan without the unsupported point."""
    plan, folder = measured
    lines = (folder / "result_0.txt").read_text().splitlines(keepends=True)
    kept = [line.replace(', "impossible"]', "]") for line in lines if "kernel_failed" not in line]
    log = tmp_path / "result_0.txt"
    log.write_text("".join(kept))
    judged = trials.judge(log, replace(plan, points=plan.points[:-1]), plan.trials[0])
    assert judged.valid and judged.result.minutes is not None


def test_the_log_has_implementations_and_hardware(measured: tuple[KernelsPlan, Path]) -> None:
    _, folder = measured
    actual, result = trial_results.read(folder / "result_0.txt").of_kind, results.parse(folder / "result_0.txt")
    assert actual is not None
    calls = {one.point.name: one.implementation for one in actual.measured}
    assert calls["all-reduce of 2 ranks 64 KiB"] == "gloo; bus bandwidth = 2 (n - 1) / n x size / time"
    assert "flash" in calls["attention forward flash 1 x 256, 4 heads of 32, 2 of keys"]
    assert calls["attention forward math 1 x 256, 4 heads of 32, 2 of keys"] == "math: several operators"
    assert {one.rank for one in actual.measured} <= {0, 1}
    assert (result.hyperparameters["num_ranks"], result.hyperparameters["accelerator"]) == (2, "cpu")
    assert "torch" in result.software and result.status == "success" and result.has_target is False


def test_a_hanging_kernel_ends_the_trial_with_its_line(tmp_path: Path) -> None:
    plan = compose.compose(["task=kernels_tiny", *SHORT_RUN, "launch.stall.floor_s=2"])
    assert isinstance(plan, KernelsPlan)
    before = next(number for number, point in enumerate(plan.points) if point.family == "gemm")
    folder = ranks.write(plan, tmp_path / "run")
    (folder / "rank_logs").mkdir()  # as a launcher does
    ended = ranks.ended(plan, folder, "tests.helpers.hanging_kernels", "plan.json", "--trial", "0")
    assert [code for code, _ in ended][0] == 1, ended
    output = ended[0][1]
    assert (
        "rank 1 on " in output
        and "stopped at tests/helpers/hanging_kernels.py" in output
        and "time.sleep(600)" in output
    )
    assert f"in measuring after point {before} (usual: 0.0625 s)" in output
    assert results.parse(folder / "result_0.txt").status == "aborted"
