"""A contiguous part of a row-major tensor as boxes: a checkpoint holds boxes, and optimizers hold flat shards."""

from collections.abc import Iterator
from math import prod

MOST_ELEMENTS = 2**25
"""Of a box, for at most 128 MiB in FP32: who writes or reads one holds it in memory."""
Shape = tuple[int, ...]


def flat_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield, in order, offset and shape of the boxes that elements `begin` to `end` of a row-major tensor make up."""
    if len(shape) == 1:
        yield from (((at,), (min(end - at, MOST_ELEMENTS),)) for at in range(begin, end, MOST_ELEMENTS))
        return
    size = prod(shape[1:])
    row = begin // size
    if begin % size or end < (row + 1) * size:  # a part of one row, up to its end or less
        stop = min(end, (row + 1) * size)
        inside = flat_range(shape[1:], begin - row * size, stop - row * size)
        yield from (((row, *offset), (1, *extent)) for offset, extent in inside)
        begin = stop
    whole_rows, most = range(-(-begin // size), end // size), max(1, MOST_ELEMENTS // size)
    for first in whole_rows[::most]:
        yield (first, *(0 for _ in shape[1:])), (min(most, whole_rows.stop - first), *shape[1:])
    begin = max(begin, whole_rows.stop * size)
    if begin < end:
        yield from flat_range(shape, begin, end)
