"""What the listed steps of a log add up to: their time, the time of each epoch, and how many tokens were real.

Only steps count: loading, checkpoints and evaluations are not in these times.
"""

from collections.abc import Sequence

from bench.contract import mllog
from bench.mlperf.intervals import listed_s
from bench.mlperf.log import Log, number


def steps_time_s(step_times_ms: Sequence[tuple[float, float]]) -> float | None:
    """Return the seconds of all listed steps together, whose times are given by (samples, milliseconds)."""
    return sum(time_ms for _, time_ms in step_times_ms) / 1000 if step_times_ms else None


def epoch_times_s(log: Log, step_times_ms: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the seconds of each epoch whose steps are all listed; of random rows, which nobody calls an epoch, none.

    An epoch is a pass over the training rows, without its incomplete last batch.
    """
    gbs, rows = log.integer(mllog.GLOBAL_BATCH_SIZE), log.integer(mllog.TRAIN_SAMPLES)
    if not gbs or not rows or gbs < 1 or rows < gbs or log.has_random_rows:
        return ()
    by_step = {round(samples / gbs): time_ms for samples, time_ms in step_times_ms}
    length = rows // gbs
    epochs = [range(first + 1, first + length + 1) for first in range(0, max(by_step, default=0), length)]
    complete = (epoch for epoch in epochs if all(step in by_step for step in epoch))
    return tuple(sum(by_step[step] for step in epoch) / 1000 for epoch in complete)


def real_token_share(log: Log) -> float | None:
    """Return which part of the tokens of all steps is no padding; None if the log does not count them."""
    gbs, length = log.integer(mllog.GLOBAL_BATCH_SIZE), number(log.value("max_sequence_length"))
    real, steps = 0.0, 0
    for event in log.all(mllog.TRACKED_STATS):
        count = number(event.value.get(mllog.REAL_TOKENS)) if isinstance(event.value, dict) else None
        if count is not None:
            real, steps = real + count, steps + len(listed_s(event))
    every = steps * gbs * length if gbs and length else 0
    return real / every if 0 < real <= every else None
