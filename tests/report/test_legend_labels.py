"""Short labels of legends, ticks of logarithmic axes, and names in narrow charts."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report import labels
from bench.report.template import text

RUNS = ["20261126-034209-lora_tiny-local-e944", "20261126-054117-lora_tiny-local-0f62"]


OF_ONE_PART = ["a_very_long_name_of_a_run", "a_very_long_name_of_a_run_2"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (RUNS, ["e944", "0f62"]),
        (
            [*RUNS, "20261126-054117-lora_8b-dgx2-0f62"],
            ["lora_tiny-local-e944", "lora_tiny-local-0f62", "lora_8b-dgx2-0f62"],
        ),
        (["before", "<b>after"], ["before", "<b>after"]),
        (RUNS[:1], RUNS[:1]),
        (OF_ONE_PART, OF_ONE_PART),
    ],
    ids=["one task", "several tasks", "short", "alone", "no separate parts"],
)
def test_a_label_has_what_differs(names: list[str], expected: list[str]) -> None:
    assert labels.short(names) == expected


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=6, unique=True))
def test_labels_are_as_different_as_the_names(names: list[str]) -> None:
    assert len(set(labels.short(names))) == len(names)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (40, 580, ["50", "100", "200", "500"]),
        (210, 700, ["300", "500"]),
        (0.02, 3, ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (1, 1e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"]),
    ],
)
def test_log_axes_have_whole_numbers_where_possible(low: float, high: float, ticks: list[str]) -> None:
    shown = labels.log_axis(low, high)["ticktext"]
    assert set(ticks) <= set(shown) and len(shown) <= 10, shown


def test_a_log_axis_has_no_more_ticks_than_it_needs() -> None:
    assert labels.log_ticks(1, 10) == [1, 2, 5, 10]


@given(st.floats(sys.float_info.min, sys.float_info.max), st.floats(1, 1e12))
def test_ticks_are_within_their_axis(low: float, factor: float) -> None:
    high = min(low * factor, sys.float_info.max)
    assert all(
        low * (1 - 1e-5) <= tick <= high * (1 + 1e-5) and math.isfinite(tick) for tick in labels.log_ticks(low, high)
    )


@given(st.text(max_size=80))
def test_names_of_narrow_charts_are_cut_between_letters(name: str) -> None:
    """Never within an escape such as &lt;, so that no markup of a name becomes that of the page."""
    rows = labels.wrapped(text(name)).split("<br>")
    assert len(rows) <= 2 and all("<" not in row for row in rows)
    assert all(row.count("&") == sum(row.count(entity) for entity in ("&amp;", "&lt;", "&gt;")) for row in rows)
