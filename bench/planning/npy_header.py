"""Read the header of an .npy file, without numpy."""

import ast
import struct
from dataclasses import dataclass
from pathlib import Path

NPY = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class Npy:
    """The header of an .npy file."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """The size of the whole file that shape and dtype imply."""


def read(path: Path) -> Npy:
    """Read the header of an .npy file. Source: numpy.lib.format, versions 1.0 to 3.0.

    Raises:
        ValueError: it is not an .npy file, or its header is damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:6] != NPY or len(start) < 8:
            raise ValueError("this is not an .npy file")
        size, kind = (2, "<H") if start[6] == 1 else (4, "<I")
        length = struct.unpack(kind, file.read(size).ljust(size, b"\0"))[0]
        text = file.read(min(length, 2**16)).decode("utf-8", errors="replace")
    try:
        header = ast.literal_eval(text)
        shape, dtype = tuple(map(int, header["shape"])), str(header["descr"])
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError("the header of the .npy file is damaged") from error
    count = 1
    for extent in shape:
        count *= extent
    width = int(dtype[2:]) if dtype[2:].isdecimal() else 0
    return Npy(shape, dtype, 8 + size + length + count * width)
