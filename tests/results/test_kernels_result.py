"""Results of kernels logs: rates calculated by hand, best points and their limits, and missing points."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import cli
from bench.contract import mllog
from bench.contract.kernels import Point
from bench.contract.plan_kinds import KernelsPlan
from bench.planning import compose
from bench.results import kind
from bench.results import kind as trial_results
from bench.results.measurement import Measurement, higher_is_better
from bench.runs import trial as trials
from helpers import answers, kernels_log

GEMM, COPY = "gemm bf16 8192 x 8192 x 8192", "copy host to device pinned 1 GiB"


@pytest.fixture(scope="module")
def plan() -> KernelsPlan:
    planned = compose.compose(["task=node", "cluster=dgxh200", "cluster.ranks_per_node=1"])
    assert isinstance(planned, KernelsPlan)
    return planned


def at_share(share: float) -> Callable[[Point], float]:
    """Return times in which every point reaches this share of its limit, or 1 of its unit without one."""
    return lambda point: point.work / ((point.limit or 1) * share) / (1e6 if point.unit == "TFLOP/s" else 1e3)


def test_a_rate_is_the_work_over_the_median_time(plan: KernelsPlan, tmp_path: Path) -> None:
    """2 x 8,192^3 operations in 1.5 ms are 733.0 TFLOP/s; 1 GiB in 20 ms is 53.69 GB/s."""
    times = {GEMM: 1500.0, COPY: 20_000.0}
    log = kernels_log.write(plan, tmp_path / "result_0.txt", time_us=lambda point: times.get(point.name, 1e9))
    measurements = {one.name: one for one in kind.read(log).of_kind.measurements}
    assert measurements[GEMM].unit == "TFLOP/s" and measurements[GEMM].value == pytest.approx(733.0077, abs=1e-3)
    assert measurements[GEMM].p10 == pytest.approx(733.0077 / 1.1, abs=1e-3), "the slowest tenth of the runs"
    assert measurements[COPY].unit == "GB/s" and measurements[COPY].value == pytest.approx(53.68709, abs=1e-4)
    assert measurements[f"{GEMM} latency"] == Measurement(
        name=f"{GEMM} latency", unit="us", value=1500.0, n=50, p10=pytest.approx(1350), p90=pytest.approx(1650)
    )
    share = measurements[f"{GEMM} share of peak"]
    assert share.value == pytest.approx(733.0077 / 989.4, abs=1e-5) and higher_is_better(share)
    assert f"{COPY} share of peak" not in measurements, "a copy has no peak"
    assert measurements["best gemm bf16"] == replace(measurements[GEMM], name="best gemm bf16"), (
        "every other one is slower"
    )


@pytest.mark.parametrize(("share", "is_valid"), [(0.979, False), (0.981, True), (1.02, True)])
def test_the_best_point_of_each_kernel_is_compared_with_the_best_known_rate(
    plan: KernelsPlan, tmp_path: Path, share: float, is_valid: bool
) -> None:
    log = kernels_log.write(plan, tmp_path / "result_0.txt", time_us=at_share(share))
    judged = trials.judge(log, plan, plan.trials[0])
    assert judged.valid is is_valid and list(judged.differences) == []
    assert judged.of_kind is not None
    below = [problem for problem in judged.of_kind.problems if "% of the best known rate" in problem]
    assert len(below) == (0 if is_valid else 7), "BF16, FP8, attention twice, copies both ways and within"


def test_one_fast_point_of_a_kernel_is_enough(plan: KernelsPlan, tmp_path: Path) -> None:
    slow, fast = at_share(0.5), at_share(1.0)
    best: dict[str, Point] = {point.kernel: point for point in plan.points}
    log = kernels_log.write(
        plan, tmp_path / "result_0.txt", time_us=lambda point: (fast if point == best[point.kernel] else slow)(point)
    )
    assert trials.judge(log, plan, plan.trials[0]).valid


@pytest.mark.parametrize("how", ["without", "failed"])
def test_a_log_with_a_missing_point_is_not_valid(plan: KernelsPlan, tmp_path: Path, how: str) -> None:
    log = kernels_log.write(plan, tmp_path / "result_0.txt", time_us=at_share(1), **{how: [COPY]})
    judged = trials.judge(log, plan, plan.trials[0])
    assert judged.result.valid and not judged.valid and judged.of_kind is not None
    assert trials.facts(judged)["not_as_planned"] == judged.of_kind.problems, (
        "so that `why` can read it from the ledger"
    )
    why = {"without": "no record", "failed": "rank 0: no such kernel"}[how]
    assert judged.of_kind.missing == ((COPY, why),)
    assert f"{COPY} was not measured: {why}" in judged.of_kind.problems
    names = {one.name for one in kind.read(log).of_kind.measurements}
    assert not {COPY, f"{COPY} latency"} & names, "no number, not even 0"


def test_an_aborted_trial_is_not_valid(plan: KernelsPlan, tmp_path: Path) -> None:
    log = kernels_log.write(plan, tmp_path / "result_0.txt", time_us=at_share(1), status=mllog.ABORTED)
    assert not trials.judge(log, plan, plan.trials[0]).valid


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"median_us": 100.0', '"median_us": 0'),
        ('"median_us": 100.0', '"median_us": "fast"'),
        ('"median_us": 100.0', '"median_us": 300.0'),  # above p90
        ('"n": 50', '"n": 2'),
        ('"work": 1073741824.0', '"work": "much"'),
        ('"work": 1073741824.0', f'"work": 1{"0" * 400}'),
        ('"unit": "GB/s"', '"unit": "GB"'),
        ('"sizes": [1073741824]', '"sizes": 1073741824'),
    ],
)
def test_a_damaged_record_has_no_measurements(plan: KernelsPlan, tmp_path: Path, old: str, new: str) -> None:
    log = kernels_log.write(plan, tmp_path / "result_0.txt")
    lines = log.read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if "kernel_measured" in line and COPY in line)
    assert old in lines[place]
    lines[place] = lines[place].replace(old, new)
    log.write_text("".join(lines))
    result = trial_results.read(log).of_kind
    assert result is not None and result.missing == ((COPY, "no record"),)


def test_a_failure_record_without_a_point_name_is_ignored(plan: KernelsPlan, tmp_path: Path) -> None:
    log = kernels_log.write(plan, tmp_path / "result_0.txt", failed=[COPY])
    log.write_text(log.read_text().replace(f'"kernel_failed", "value": "{COPY}"', '"kernel_failed", "value": ["x"]'))
    result = trial_results.read(log).of_kind
    assert result is not None and result.missing == ((COPY, "no record"),)


def test_measured_points_must_be_the_planned_points(plan: KernelsPlan, tmp_path: Path) -> None:
    """A log with half the work in half the time would have the expected rate."""
    other = replace(plan, points=[replace(plan.points[0], work=2 * plan.points[0].work), *plan.points[1:]])
    log = kernels_log.write(other, tmp_path / "result_0.txt", time_us=at_share(1))
    judged = trials.judge(log, plan, plan.trials[0])
    assert (
        list(judged.differences)
        == [f"{plan.points[0].name} is missing in the log, or has other settings than in the plan"]
        and not judged.valid
    )


def parsed(log: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["parse", str(log), *more])
    assert end.value.code == 1, "a point is missing"
    return capsys.readouterr().out


@pytest.mark.long
def test_parse_shows_the_best_points_with_their_limits_and_every_point(
    plan: KernelsPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = kernels_log.write(plan, tmp_path / "result_0.txt", time_us=at_share(0.99), failed=[GEMM])
    shown = parsed(log, capsys).splitlines()
    assert "node: " in shown[0] and "made up" in shown[0]
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in shown if "\t" in line}
    assert rows["copy host to device pinned"][:8] == ["54.85", "GB/s", "49.86", "60.94", "50", "", "99.0", "yes"]
    assert rows["gemm fp8"][5:8] == ["72.7", "99.0", "yes"]
    assert rows["gemm fp8 sustained"][6:8] == ["", ""]
    assert rows[COPY][4] == "54.85" and GEMM not in rows
    assert f"points measured: {len(plan.points) - 1} of {len(plan.points)}" in shown
    content = answers.one(parsed(log, capsys, "--json"))
    assert content["valid"] is False and content["problems"] == [f"{GEMM} was not measured: rank 0: no such kernel"]
    assert {one["name"] for one in content["measurements"]} >= {"best gemm fp8", COPY, f"{COPY} latency"}
