"""Split the training of a log into stretches between records that count samples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.contract import mllog
from bench.mlperf.log import Log, number
from bench.mlperf.reader import Event, is_number

_COUNTS = {
    *(mllog.RUN_START, mllog.RUN_STOP, mllog.RESUMED, mllog.BLOCK_START, mllog.BLOCK_STOP),
    *(mllog.EVAL_START, mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS, mllog.TRACKED_STATS),
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training without an evaluation in between."""

    samples: float
    """Seen since run_start, at its end."""
    trained: float
    """Samples within it."""
    time_ms: float


def step_times_ms(log: Log) -> list[tuple[float, float]]:
    """Return (samples, milliseconds) of each step, as our own runs list them; empty if none are listed."""
    found: list[tuple[float, float]] = []
    gbs = log.integer(mllog.GLOBAL_BATCH_SIZE)
    for event in log.all(mllog.TRACKED_STATS):
        samples, listed = number(event.metadata.get("samples_count")), None
        if isinstance(event.value, dict):
            listed = event.value.get(mllog.STEP_TIMES)
        if not gbs or samples is None or not isinstance(listed, list) or not all(map(is_number, listed)):
            continue
        first = samples - gbs * (len(listed) - 1)
        found += [(first + gbs * place, 1000 * seconds) for place, seconds in enumerate(listed) if seconds > 0]
    return found


def eval_times_s(events: Iterable[Event]) -> list[float]:
    """Return the seconds of each evaluation, from eval_start to eval_stop."""
    times, since = [], None
    for event in events:
        if event.key == mllog.EVAL_START:
            since = event.time_ms
        elif event.key == mllog.EVAL_STOP and since is not None:
            times.append((event.time_ms - since) / 1000)
            since = None
    return [time for time in times if time >= 0]


def stretches(events: Iterable[Event]) -> Iterator[Stretch]:
    """Yield the training of a log, in order."""
    pace = Pace()
    for event in events:
        if stretch := pace.advance(event):
            yield stretch


class Pace:
    """Follows a log, event by event.

    Evaluations and training losses count samples from run_start on. The samples_count of a block does so in some logs
    and counts only the block in others, so it is used only if no evaluation follows the block.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, since: int | None) -> None:
        self._samples = 0.0
        self._since = since
        """When training began or a training record last counted; None while it rests."""
        self._until: int | None = None
        """When the block stopped."""
        self._block: float | None = None
        self._is_evaluating = False
        """Whether an eval_start has come, and its result has not."""

    def advance(self, event: Event) -> Stretch | None:
        """Return the stretch of training that an event ends, if it ends one."""
        key = event.key.rstrip()
        if key not in _COUNTS:
            return None
        stretch, samples = None, number(event.metadata.get("samples_count"))
        if key in (mllog.RUN_START, mllog.RUN_STOP):
            self._begin(event.time_ms if key == mllog.RUN_START else None)
        elif key == mllog.RESUMED:  # an earlier attempt has trained on these
            self._samples, self._since = samples or 0.0, event.time_ms
        elif key == mllog.BLOCK_START:
            stretch = self._reach(self._block, self._until)
            self._since, self._until, self._is_evaluating = event.time_ms, None, False
        elif key == mllog.BLOCK_STOP:
            self._until, self._block = event.time_ms, samples
        elif key in (mllog.TRAIN_LOSS, mllog.TRACKED_STATS) and self._until is None:
            if stretch := self._reach(samples, event.time_ms):
                self._since = event.time_ms
        elif key == mllog.EVAL_START:
            self._until, self._is_evaluating = self._until or event.time_ms, True
            if samples is not None:
                stretch = self._rest(samples, self._until)
        elif key == mllog.EVAL_ACCURACY:
            if samples is not None:  # without eval_start, nothing says when training ended: some blocks stop behind it
                stretch = self._rest(samples, self._until if self._is_evaluating else None)
            self._is_evaluating = False
        return stretch

    def _rest(self, samples: float, time_ms: int | None) -> Stretch | None:
        """Return the stretch of training that an evaluation ends."""
        stretch = self._reach(samples, time_ms)
        self._since = self._until = None
        return stretch

    def _reach(self, samples: float | None, time_ms: int | None) -> Stretch | None:
        if samples is None or samples <= self._samples:
            return None
        since, before, self._samples = self._since, self._samples, samples
        if since is None or time_ms is None or time_ms < since or samples - before < 1:
            return None
        return Stretch(samples, samples - before, time_ms - since)
