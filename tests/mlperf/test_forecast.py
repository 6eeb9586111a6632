"""Test that a forecast starts as the published distribution and follows the losses of the run."""

import json
import math
import runpy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from bench.mlperf.benchmarks import Goal
from bench.mlperf.forecast import Forecast, band, forecast, latest_outside, outside_band, predict
from bench.mlperf.forecast.curve import Reference, lag_weights, reference
from helpers.paths import CORPUS, ROOT

LORA = "llama2_70b_lora"
SCORING = ROOT / "experiments" / "forecast.py"

Evaluations = list[tuple[float, float]]


def lora(evaluations: Evaluations, *, gbs: int = 8, grid: list[int] | None = None) -> Forecast | None:
    return forecast(evaluations, benchmark=LORA, global_batch_size=gbs, target=0.925, grid=grid)


def expect(evaluations: Evaluations, *, gbs: int = 8, grid: list[int] | None = None) -> Forecast:
    result = lora(evaluations, gbs=gbs, grid=grid)
    assert result is not None
    return result


def on_grid(losses: list[float]) -> Evaluations:
    return [(1536 + 384 * place, loss) for place, loss in enumerate(losses)]


@pytest.mark.parametrize(("gbs", "num_systems"), [(8, 136), (16, 7), (64, 9), (128, 2)])
def test_without_evaluations_each_published_system_weighs_the_same(gbs: int, num_systems: int) -> None:
    """With two systems' weight for other batch sizes, and 4 % for systems that learn more slowly than all."""
    rows = json.loads((ROOT / "bench/mlperf/data/llama2_70b_lora_samples.json").read_text())["systems"]
    systems = [row["counts"] for row in rows if row["global_batch_size"] == gbs]
    result = expect([], gbs=gbs)
    assert len(systems) == num_systems and f"({num_systems} systems)" in result.source
    for chance in result.chances:
        share = sum(
            sum(runs for at, runs in counts.items() if int(at) <= chance.samples) / sum(counts.values())
            for counts in systems
        )
        least, most = share / (num_systems + 2), (share + 2) / (num_systems + 2)
        assert 0.95 * least - 1e-9 <= chance.cumulative <= most + 0.05


def test_a_batch_size_between_the_published_ones_is_forecast_from_the_others() -> None:
    """At GBS 24, between 16 and 32, where the interpolated reference mean is 4,549 samples."""
    result = expect([], gbs=24)
    assert result.num_runs == 0 and "no published run" in result.source
    assert result.samples_median is not None and 4200 <= result.samples_median <= 5000


def test_at_batch_size_8_nine_runs_of_ten_need_2688_to_3456_samples() -> None:
    result = expect([])
    assert (result.samples_low, result.samples_median, result.samples_high) == (2688, 3072, 3456)


@pytest.mark.parametrize("scale", [0.05, 0.21, 1.7])
def test_lags_are_students_t_with_3_degrees_of_freedom(scale: float) -> None:
    lags = np.arange(-40, 161) / 40
    density = stats.t(3, scale=scale).pdf(lags)
    np.testing.assert_allclose(lag_weights(lags, scale=scale), density / density.sum(), rtol=1e-12)


losses = st.lists(st.floats(0.92501, 0.945), max_size=7)


@pytest.mark.long
@given(losses, st.sampled_from([8, 9, 64]))
@example([2.0], 8)
@example([0.9251] * 7, 9)
def test_probabilities_add_up(losses: list[float], gbs: int) -> None:
    result = lora(on_grid(losses), gbs=gbs)
    if result is None:
        assert outside_band(on_grid(losses), benchmark=LORA, global_batch_size=gbs)
        return
    steps = [chance.probability for chance in result.chances]
    assert min(steps) >= 0 <= result.later
    assert math.fsum([*steps, result.later]) == pytest.approx(1)
    totals = [chance.cumulative for chance in result.chances]
    assert totals == sorted(totals) and totals[-1] == pytest.approx(1 - result.later)
    assert result == lora(on_grid(losses), gbs=gbs), "the same losses, another forecast"


