"""The dated report of kubernetes_overhead_tiny: its table equals a manual evaluation of the stored logs."""

import json
import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np
import pytest
from scipy import stats

from bench import studies
from helpers.paths import ROOT

FOLDER = ROOT / "docs/results/2026-11-23-kubernetes-overhead"
ARMS = ("runner", "Slurm", "Kubernetes", "Ray")
BLOCKS = range(1, 6)
BATCH, SKIPPED, COUNTED = 8, 10, 40


def step_times_ms(log: Path) -> list[float]:
    """Return the logged times of the steps in the window."""
    lines = [json.loads(line.partition(":::MLLOG ")[2]) for line in log.read_text().splitlines() if ":::MLLOG" in line]
    listed = [1000 * t for line in lines if line["key"] == "tracked_stats" for t in line["value"].get("step_times", [])]
    assert len(listed) == SKIPPED + COUNTED
    return listed[SKIPPED:]


@pytest.fixture(scope="module")
def times_ms() -> dict[str, list[list[float]]]:
    """By arm and block."""
    return {arm: [step_times_ms(FOLDER / f"{arm}.{block}/result_0.txt") for block in BLOCKS] for arm in ARMS}


@pytest.mark.long
def test_the_table_is_read_from_the_kept_logs(times_ms: dict[str, list[list[float]]]) -> None:
    result, report = studies.read(FOLDER), FOLDER.with_suffix(".md").read_text()
    for arm, blocks in times_ms.items():
        rates = [1000 * BATCH * COUNTED / sum(times) for times in blocks]
        cells = result.row(arm).cells
        assert cells["throughput"].values == pytest.approx(rates)
        assert cells["step_time"].values == pytest.approx([median(times) for times in blocks])
        (row,) = re.findall(rf"^\| {arm} \| ([\d.]+) ± ([\d.]+) \|", report, re.MULTILINE)
        digits = [len(number.partition(".")[2]) for number in row]
        assert row == (f"{fmean(rates):.{digits[0]}f}", f"{stdev(rates):.{digits[1]}f}")
        assert "a demonstration" in cells["throughput"].reason


def test_the_verdicts_are_those_of_a_paired_t_test_by_scipy(times_ms: dict[str, list[list[float]]]) -> None:
    result, report = studies.read(FOLDER), FOLDER.with_suffix(".md").read_text()
    for one in result.differences:
        logs = [np.log([1 / sum(times) for times in times_ms[arm]]) for arm in (one.first, one.second)]
        test = stats.ttest_rel(*logs)
        low, high = np.exp(test.confidence_interval(0.95))
        assert one.comparison is not None and (one.comparison.low, one.comparison.high) == pytest.approx((low, high))
        assert one.comparison.verdict.startswith("different") == bool(low > 1 or high < 1)
        assert f"| {one.first} / {one.second} | {100 * (one.comparison.ratio or 0) - 100:+.1f} |" in report


@pytest.mark.long
def test_its_date_is_that_of_the_logs_and_not_of_their_copies(tmp_path: Path) -> None:
    copied = shutil.copytree(FOLDER, tmp_path / "study")
    begun = []
    for log in copied.glob("*/result_0.txt"):
        os.utime(log, (1e9, 1e9))
        start = next(line for line in log.read_text().splitlines() if '"run_start"' in line)
        begun.append(datetime.fromtimestamp(json.loads(start.partition(":::MLLOG ")[2])["time_ms"] / 1000, UTC))
    first, last = (f"{time:%Y-%m-%d}" for time in (min(begun), max(begun)))
    assert studies.read(copied).date == (first if first == last else f"{first} to {last}")
