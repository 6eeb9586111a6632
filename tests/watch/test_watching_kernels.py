"""Watching a kernels trial: the number of measured points, and the last one."""

import time
from pathlib import Path

from bench.contract import plan_kinds, run_files, telemetry
from bench.contract.plan_kinds import KernelsPlan
from bench.contract.telemetry import Sample
from bench.mlperf import reader
from bench.planning import compose
from bench.watch import prediction, sources
from bench.watch.lines import View, line
from bench.watch.tracker import Tracker
from helpers import kernels_log


def test_the_points_of_a_kernels_trial_are_counted(tmp_path: Path) -> None:
    plan = compose.compose(["task=kernels_tiny"])
    assert isinstance(plan, KernelsPlan)
    first, second, third, *_ = (point.name for point in plan.points)
    events = reader.read(kernels_log.write(plan, tmp_path / "result_0.txt", failed=[second]))[0]
    planned = sources.planned(plan, plan.commands[-1])

    def shown(until: str) -> str:
        tracker = Tracker()
        tracker.update(events[: 1 + next(n for n, e in enumerate(events) if until in (e.key, e.value))])
        outlook = prediction.look(tracker.progress, planned, tracker.progress.last_ms or 0)
        return line(View(name="trial 0", progress=tracker.progress, planned=planned, outlook=outlook))

    assert shown("init_stop").startswith("trial 0  preparing  measured 0 of 36 points  walltime ")
    assert "measuring" in shown(third) and f"measured 3 of 36 points; last {third}" in shown(third)
    assert "forecast" not in shown(third) and "stopped: success" in shown("run_stop")
    assert "measured 36 of 36 points" in shown("run_stop")


def test_the_hottest_gpu_is_shown_while_kernels_are_measured(tmp_path: Path) -> None:
    plan = compose.compose(["task=kernels_tiny"])
    assert isinstance(plan, KernelsPlan)
    whole = kernels_log.write(plan, tmp_path / "result_0.txt").read_text()
    (tmp_path / "result_0.txt").write_text(whole.split('"run_stop"')[0])
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(plan))
    (tmp_path / "rank_logs").mkdir()
    now = Sample(time_ms=time.time_ns() // 1_000_000, monotonic_ms=0, gpu=2, temperature_c=64, throttle=("a\x1b[2J",))
    (tmp_path / run_files.telemetry(0, "n1")).write_text(telemetry.header() + telemetry.lines([now]))
    job = sources.run_folder(tmp_path)
    job.poll()
    shown = line(job.views()[0])
    assert "GPUs 64 °C, throttled: a" in shown and "(hottest of 1: GPU 2)" in shown
    assert "\x1b" not in shown, "text of a file cannot steer the terminal"
