"""The rates of the verdicts different, equivalent and undecided are those of the theory of the tests."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.errors import ConfigError
from bench.results import comparison
from bench.results.comparison import Comparison, Estimate, Pairing, Verdict, compare, values_by_block, verdicts
from helpers.examples import in_proportion

NUM_SIMULATIONS = 2000
TOLERANCE = 4 * math.sqrt(0.25 / NUM_SIMULATIONS)
"""Four standard errors of a simulated rate, at most."""
BOUND = math.log(1.02)
TEST = {"bound": BOUND, "confidence": 0.95}
DIFFERENT, BOTH = Verdict.different, Verdict.equivalent_different
FASTER, SLOWER = (17809, 17912, 17755, 17850, 17941, 17802), (18010, 18055, 17893, 18021, 18102, 17903)


def rates(first: Any, second: Any, **changes: Any) -> Comparison:
    settings = {"names": ("A", "B"), "measurement": "throughput", "unit": "tokens/s", "higher_is_better": True}
    return compare(first, second, **(settings | changes))


def test_pairs_give_the_interval_and_the_p_value_of_statsmodels() -> None:
    """statsmodels 0.15.0: ttost_paired and DescrStatsW.tconfint_mean of the logarithms; log bounds of 1.02."""
    result = rates(FASTER, SLOWER)
    assert result.ratio == pytest.approx(0.9915289249856433, rel=1e-12)
    assert (result.low, result.high) == pytest.approx((0.98957707, 0.99348463), abs=5e-9)
    assert result.p_equivalent == pytest.approx(1.300921303335818e-05, rel=1e-9)
    assert result.verdict is Verdict.equivalent_different and result.is_better is False
    assert result.text == "equivalent within 2 %, A slower by 0.7–1.0 %"


def test_unpaired_sets_give_those_of_welch() -> None:
    """statsmodels 0.15.0: ttost_ind and CompareMeans.tconfint_diff with usevar="unequal"."""
    result = rates(FASTER, SLOWER[:4], pairing=Pairing.none)
    assert (result.low, result.high) == pytest.approx((0.98565733, 0.99771553), abs=5e-9)
    assert result.p_equivalent == pytest.approx(0.0016065090163891644, rel=1e-9)


@pytest.mark.parametrize(
    ("num_pairs", "half_widths"),
    [(4, (0.68, 1.13, 2.25)), (6, (0.45, 0.74, 1.48)), (10, (0.30, 0.51, 1.01)), (20, (0.20, 0.33, 0.66))],
)
def test_the_half_width_of_the_interval_is_that_of_the_table(num_pairs: int, half_widths: tuple[float, ...]) -> None:
    """The table is in percent, for run-to-run variations of 0.3, 0.5 and 1.0 %."""
    shape = np.linspace(-1, 1, num_pairs)
    for spread, half_width in zip((0.003, 0.005, 0.01), half_widths, strict=True):
        ratios = math.sqrt(2) * spread * shape / np.std(shape, ddof=1)
        result = comparison.of_pairs(ratios, **TEST)
        assert 100 * (result.high - result.low) / 2 == pytest.approx(half_width, abs=0.006)
        assert rates(np.exp(ratios), np.ones(num_pairs)).spread == pytest.approx(spread)


def simulated(difference: float, spread: float, num_pairs: int) -> Estimate:
    """Return the estimates of many comparisons of a system that is slower by this difference."""
    rng = np.random.default_rng(7)
    first, second = rng.normal(0, spread, (2, NUM_SIMULATIONS, num_pairs))
    return comparison.of_pairs(first + math.log1p(-difference) - second, **TEST)


def power(difference: float, spread: float, num_pairs: int) -> tuple[float, float]:
    """Return the power of the t-test for a difference, and of TOST for equivalence.

    Integrals over the distribution of the deviation (chi), given which the mean is normal.
    """
    error, freedom = math.sqrt(2 / num_pairs) * spread, num_pairs - 1
    effect = math.log1p(-difference) / error
    scales = np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, freedom) / freedom)
    critical = stats.t.ppf(0.975, freedom) * scales
    room = np.maximum(0, BOUND / error - stats.t.ppf(0.95, freedom) * scales)
    different = stats.norm.cdf(-critical - effect) + stats.norm.sf(critical - effect)
    return float(np.mean(different)), float(np.mean(stats.norm.cdf(room - effect) - stats.norm.cdf(-room - effect)))


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.003, 0.005, 0.01])
@pytest.mark.parametrize("num_pairs", [3, 6, 10])
def test_planted_differences_are_detected_at_the_rate_of_the_power(spread: float, num_pairs: int) -> None:
    for difference in (0.0, 0.01, 0.05):
        estimate = simulated(difference, spread, num_pairs)
        called = verdicts(estimate, **TEST)
        shares = {verdict: float(np.mean(called == verdict)) for verdict in Verdict}
        rates_shown = ", ".join(f"{verdict} {rate:.3f}" for verdict, rate in shares.items() if rate)
        print(f"{num_pairs} pairs, spread {spread:.1%}, {difference:.0%} slower: {rates_shown}")
        different, equivalent = power(difference, spread, num_pairs)
        assert shares[DIFFERENT] + shares[BOTH] == pytest.approx(different, abs=TOLERANCE)
        assert np.mean(estimate.p_equivalent < 0.05) == pytest.approx(equivalent, abs=TOLERANCE)
        assert np.mean(estimate.low > 0) <= 0.025 + TOLERANCE, "called faster"
    assert shares[DIFFERENT] > 0.99 or num_pairs < 6, "six pairs detect 5 % at each of these variations"


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("spread", [0.003, 0.01])
def test_systems_that_differ_by_the_margin_are_rarely_equivalent(sign: int, spread: float) -> None:
    for num_pairs in (2, 3, 6, 10):
        called = verdicts(simulated(-math.expm1(sign * BOUND), spread, num_pairs), **TEST)
        wrong = float(np.isin(called, (Verdict.equivalent, BOTH)).mean())
        print(f"{num_pairs} pairs, spread {spread:.1%}, at the margin: {wrong:.3f} equivalent")
        assert wrong <= 0.05 + TOLERANCE


def test_a_difference_is_not_equivalent_if_its_interval_exceeds_the_margin() -> None:
    """Mean 0.011, deviation 0.00423: ± 2.920 / √3 of it is within log 1.02, as TOST requires, ± 4.303 / √3 is not."""
    result = rates(np.exp([0.011 - 0.00423, 0.011, 0.011 + 0.00423]), [1, 1, 1])
    assert result.p_equivalent is not None and result.p_equivalent < 0.05
    assert result.text == "A is 0.0–2.2 % faster than B"


@pytest.mark.long
@settings(max_examples=in_proportion(40), deadline=None)
@example(pairs=[(0.5, 0.5), (0.5, math.nextafter(0.5, 1))], scale=3.7, pairing=Pairing.none)
@given(
    pairs=st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=2, max_size=5),
    scale=st.sampled_from([1e-6, 3.7, 1e9]),
    pairing=st.sampled_from(Pairing),
)
def test_neither_the_order_of_the_systems_nor_the_unit_matters(
    pairs: list[tuple[float, float]], scale: float, pairing: Pairing
) -> None:
    first, second = zip(*pairs, strict=True)
    result, swapped = rates(first, second, pairing=pairing), rates(second, first, pairing=pairing)
    assert swapped.ratio == pytest.approx(1 / result.ratio)
    assert (swapped.low, swapped.high) == pytest.approx((1 / result.high, 1 / result.low))
    assert (swapped.verdict, swapped.num_more) == (result.verdict, result.num_more)
    assert result.is_better is None or swapped.is_better is not result.is_better
    scaled = rates([scale * one for one in first], [scale * one for one in second], pairing=pairing)
    assert (scaled.ratio, scaled.low, scaled.high) == pytest.approx((result.ratio, result.low, result.high))
    assert scaled.text == result.text
    times = {"unit": "ms", "higher_is_better": False, "pairing": pairing}
    assert rates([1 / one for one in first], [1 / one for one in second], **times).text == result.text


def test_the_reported_number_of_further_pairs_decides_a_comparison() -> None:
    """With that number of pairs no difference is undecided; with one pair less some differences are."""
    result = rates((100, 103, 98, 101, 95, 102), (101, 100, 99, 102, 98, 100))
    assert result.verdict is Verdict.undecided and result.text == "undecided: 13 more pairs"
    for num_pairs, decided in ((18, False), (19, True)):
        shape = np.tile(np.linspace(-1, 1, num_pairs), (400, 1))
        shape *= math.sqrt(2) * result.spread / np.std(shape[0], ddof=1)
        estimate = comparison.of_pairs(shape + np.linspace(0, 2 * BOUND, 400)[:, None], **TEST)
        assert np.all(verdicts(estimate, **TEST) != Verdict.undecided) == decided


def test_the_bootstrap_interval_differs_with_an_outlier() -> None:
    steady = [100.2, 100.3, 99.9, 100.1, 99.8, 100.0, 99.7]
    assert not rates(steady, [100] * 7).notes
    (note,) = rates([*steady, 90], [100] * 8).notes
    assert note.startswith("the bootstrap interval differs (")


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([95], [100], "n = 1 run of A and of B"),
        ([95, 96], [100], "n = 1 run of B"),
        ([], [100, 101], "A has no value"),
        ([95, 0], [100, 101], "only positive finite numbers can be compared, and A has 0"),
        ([95, 96], [100, math.nan], "only positive finite numbers can be compared, and B has nan"),
    ],
)
def test_values_that_cannot_be_compared_have_a_reason_and_no_numbers(
    first: list[float], second: list[float], reason: str
) -> None:
    result = rates(first, second, pairing=Pairing.none)
    assert result.text.startswith(f"not compared: {reason}")
    assert (result.ratio, result.low, result.high, result.num_more) == (None, None, None, None)


def test_systems_without_a_block_in_common_have_no_pair() -> None:
    values = values_by_block({1: 95.0}, {2: 100.0})
    assert rates(*values, pairing=Pairing.block).text == "not compared: no pair of runs has values of both systems"


def test_values_without_spread_are_compared_as_they_are() -> None:
    assert rates([100, 100], [100, 100]).text == "equivalent within 2 %"
    result = rates([90, 99], [100, 110])
    assert (result.verdict, result.low, result.high) == (Verdict.different, pytest.approx(0.9), pytest.approx(0.9))
    assert result.notes[0].startswith("all ratios are equal")
    assert rates([90, 90], [100, 100, 100], pairing=Pairing.none).text == "A is 10.00 % slower than B"


def test_two_pairs_with_a_large_spread_are_undecided() -> None:
    assert rates((1e-300, 1e300), (1, 1)).text.startswith("undecided: too noisy (runs of the same system differ")
    assert rates((95, 94.9), (100, 99.7)).verdict is Verdict.different


def test_values_that_are_not_speeds_are_higher_or_lower() -> None:
    memory = {"measurement": "peak_memory", "unit": "GiB", "higher_is_better": False}
    result = rates((70, 70.1, 70.2), (80, 80.3, 80.1), **memory)
    assert (result.text, result.is_better) == ("A has 12.1–12.9 % lower peak_memory than B", True)


def test_a_block_that_one_system_lost_has_no_pair() -> None:
    assert values_by_block({0: 1.0, 1: 2.0, 3: 4.0}, {3: 40.0, 0: 10.0, 2: 30.0}) == ((1.0, 4.0), (10.0, 40.0))


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="A has 2 runs, but B has 3 runs"):
        rates((1, 2), (1, 2, 3))
    with pytest.raises(ConfigError, match="margin is 200 %"):
        rates((1, 2), (1, 2), margin=2)
    with pytest.raises(ConfigError, match="confidence is 95"):
        rates((1, 2), (1, 2), confidence=95)
