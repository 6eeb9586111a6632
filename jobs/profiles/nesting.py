"""Find the spans of a thread that are open at a moment. Spans of a thread lie inside each other or apart."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """An operation or a range of a host thread."""

    name: str
    thread: int
    start_us: float
    end_us: float


class Nested:
    """The spans of one thread."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
        self.starts = [span.start_us for span in self.spans]
        self.parents: list[int] = []
        """Of each span the index of the innermost one that was open when it began; -1: none."""
        opened: list[int] = []
        for index, span in enumerate(self.spans):
            while opened and self.spans[opened[-1]].end_us <= span.start_us:
                opened.pop()
            self.parents.append(opened[-1] if opened else -1)
            opened.append(index)

    def open_at(self, at_us: float) -> Iterator[Span]:
        """Yield the spans that are open at a moment, the innermost one first."""
        index = bisect_right(self.starts, at_us) - 1
        while index >= 0:
            if at_us < self.spans[index].end_us:
                yield self.spans[index]
            index = self.parents[index]

    def own_pieces(self) -> Iterator[tuple[Span, list[tuple[float, float]]]]:
        """Yield each span with the pieces of time in which no span inside it is open."""
        inside: list[list[Span]] = [[] for _ in self.spans]
        for span, parent in zip(self.spans, self.parents, strict=True):
            if parent >= 0:
                inside[parent].append(span)
        for span, children in zip(self.spans, inside, strict=True):
            bounds = [span.start_us, *(at for child in children for at in (child.start_us, child.end_us)), span.end_us]
            yield span, list(zip(bounds[::2], bounds[1::2], strict=True))
