"""Which settings are the fastest by the steps of each block, and when no further block is needed."""

import random
from collections.abc import Mapping

import pytest

from bench.results.tuning import Outcome
from bench.tuning.decide import Decision, confidence, decide

BLOCKS = 6


def decided(steps: Mapping[str, list[float]], **failed: int) -> Decision:
    values = {name: dict(enumerate(of_blocks)) for name, of_blocks in steps.items()}
    return decide(list(steps), values, failed=failed, max_blocks=BLOCKS)


def outcomes(decision: Decision) -> dict[str, Outcome]:
    return {name: one.outcome for name, one in decision.judged.items()}


def test_nothing_is_known_before_the_first_block_and_nothing_is_decided_by_one() -> None:
    assert decided({"a": [], "b": []}).alive == ["a", "b"]
    one = decided({"a": [10.0], "b": [20.0]})
    assert one.best == "a" and not one.is_final and one.alive == ["a", "b"]


def test_slower_settings_are_left_out_and_the_others_go_on() -> None:
    decision = decided({"a": [10.0, 10.1, 10.0], "b": [20.0, 20.3, 20.1], "c": [10.2, 9.9, 10.4]})
    assert outcomes(decision)["b"] is Outcome.slower and outcomes(decision)["c"] is Outcome.undecided
    assert decision.alive == ["a", "c"] and not decision.is_final


def test_left_out_settings_need_no_later_block_and_stay_out() -> None:
    """b was left out after the second block; later ones have no run of it, and the fastest has changed."""
    steps = {"a": [10.0, 10.0, 14.0, 14.0], "b": [20.0, 20.0], "c": [10.3, 9.9, 10.4, 10.2]}
    decision = decided(steps)
    assert decision.num_blocks == 4 and decision.best == "c"
    assert outcomes(decision)["b"] is Outcome.slower
    compared = decision.judged["b"].comparison
    assert compared is not None and compared.names == ("b", "a")


def test_equal_settings_end_the_measurement() -> None:
    decision = decided({"a": [10.0, 10.01, 10.0, 10.0], "b": [10.01, 10.0, 10.0, 10.01]})
    assert Outcome.equivalent in outcomes(decision).values() and decision.is_final


def test_settings_within_two_percent_are_equivalent_and_others_are_not() -> None:
    """Also if the difference is significant."""
    noise = [0.0, 0.01, -0.01, 0.01, 0.0, -0.01]
    decision = decided({name: [step + more for more in noise] for name, step in (("a", 10), ("b", 10.1), ("c", 10.5))})
    assert outcomes(decision) == {"a": Outcome.fastest, "b": Outcome.equivalent, "c": Outcome.slower}


def test_a_failed_run_takes_its_settings_out_from_this_block_on() -> None:
    decision = decided({"a": [10.0, 10.1], "b": [9.0], "c": [30.0, 30.3]}, b=1)
    assert outcomes(decision) == {"a": Outcome.fastest, "b": Outcome.failed, "c": Outcome.slower}
    assert decision.is_final and decision.num_blocks == 2
    assert not decided({"a": [], "b": []}, a=0, b=0).alive
    assert decided({"a": [10.0, 10.1], "b": []}, b=0).num_blocks == 2, "the only one left is measured twice"


def test_an_incomplete_block_does_not_count() -> None:
    assert decided({"a": [10.0, 10.0], "b": [20.0]}).num_blocks == 1


@pytest.mark.slow
def test_equal_settings_are_seldom_called_slower() -> None:
    """Of 60 measurements of four equal settings with 1 % of noise, 5 % may say so; 10 would be luck of 1 in 2,000."""
    source, wrong = random.Random(1), 0
    for _ in range(60):
        steps = {name: dict(enumerate(source.gauss(100, 1) for _ in range(4))) for name in "abcd"}
        wrong += Outcome.slower in outcomes(decide(list(steps), steps, failed={}, max_blocks=4)).values()
    assert wrong < 10


def test_the_confidence_accounts_for_comparisons_and_looks() -> None:
    assert confidence(2, 2) == 0.95
    assert confidence(5, 6) == 1 - 0.05 / 4 / 5
