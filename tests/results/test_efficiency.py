"""Efficiency coefficients equal the published ones, and have an interval if runs are repeated."""

import math

import pytest

from bench.errors import ConfigError
from bench.results.comparison import Pairing
from bench.results.efficiency import coefficient


@pytest.mark.parametrize(
    ("value", "reference", "printed"),
    [
        (93, 29, "3.2"),  # table 1: minutes of pre-training 70B, 1,000 steps, one node
        (10, 7, "1.4"),
        (1210, 20, "60.5"),
        (58, 20, "2.9"),
        (124, 68, "1.8"),  # table 1: minutes of fine-tuning 70B, 500 steps
        (26, 10, "2.6"),
        (537, 39, "13.8"),
        (74, 39, "1.9"),
        (439, 107, "4.1"),  # table 2: seconds of all answers of 70B
        (0.054, 0.0139, "3.9"),
        (17.6, 71, "0.25"),  # table 2: tokens a second
        (18.4, 71, "0.26"),
        (120, 7, "17.14"),  # table 3: minutes of pre-training 7B, 2,000 steps
        (62, 4, "15.5"),
        (492, 5, "98.4"),
        (72, 5, "14.4"),
        (325, 28, "11.6"),
        (3750, 15, "250"),
        (191, 15, "12.7"),
        (155, 15, "10.33"),  # table 4
        (0.02, 0.0019, "10.5"),
        (49, 515, "0.095"),
    ],
)
def test_coefficients_are_the_published_ones(value: float, reference: float, printed: str) -> None:
    result = coefficient([value], [reference])
    decimals = len(printed.partition(".")[2])
    assert f"{result.value:.{decimals}f}" == printed
    assert (result.low, result.high, result.n) == (None, None, (1, 1)) and "n = 1" in result.reason


def test_the_interval_is_that_of_the_delta_method() -> None:
    """Var(log ratio) is to first order the sum of the squared relative standard errors; Welch has 3.87 degrees here."""
    result = coefficient([93, 94, 92], [29, 29.5, 29.2])
    mean, relative_error = 93 / 29.23333, math.hypot(1 / 93, 0.251661 / 29.23333) / math.sqrt(3)
    half_width = 2.811 * relative_error  # the quantile of t with 3.87 degrees of freedom
    assert result.value == pytest.approx(mean, rel=1e-4)
    assert (result.low, result.high) == pytest.approx((mean * (1 - half_width), mean * (1 + half_width)), rel=1e-3)
    assert result.text == "3.18 (3.11–3.25)"


def test_pairing_removes_the_variation_between_blocks() -> None:
    paired = coefficient([30, 33, 36.3], [10, 11.01, 12.1], pairing=Pairing.block)
    unpaired = coefficient([30, 33, 36.3], [10, 11.01, 12.1])
    assert paired.low is not None and paired.low > 2.9 and unpaired.low is not None and unpaired.low < 2.5


@pytest.mark.parametrize("values", [[], [0], [10, -1]])
def test_values_that_are_not_positive_are_refused(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="the efficiency coefficient cannot be computed: "):
        coefficient(values, [10, 11])
