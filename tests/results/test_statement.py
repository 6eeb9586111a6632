"""Verdicts on statements: they follow the data, and their error rates are those of their intervals."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from bench.results.statement import Bounds, StatedValues, StatementVerdict, decide

HOLDS, NOT, UNDECIDED = StatementVerdict.holds, StatementVerdict.does_not_hold, StatementVerdict.undecided
ratios = st.lists(st.floats(0.5, 2), min_size=2, max_size=8).filter(lambda values: np.ptp(np.log(values)) > 1e-6)
bounds = st.floats(0.2, 5)


def pair(values: list[float], name: str = "a") -> StatedValues:
    return StatedValues(first=name, second="b", values=tuple(values))


def scipy_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    logs = np.log(values)
    low, high = stats.t.interval(confidence, len(logs) - 1, loc=logs.mean(), scale=stats.sem(logs))
    return math.exp(low), math.exp(high)


@pytest.mark.long
@given(values=ratios, bound=bounds)
def test_a_verdict_is_the_place_of_scipys_interval(values: list[float], bound: float) -> None:
    low, high = scipy_interval(values)
    assume(min(abs(math.log(end / bound)) for end in (low, high)) > 1e-9)
    expected = HOLDS if low > bound else NOT if high < bound else UNDECIDED
    decision = decide([pair(values)], Bounds(at_least=bound))
    assert decision.verdict is expected
    (interval,) = decision.intervals
    assert (interval.low, interval.high) == pytest.approx((low, high)) and decision.deciding == 0


@pytest.mark.long
@given(values=ratios, bound=bounds)
def test_the_opposite_statement_has_the_opposite_verdict(values: list[float], bound: float) -> None:
    """Of the inverse ratios, and of the other side of the same bound."""
    decided = decide([pair(values)], Bounds(at_least=bound)).verdict
    inverse = decide([pair([1 / value for value in values])], Bounds(at_most=1 / bound)).verdict
    low, high = scipy_interval(values)
    assume(min(abs(math.log(end / bound)) for end in (low, high)) > 1e-9)
    assert inverse is decided
    flipped = {HOLDS: NOT, NOT: HOLDS, UNDECIDED: UNDECIDED}
    assert decide([pair(values)], Bounds(at_most=bound)).verdict is flipped[decided]


@pytest.mark.long
@given(many=st.lists(ratios, min_size=1, max_size=5), bound=bounds)
def test_every_pair_must_be_within_the_bound(many: list[list[float]], bound: float) -> None:
    decision = decide([pair(values, str(k)) for k, values in enumerate(many)], Bounds(at_least=bound))
    each = [decide([pair(values)], Bounds(at_least=bound)).verdict for values in many]
    assert (decision.verdict is HOLDS) == all(one is HOLDS for one in each)
    if decision.verdict is NOT:
        assert NOT in each
    is_refuted = any(scipy_interval(values, 1 - 0.05 / len(many))[1] < bound for values in many)
    assert (decision.verdict is NOT) == is_refuted


def test_one_run_decides_nothing_and_an_arm_that_cannot_run_is_left_out() -> None:
    at_least_1 = Bounds(at_least=1)
    one = decide([pair([1.5])], at_least_1)
    assert one.verdict is UNDECIDED and one.reason == "a / b: n = 1 run: the run-to-run variation is unknown"
    assert one.intervals[0].value == 1.5
    small = StatedValues(first="c", second="b", reason="c: 90 GiB of the 24 GiB of a GPU", cannot_run=True)
    both = decide([pair([1.5, 1.6, 1.55]), small], at_least_1)
    assert both.verdict is HOLDS and both.reason.endswith("; 1 of 2 pairs cannot run here")
    nothing = decide([small], at_least_1)
    assert (nothing.verdict, nothing.reason) == (StatementVerdict.not_measured, small.reason)
    waiting = StatedValues(first="d", second="b", reason="d: not run")
    partly = decide([pair([1.5, 1.6, 1.55]), waiting], at_least_1)
    assert (partly.verdict, partly.reason) == (UNDECIDED, "d / b: d: not run")
    refuted = decide([pair([0.5, 0.51, 0.52]), waiting], at_least_1)
    assert refuted.verdict is NOT, "a missing run cannot save it"


def test_equal_values_are_their_own_interval() -> None:
    assert decide([pair([0.95, 0.95, 0.95])], Bounds(at_least=0.9, at_most=0.95)).verdict is HOLDS
    assert decide([pair([0.96, 0.96])], Bounds(at_most=0.95)).verdict is NOT


@pytest.mark.long
@pytest.mark.parametrize(("num_pairs", "num_runs"), [(1, 3), (6, 3), (6, 6)])
def test_false_verdicts_are_as_rare_as_stated(num_pairs: int, num_runs: int) -> None:
    """By simulation: the true ratio of one pair is exactly the bound, of the others far within it."""
    random, bound, repeats = np.random.default_rng(5), 1.2, 800
    verdicts = []
    for _ in range(repeats):
        centres = [math.log(bound)] + [math.log(bound) + 1] * (num_pairs - 1)
        noise = random.normal(0, 0.02, (num_pairs, num_runs))
        values = [np.exp(centre + row).tolist() for centre, row in zip(centres, noise, strict=True)]
        verdicts.append(decide([pair(one) for one in values], Bounds(at_least=bound)).verdict)
    rates = {one: verdicts.count(one) / repeats for one in (HOLDS, NOT)}
    slack = 3 * math.sqrt(0.025 * 0.975 / repeats)
    assert 0.025 - slack < rates[HOLDS] < 0.025 + slack, "half of 5 %: only one side of the interval can be wrong"
    assert rates[NOT] < 0.025 / num_pairs + slack