@pytest.mark.long
@given(losses.filter(len), st.floats(0.92501, 0.945))
@example([0.9374, 0.9317], 0.9318)
@example([0.94, 0.9326, 0.9301, 0.9275], 0.93)
def test_a_lower_last_loss_never_lowers_the_chance_at_the_next_evaluation(losses: list[float], other: float) -> None:
    high, low = max(losses[-1], other), min(losses[-1], other)
    runs = [on_grid([*losses[:-1], last]) for last in (high, low)]
    if any(outside_band(run, benchmark=LORA, global_batch_size=8) for run in runs):
        return  # there a high loss may also be that of a recipe that catches up
    worse, better = map(lora, runs)
    if worse and better:  # a high loss may also be a spike, which says less about the next one
        assert better.chances[0].probability >= worse.chances[0].probability - 0.05


def test_a_run_behind_the_curve_is_expected_later() -> None:
    ahead, behind = (expect(on_grid(losses)) for losses in ([0.9355, 0.931, 0.9275], [0.943, 0.938, 0.934]))
    at = [{c.samples: c.probability for c in result.chances}[2688] for result in (ahead, behind)]
    assert at[0] > 2 * at[1]
    assert sum(c.samples * c.probability for c in ahead.chances) < sum(
        c.samples * c.probability for c in behind.chances
    )


def test_a_converged_run_is_certain() -> None:
    result = expect(on_grid([0.94, 0.932, 0.9249, 0.927]))
    assert [(c.samples, c.probability, c.cumulative) for c in result.chances] == [(2304, 1, 1)]
    assert (result.samples_low, result.samples_median, result.samples_high, result.later) == (2304, 2304, 2304, 0)
    assert result.num_runs == 0 and "1,359" not in result.source


def test_another_model_gets_no_forecast() -> None:
    """A tiny model that logs the same benchmark."""
    assert outside_band([(1536, 1.46)], benchmark=LORA, global_batch_size=8)
    assert lora([(1536, 1.46)]) is None


def test_a_recipe_outside_the_reference_band_gets_a_wider_forecast() -> None:
    """A run that switches precision and improves at the end first looks like a slow run."""
    assert outside_band([(1536, 0.957)], benchmark=LORA, global_batch_size=8)
    unlike, usual = expect([(1536, 0.957)]), expect([(1536, 0.94)])
    assert unlike.samples_high is None or unlike.samples_high > expect_number(usual.samples_high)
    assert "outside the reference band" in unlike.source and "outside" not in usual.source


FP4_SWITCHED_TO_FP8 = [0.9731, 0.9639, 0.9545, 0.9485]
"""A published v6.0 run on eight MI355X (MXFP4), of a system that is not in the fit: 0.92497 at 3,072
samples."""


@pytest.mark.parametrize("seen", range(1, 5))
def test_run_that_is_not_in_the_fit_is_in_its_wider_range(seen: int) -> None:
    """Its likeliest end is the evaluation after published recipes switch, and half of the runs need one more."""
    result = expect(on_grid(FP4_SWITCHED_TO_FP8[:seen]))
    assert result.samples_low is not None and result.samples_low <= 3072
    assert result.samples_high is None or result.samples_high >= 3072
    assert max(result.chances, key=lambda chance: chance.probability).samples == 3072
    assert result.samples_median is not None and result.samples_median <= 3840


def test_a_slow_run_outside_the_band_may_fall_more_slowly_than_the_reference() -> None:
    """A published run at GBS 16 (v5.1, 128 B200) whose 14th evaluation reached the target."""
    losses = [0.9499, 0.9542, 0.9718, 0.9382, 0.9351, 0.9326, 0.9364]
    past = [(1920.0 + 384 * place, loss) for place, loss in enumerate(losses)]
    result = expect(past, gbs=16, grid=list(range(1920, 1920 + 50 * 384, 384)))
    reached = 1920 + 13 * 384
    assert result.samples_low is not None and result.samples_low <= reached
    assert result.samples_high is None or result.samples_high >= reached


def test_a_loss_far_above_the_band_that_a_published_run_recovered_from_is_forecast() -> None:
    """1.2184 at 1,536 samples, v5.1 on eight B200; it reached the target at 3,456."""
    result = expect([(1536, 1.2184)])
    assert result.samples_low is not None and result.samples_low <= 3456
    assert result.samples_high is None or result.samples_high >= 3456


