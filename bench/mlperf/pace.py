"""Split the training of a log into stretches between records that count samples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.contract import mllog
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


def stretches(events: Iterable[Event]) -> Iterator[tuple[Event, Stretch]]:
    """Yield the training of a log, in order, each stretch with the record that ends it."""
    pace = Pace()
    for event in events:
        if stretch := pace.advance(event):
            yield event, stretch


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
        stretch, counted = None, event.metadata.get("samples_count")
        samples = counted if is_number(counted) else None
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
