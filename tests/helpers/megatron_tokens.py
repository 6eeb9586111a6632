"""Write documents as .bin and .idx files of Megatron-LM."""

import struct
from pathlib import Path

import numpy as np

from bench.contract import megatron_files

CODES = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}


def write(folder: Path, name: str, documents: list[np.ndarray]) -> Path:
    """Write documents in Megatron-LM's format; return the .bin file."""
    index, tokens = megatron_files.paths(folder, name)
    joined, lengths = np.concatenate(documents), np.array([len(one) for one in documents], dtype="<i4")
    begins = (np.cumsum(lengths, dtype="<i8") - lengths) * joined.itemsize
    head = megatron_files.MAGIC + struct.pack("<QBQQ", 1, CODES[joined.dtype], len(lengths), len(lengths) + 1)
    places = np.arange(len(lengths) + 1, dtype="<i8")
    index.write_bytes(head + lengths.tobytes() + begins.astype("<i8").tobytes() + places.tobytes())
    tokens.write_bytes(joined.tobytes())
    return tokens
