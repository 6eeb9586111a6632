"""Time lost to failing nodes: the closed form agrees with a simulation of single failures."""

import math

import numpy as np
import pytest

from bench.contract.failures import Failures
from bench.errors import ConfigError
from bench.prediction import failures

META = Failures(source="arXiv 2410.21680", node_mtbf_hours=47 * 24, restart_s=900, checkpoint_s=60)


def simulated(training_s: float, mtbf_s: float, interval_s: float, seed: int, runs: int) -> np.ndarray:
    """Run after run, failure after failure; failures during checkpoints and restarts count, too."""
    rng, totals = np.random.default_rng(seed), []
    for _ in range(runs):
        now, done, failure = 0.0, 0.0, rng.exponential(mtbf_s)
        while done < training_s:
            work = min(interval_s, training_s - done)
            if now + work + META.checkpoint_s <= failure:
                now, done = now + work + META.checkpoint_s, done + work
                continue
            now, failure = failure, failure + rng.exponential(mtbf_s)
            while now + META.restart_s > failure:
                now, failure = failure, failure + rng.exponential(mtbf_s)
            now += META.restart_s
        totals.append(now)
    return np.array(totals)


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [128, 512, 2048])
def test_the_closed_form_agrees_with_a_simulation(num_nodes: int) -> None:
    planned = failures.schedule(10 * 86400, num_nodes, META)
    totals = simulated(10 * 86400, planned.mtbf_s, planned.interval_s, seed=num_nodes, runs=150)
    assert planned.total_s == pytest.approx(totals.mean(), rel=0.02)
    assert planned.low_s == pytest.approx(np.quantile(totals, 0.05), rel=0.02)
    assert planned.high_s == pytest.approx(np.quantile(totals, 0.95), rel=0.02)


@pytest.mark.parametrize("num_nodes", [1, 64, 2048])
def test_no_other_interval_is_better(num_nodes: int) -> None:
    best = failures.schedule(30 * 86400, num_nodes, META)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other = failures.schedule(30 * 86400, num_nodes, META, interval_s=factor * best.interval_s)
        assert other.total_s > best.total_s


def test_the_interval_is_young_s_if_failures_are_rare() -> None:
    assert failures.best_interval_s(1e9, 30) == pytest.approx(math.sqrt(2 * 30 * 1e9), rel=1e-3)


def test_a_short_run_saves_no_checkpoint() -> None:
    planned = failures.schedule(600, 1, META)
    assert planned.interval_s == 600 and planned.share > 0.999


def test_a_run_that_never_gets_on_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="it needs 900 s without a failure, but one of the 100000 nodes fails every 41 s on average",
    ):
        failures.schedule(86400, 100_000, META)


def test_a_run_of_less_than_two_intervals_saves_no_checkpoint() -> None:
    """The second half of a run is shorter than a checkpoint pays for."""
    interval_s = failures.schedule(30 * 86400, 64, META).interval_s
    planned = failures.schedule(1.5 * interval_s, 64, META)
    with_one = failures.schedule(1.5 * interval_s, 64, META, interval_s=interval_s)
    assert planned.interval_s == 1.5 * interval_s and planned.total_s < with_one.total_s
