"""How far long work is, in plain lines: a share, a rate, the time that is left. For rank 0 alone."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 10.0
"""Between two lines; work that ends before the first one is due says nothing."""
_LOG = logging.getLogger(__name__)


class Progress:
    """Counts what is done of a whole, in a unit of the caller's."""

    def __init__(self, what: str, total: float, unit: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._unit, self._now = what, total, unit, now
        self._done, self._began_s = 0.0, now()

    def add(self, amount: float) -> None:
        self._done += amount

    def line(self) -> str:
        """Return the state in one line; rate and time left once something is done and time has passed."""
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
    say: Callable[[str], None] = _LOG.info,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the items, and say every few seconds how many of them, or how much by their sizes, are done."""
    progress, due_s = Progress(what, total, unit, now=now), now() + EVERY_S
    for item in items:
        yield item
        progress.add(size(item))
        if now() >= due_s:
            due_s = now() + EVERY_S
            say(progress.line())
