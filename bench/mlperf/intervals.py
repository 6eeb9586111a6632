"""Read the times of steps and evaluations from the records of a log."""

from collections.abc import Iterable, Iterator

from bench.contract import mllog
from bench.mlperf.log import Log, number
from bench.mlperf.reader import Event, is_number


def listed_s(event: Event) -> list[float]:
    """Return the step times that a record lists; empty if it lists none, or not only numbers."""
    listed = event.value.get(mllog.STEP_TIMES) if isinstance(event.value, dict) else None
    return listed if isinstance(listed, list) and all(map(is_number, listed)) else []


def step_times_ms(log: Log) -> list[tuple[float, float]]:
    """Return (samples, milliseconds) of each step, as our own runs list them; empty if none are listed."""
    found: list[tuple[float, float]] = []
    gbs = log.integer(mllog.GLOBAL_BATCH_SIZE)
    for event in log.all(mllog.TRACKED_STATS):
        samples, listed = number(event.metadata.get("samples_count")), listed_s(event)
        if not gbs or samples is None:
            continue
        first = samples - gbs * (len(listed) - 1)
        found += [(first + gbs * place, 1000 * seconds) for place, seconds in enumerate(listed) if seconds > 0]
    return found


def evaluations(events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield the eval_start and the eval_stop of each evaluation."""
    start: Event | None = None
    for event in events:
        if event.key == mllog.EVAL_START:
            start = event
        elif event.key == mllog.EVAL_STOP and start:
            yield start, event
            start = None


def eval_times_s(events: Iterable[Event]) -> list[float]:
    """Return the seconds of each evaluation by the wall clock, without those that it gives a time below zero."""
    times = [(stop.time_ms - start.time_ms) / 1000 for start, stop in evaluations(events)]
    return [time for time in times if time >= 0]
