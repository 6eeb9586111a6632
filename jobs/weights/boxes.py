"""Split a contiguous range of a row-major tensor into boxes: checkpoints store boxes, optimizers hold flat shards."""

from collections.abc import Iterator
from math import prod

MOST_ELEMENTS = 2**25
"""Largest size of a box, 128 MiB in FP32; a box is written and read in memory."""
Shape = tuple[int, ...]


def flat_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield, in order, offset and shape of boxes that cover the elements `begin` to `end` of a row-major tensor."""
    if len(shape) == 1:
        yield from (((at,), (min(end - at, MOST_ELEMENTS),)) for at in range(begin, end, MOST_ELEMENTS))
        return
    size = prod(shape[1:])
    while begin < end:
        row, at = divmod(begin, size)
        num_rows = min((end - begin) // size, MOST_ELEMENTS // size)
        if at or not num_rows:  # a part of one row, or a row larger than a box
            stop = min(end, (row + 1) * size)
            inside = flat_range(shape[1:], at, stop - row * size)
            yield from (((row, *offset), (1, *extent)) for offset, extent in inside)
        else:
            stop = begin + num_rows * size
            yield (row, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
        begin = stop
