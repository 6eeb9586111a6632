"""Progress of long work in plain lines: share, rate and remaining time. Only rank 0 prints it."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 10.0
"""Between two lines; shorter work prints nothing."""
_LOG = logging.getLogger(__name__)


class Progress:
    """Counts completed work out of a total, in a unit of the caller's."""

    def __init__(self, what: str, total: float, unit: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._unit, self._now = what, total, unit, now
        self._done, self._began_s = 0.0, now()

    def add(self, amount: float) -> None:
        self._done += amount

    def line(self) -> str:
        """Return the progress in one line; with rate and remaining time once there is progress."""
        share = self._done / self._total if self._total else 1.0
        line = f"{self._what}: {share:.0%} of {self._total:,.4g} {self._unit}"
        elapsed_s = self._now() - self._began_s
        if not self._done or elapsed_s <= 0:
            return line
        rate = self._done / elapsed_s
        left_s = round((self._total - self._done) / rate)
        return f"{line}, {rate:,.3g} {self._unit}/s, {left_s // 60}:{left_s % 60:02} left"


def tracked(
    items: Iterable[T],
    *,
    what: str,
    total: float,
    unit: str,
    size: Callable[[T], float] = lambda item: 1,
    write: Callable[[str], None] = _LOG.info,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the items, and write a progress line every EVERY_S: by count, or by the sizes of the items."""
    progress, due_s = Progress(what, total, unit, now=now), now() + EVERY_S
    for item in items:
        yield item
        progress.add(size(item))
        if now() >= due_s:
            due_s = now() + EVERY_S
            write(progress.line())
