"""Time that a run loses to failing nodes, and the best interval between checkpoints.

A run trains for an interval, saves, and repeats. A failure throws away the work since the last checkpoint, and the run
restarts; it can also fail while it saves or restarts. Times between failures are exponential, which fits runs on many
nodes: Kokolis et al., 2024, arXiv 2410.21680.

Source: Daly, 2006, doi.org/10.1016/j.future.2004.11.016, equation 13 (expected time); Young, 1974,
doi.org/10.1145/361147.361115 (first estimate of the best interval).
"""

import math
from dataclasses import dataclass

from bench.contract.failures import Failures
from bench.errors import ConfigError

NORMAL_90 = 1.645
"""Standard deviations of the middle 90 % of a normal distribution, on each side."""
MOST_MTBFS = 20
"""A run that has to survive so many mean times between failures succeeds once in 5e8 tries."""
_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Checkpoints of a run on nodes that fail, and what it takes."""

    mtbf_s: float
    """Of the whole run."""
    interval_s: float
    """Training time between two checkpoints; the whole run if it saves none."""
    share: float
    """Training time divided by all time, expected."""
    total_s: float
    low_s: float
    high_s: float
    """The middle 90 % of runs."""
    failures: float
    """Expected number."""


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Return the training time between checkpoints that makes the expected time shortest.

    This is the minimum of (exp((t + c) / M) - 1) / t, which Newton's method finds from Young's sqrt(2 c M).
    """
    if checkpoint_s <= 0:
        return 0.0
    save = math.exp(-checkpoint_s / mtbf_s)
    t = min(math.sqrt(2 * checkpoint_s / mtbf_s), 0.99)  # in units of the MTBF; the minimum is below 1
    for _ in range(_STEPS):  # the derivative is zero where (1 - t) = exp(-t) exp(-c / M)
        step = (1 - t - save * math.exp(-t)) / (save * math.exp(-t) - 1)
        t = min(max(t - step, t / 2), (1 + t) / 2)
    return t * mtbf_s


def schedule(training_s: float, num_nodes: int, failures: Failures, *, interval_s: float | None = None) -> Schedule:
    """Return what a run of so much training takes, with the best interval unless one is given.

    A run that is over before its first checkpoint pays saves none.

    Raises:
        ConfigError: the run would hardly ever get from one checkpoint to the next.
    """
    mtbf_s = 3600 * failures.node_mtbf_hours / num_nodes
    interval = interval_s or best_interval_s(mtbf_s, failures.checkpoint_s)
    longest_s = max(min(interval, training_s) + failures.checkpoint_s, failures.restart_s)
    if longest_s > MOST_MTBFS * mtbf_s:
        raise ConfigError(
            f"the run would make no progress: to restart, or to reach the next checkpoint, it needs {longest_s:.0f} s "
            f"without a failure, but one of the {num_nodes} nodes fails every {mtbf_s:.0f} s on average",
            where="cluster.failures",
            fix="use fewer nodes, or correct node_mtbf_hours, restart_s and checkpoint_s",
        )
    if interval >= training_s:
        return _schedule(training_s, training_s, 0.0, mtbf_s, failures.restart_s)
    saved = _schedule(training_s, interval, failures.checkpoint_s, mtbf_s, failures.restart_s)
    if interval_s or training_s > 2 * interval:
        return saved
    without = _schedule(training_s, training_s, 0.0, mtbf_s, failures.restart_s)
    return min(saved, without, key=lambda one: one.total_s)


def _schedule(training_s: float, interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float) -> Schedule:
    mean_s, variance = _segment(interval_s + checkpoint_s, mtbf_s, restart_s)
    segments = training_s / interval_s
    total_s, spread_s = segments * mean_s, NORMAL_90 * math.sqrt(segments * variance)
    return Schedule(
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        share=training_s / total_s,
        total_s=total_s,
        low_s=max(training_s + segments * checkpoint_s, total_s - spread_s),
        high_s=total_s + spread_s,
        failures=total_s / mtbf_s,
    )


def _segment(work_s: float, mtbf_s: float, restart_s: float) -> tuple[float, float]:
    """Return mean and variance of the seconds until `work_s` passes without a failure, with restarts in between."""
    restart = _uninterrupted(restart_s, mtbf_s, 0.0, 0.0)
    return _uninterrupted(work_s, mtbf_s, *restart)


def _uninterrupted(work_s: float, mtbf_s: float, extra_s: float, extra_variance: float) -> tuple[float, float]:
    """Return mean and variance of the seconds until `work_s` passes without a failure; each failure costs `extra_s`.

    The number of failures is geometric, and the time to a failure is exponential, cut off at `work_s`.
    """
    if work_s <= 0:
        return 0.0, 0.0
    x = work_s / mtbf_s
    passes, fails = math.exp(-x), -math.expm1(-x)
    mean_to_failure = mtbf_s - work_s * passes / fails
    second_moment = (2 * mtbf_s**2 * fails - (work_s**2 + 2 * mtbf_s * work_s) * passes) / fails
    lost = mean_to_failure + extra_s
    lost_variance = max(0.0, second_moment - mean_to_failure**2) + extra_variance
    count, count_variance = fails / passes, fails / passes**2
    return work_s + count * lost, count * lost_variance + count_variance * lost**2