def test_latest_loss_outside_the_band_is_reported_with_the_band() -> None:
    """The last of three evaluations is back inside; the two before it are not."""
    runs: list[tuple[Evaluations, int]] = [
        (on_grid([0.957, 0.953, 0.930]), 8),
        ([(1530, 0.96), (1908, 0.953), (2286, 0.931)], 9),
    ]
    for run, gbs in runs:
        outside = latest_outside(run, benchmark=LORA, global_batch_size=gbs)
        assert outside is not None
        loss, point = outside
        assert (point.samples, loss) == run[1]
        assert point.low < point.high < loss
    assert latest_outside(on_grid([0.94, 0.932]), benchmark=LORA, global_batch_size=8) is None


def test_the_band_and_the_chances_are_those_of_the_stated_distributions() -> None:
    """Against scipy's Student t and logistic distributions, by numerical integration over the lag."""
    known = reference(LORA, 8)
    assert known is not None and known.curve is not None
    curve, point = known.curve, band(LORA, 8)[1]
    lags = np.linspace(-1, 4, 20001)
    weights = stats.t.pdf(lags / curve.lag_scale, 3)
    at = known.progress(point.samples)
    means = curve.limit_loss + curve.drop_loss * np.exp(-curve.rate * (at - lags))
    for share, loss in ((0.005, point.low), (0.995, point.high)):
        below = stats.logistic.cdf(loss, loc=means, scale=curve.noise_scale)
        assert np.average(below, weights=weights) == pytest.approx(share, abs=2e-4)


def expect_number(value: float | None) -> float:
    assert value is not None
    return value


def test_one_spike_does_not_put_a_run_outside_the_band() -> None:
    spiked: Evaluations = on_grid([0.9393, 0.9322, 0.9294, 0.9383])
    assert not outside_band(spiked, benchmark=LORA, global_batch_size=8)
    assert expect(spiked).samples_median == 3072


@pytest.mark.parametrize(
    ("benchmark", "gbs", "target"),
    [("bert", 8, 0.72), (LORA, 4, 0.925), (LORA, 8, 0.9), (LORA, 8, None), (None, 8, 0.925), (LORA, None, 0.925)],
)
def test_no_forecast_without_published_runs(benchmark: str | None, gbs: int | None, target: float | None) -> None:
    assert forecast([], benchmark=benchmark, global_batch_size=gbs, target=target) is None


@given(
    st.lists(st.tuples(st.floats(-1e18, 1e18), st.floats(-1e18, 1e18)), max_size=4), st.lists(st.integers(), max_size=4)
)
def test_damaged_evaluations_and_grids_do_not_raise(evaluations: Evaluations, grid: list[int]) -> None:
    result = lora(evaluations, grid=grid)
    assert result is None or math.fsum([*(c.probability for c in result.chances), result.later]) == pytest.approx(1)


def test_a_grid_of_its_own_ends_the_forecast() -> None:
    result = expect(on_grid([0.939, 0.933]), grid=[1536, 1920, 2304, 2688])
    assert [chance.samples for chance in result.chances] == [2304, 2688]
    assert 0.8 < result.later < 0.99
    assert (result.samples_low, result.samples_high) == (None, None)


def test_without_a_curve_it_is_the_share_of_runs_that_needed_longer() -> None:
    """Of 20 reference runs 9 needed 172032, 10 needed 184320, one needed 196608 samples."""
    known = reference("llama31_8b", 32)
    assert known is not None
    counted = replace(
        known.convergence, kind="reference runs", shares=((172032, 0.45), (184320, 0.5), (196608, 0.05)), num_runs=20
    )
    result = predict([(172032, 3.4)], Reference(counted, None, None), goal=Goal(3.3))
    assert result is not None
    assert {c.samples: c.probability for c in result.chances if c.probability} == pytest.approx(
        {184320: 10 / 11, 196608: 1 / 11}
    )


PRETRAINING = [(12_288 * n, loss) for n, loss in enumerate((5.27, 4.25, 3.96, 3.79, 3.68, 3.6, 3.535, 3.482, 3.437), 1)]
"""A made-up run of llama31_8b at GBS 16, near the mean of the published ones."""


