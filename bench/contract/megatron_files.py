"""The .bin and .idx files of Megatron-LM: their header and sizes. Standard library only: ranks import it.

The index is: MAGIC, version (uint64), type of a token (uint8), number of sequences and of documents (uint64); then the
length of each sequence in tokens (int32), where it begins in the .bin file in bytes (int64), and documents (int64).

Source: megatron-core 0.16.1, megatron/core/datasets/indexed_dataset.py.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from bench.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
_FIXED = struct.Struct("<QBQQ")
HEADER_BYTES = len(MAGIC) + _FIXED.size
_VERSION = 1
TOKENS = {1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8), 8: ("uint16", 2)}
"""By code: the type of a token and its bytes. Codes 6 and 7 are floats, which are not tokens."""
FIX = (
    "copy or download the .bin and .idx files again, and set data.files and data.eval_files to their names in DATADIR "
    "without .bin and .idx"
)


@dataclass(frozen=True, slots=True)
class Index:
    """The header of an .idx file, and the number of tokens in its .bin file."""

    dtype: str
    num_sequences: int
    num_tokens: int


def paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the .idx and the .bin file of a data set."""
    return folder / f"{name}.idx", folder / f"{name}.bin"


def read(folder: Path, name: str) -> Index:
    """Return the header of an index.

    Raises:
        ConfigError: a file is missing, is no such file, or is truncated.
    """
    index, tokens = paths(folder, name)
    try:
        with index.open("rb") as file:
            head = file.read(HEADER_BYTES)
            index_bytes = os.fstat(file.fileno()).st_size
        token_bytes = tokens.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"a file of tokens in the format of Megatron-LM cannot be read: {error.strerror}",
            where=str(error.filename or index),
            fix=FIX,
            rule="CFG-06",
        ) from error
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise _wrong("the file is not an index of Megatron-LM", index)
    version, code, sequences, documents = _FIXED.unpack(head[len(MAGIC) :])
    if version != _VERSION or code not in TOKENS:
        raise _wrong(f"runstop cannot read an index of version {version} with the token type {code}", index)
    dtype, width = TOKENS[code]
    if index_bytes < (needed := HEADER_BYTES + 12 * sequences + 8 * documents):
        raise _wrong(f"the index has {index_bytes:,} bytes, but its header requires {needed:,} bytes", index)
    if token_bytes % width:
        raise _wrong(
            f"the file has {token_bytes:,} bytes, but must have a multiple of {width} bytes (one token, {dtype})",
            tokens,
        )
    return Index(dtype, sequences, token_bytes // width)


def _wrong(what: str, where: Path) -> ConfigError:
    return ConfigError(what, where=str(where), fix=FIX, rule="CFG-06")
