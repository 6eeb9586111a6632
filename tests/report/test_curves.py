"""Curves of a page show the logged values; long curves are thinned."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bench.mlperf.result import parse
from bench.report import curves
from bench.report.canvas import INVALID_COLOR
from bench.report.study.page import ArmRuns
from helpers.types import MakeLog


def test_evaluations_are_drawn_by_samples_and_by_minutes(written_log: MakeLog) -> None:
    """The second trial misses its target: red and dotted. The first one evaluates every three minutes."""
    good, bad = parse(written_log()), parse(written_log(name="bad.txt", evals=(0.96, 0.94)))
    times = [replace(e, time_ms=60_000 + 180_000 * n) for n, e in enumerate(good.evaluations, 1)]
    results = (replace(good, run_start_ms=60_000, evaluations=tuple(times)), bad)
    runs = ArmRuns(name="set", trial_names=("0", "1"), results=results)
    by_samples, by_minutes = curves.evaluation_chart([runs], band=[(1536.0, 0.93, 0.95)])["views"]
    low, high, first, second = by_samples["traces"]
    assert (low["y"], high["y"], high["fill"]) == ([0.93], [0.95], "tonexty")
    assert (first["x"], first["y"]) == ([1536, 1920, 2304], [0.95, 0.93, 0.92])
    assert (first["line"]["dash"], second["line"]["dash"], second["line"]["color"]) == ("solid", "dot", INVALID_COLOR)
    assert second["name"] == "trial 1 (invalid)"
    (line,) = by_samples["layout"]["shapes"]
    assert (line["y0"], line["y1"], line["label"]["text"]) == (0.925, 0.925, "target 0.925")
    assert (by_minutes["traces"][0]["x"], by_minutes["traces"][0]["y"]) == ([3, 6, 9], [0.95, 0.93, 0.92])


@pytest.mark.long
def test_long_curve_keeps_peaks_and_drops_non_finite_points() -> None:
    draw = random.Random(0)
    points = [(float(n), draw.random()) for n in range(100_000)]
    points[54_321], points[12_345], points[7] = (54_321.0, 9.0), (12_345.0, -9.0), (7.0, math.nan)
    kept = curves.thinned(points)
    assert len(kept) <= 1500 and {(54_321.0, 9.0), (12_345.0, -9.0)} <= set(kept)
    assert kept == sorted(kept) and set(kept) <= set(points)
    assert curves.thinned(points[:7]) == points[:7]


@pytest.mark.parametrize("count", [1, 7, 20_000])
def test_a_distribution_is_the_share_of_steps_within_a_time(count: int) -> None:
    times = np.random.default_rng(0).lognormal(size=count).round(2)
    points = curves.distribution([*times, math.inf])
    known = stats.ecdf(times).cdf
    x, y = zip(*points[1:], strict=True)
    assert points[0] == (min(times), 0.0) and points[-1] == (max(times), 100.0) and len(points) <= 1502
    assert all(share <= 100 * known.evaluate(time) + 1e-9 for time, share in points)
    last = dict(zip(x, y, strict=True))
    if count == 7:
        assert last == pytest.approx({time: 100 * known.evaluate(time) for time in last})
    assert curves.distribution([]) == []


def test_the_first_of_two_equal_curves_is_seen_below_the_second(written_log: MakeLog) -> None:
    result = parse(written_log())
    names = ("20261126-034209-lora_tiny-local-e944", "20261126-054117-lora_tiny-local-0f62")
    sets = [ArmRuns(name=name, trial_names=("0",), results=(result,)) for name in names]
    first, second = curves.evaluation_chart(sets)["views"][0]["traces"]
    assert first["y"] == second["y"] and first["line"]["width"] >= second["line"]["width"] + 1.5
    assert (first["name"], second["name"]) == ("e944", "0f62")