def pretraining(evaluations: Evaluations) -> Forecast:
    result = forecast(evaluations, benchmark="llama31_8b", global_batch_size=16, target=3.3)
    assert result is not None
    return result


def test_before_the_first_evaluation_of_pretraining_the_published_systems_count() -> None:
    result = pretraining([])
    assert (result.samples_low, result.samples_median, result.samples_high) == (159_744, 172_032, 184_320)
    assert result.num_runs == 150 and "(15 systems)" in result.source


def test_the_losses_of_pretraining_narrow_its_forecast() -> None:
    """A run whose loss is 0.05 above the mean needs at least one evaluation more."""
    usual = pretraining([*PRETRAINING, (122_880, 3.4005), (135_168, 3.368), (147_456, 3.3394)])
    slow = pretraining([*PRETRAINING, (122_880, 3.4505), (135_168, 3.418), (147_456, 3.3894)])
    assert usual.samples_low is not None and usual.samples_median is not None and usual.samples_high is not None
    assert usual.samples_median == 172_032 and usual.samples_high - usual.samples_low <= 24_576
    assert slow.samples_median is not None and slow.samples_median >= usual.samples_median + 12_288


def test_early_evaluations_of_pretraining_say_nothing() -> None:
    """The reference curve begins at three fifths of the mean samples to the target."""
    assert pretraining(PRETRAINING[:6]).chances == pretraining([(at, loss + 1) for at, loss in PRETRAINING[:6]]).chances
    first = band("llama31_8b", 16)[0]
    assert 90_000 < first.samples < 120_000 and first.low < 3.45 < first.high
    assert not outside_band(PRETRAINING[:3], benchmark="llama31_8b", global_batch_size=16)


def test_the_band_falls_towards_the_target() -> None:
    points = band(LORA, 8)
    assert [p.samples for p in points] == list(range(1536, 4225, 384))
    assert all(p.low < p.high for p in points)
    assert [p.high for p in points] == sorted((p.high for p in points), reverse=True)
    assert all(p.low < 0.925 < p.high for p in points if 2688 <= p.samples <= 3456)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="no corpus of real logs here")
def test_on_real_runs_the_ranges_of_minutes_hold_what_they_state() -> None:
    """Each tenth of the time of a run, as `watch` shows it then; without a range of the pace they held 40 %."""
    replay = runpy.run_path(str(SCORING.with_name("forecast_minutes.py")))
    logs = sorted(CORPUS.rglob("llama2_70b_lora/*.txt"))[::4]
    moments = [m for log in logs for m in replay["moments"](log)]
    given = [m for m in moments if m.outlook.minutes_range]
    assert len(moments) > 110 and len(given) >= 0.95 * len(moments)
    assert sum(map(replay["holds"], given)) / len(given) >= 0.90


@pytest.mark.long
@pytest.mark.skipif(not CORPUS.is_dir(), reason="no corpus of real logs here")
@pytest.mark.parametrize("out", ["system", "round"])
def test_on_systems_that_were_left_out_the_ranges_hold_what_they_state(out: str) -> None:
    """Within two standard errors, all moments of a system counting as one; better than without the losses."""
    score = runpy.run_path(str(SCORING))
    runs = score["leaving_out"](score["trials"](CORPUS, LORA), out)
    moments = [m for run in runs for m in score["moments"](run)]
    forecasts = [m for m in moments if m.forecast and m.samples_to_target]
    for group in (forecasts, [m for m in forecasts if not m.seen], [m for m in forecasts if m.seen]):
        excess: dict[str, float] = {}
        for m in group:
            held = score["covers"](m.forecast, m.samples_to_target) - score["stated"](m.forecast)
            excess[m.trial.system] = excess.get(m.trial.system, 0.0) + held
        error = math.sqrt(sum(each**2 for each in excess.values()))
        assert len(excess) > 25 and abs(sum(excess.values())) < 2 * error

    def log_score(m: object, name: str) -> float:
        chance = score["next_chance"](getattr(m, name))
        return math.log(max(score["NEVER"], chance if m.next_reached else 1 - chance))  # type: ignore[attr-defined]

    both = [m for m in forecasts if m.baseline]
    assert sum(log_score(m, "forecast") for m in both) > sum(log_score(m, "baseline") for m in both)
