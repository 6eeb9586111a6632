"""Write the rows of tokenised blocks and their manifest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.contract import atomic_files
from bench.contract.data import Data
from jobs.data import packing, splits, tokenization
from jobs.data.packing import Documents, Rows
from jobs.data.rows import STARTS_VERSION, sha256_rows
from jobs.data.tokenization import TokenBlock
from jobs.data.workers import Submit

DTYPES = {"tokens": "<i4", "counts": "|b1", "lengths": "<i4", "sha256": "|u1", "starts": "|b1"}
"""`starts` only for rows with a document mask."""
COUNTED = ("rows", "tokens", "real_tokens", "counted_tokens")
"""Counts of a split in the manifest: rows, all tokens, tokens without padding, tokens in the loss."""


@dataclass(slots=True)
class RowFiles:
    """The files of one split (`jobs.data.rows`), and the counts written so far."""

    files: dict[str, BinaryIO]
    num_rows: int
    """Number of rows in the headers."""
    written: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    def write(self, rows: Rows) -> None:
        """Append rows, at most num_rows in total."""
        room = self.num_rows - self.written["rows"]
        tokens, counts, lengths = rows.tokens[:room], rows.counts[:room], rows.lengths[:room]
        arrays = {"tokens": tokens, "counts": counts, "lengths": lengths}
        if "starts" in self.files:
            assert rows.starts is not None
            arrays["starts"] = rows.starts[:room]
        arrays = {name: array.astype(DTYPES[name]) for name, array in arrays.items()}
        arrays["sha256"] = sha256_rows(arrays["tokens"], arrays["counts"], arrays.get("starts"))
        for name, array in arrays.items():
            self.files[name].write(array.tobytes())
        sums = {"tokens": tokens.size, "real_tokens": int(lengths.sum()), "counted_tokens": int(counts.sum())}
        for name, more in ({"rows": len(tokens)} | sums).items():
            self.written[name] += more

    @property
    def is_full(self) -> bool:
        return self.written["rows"] == self.num_rows


@contextmanager
def opened(
    folder: Path, name: str, *, num_rows: int, seq_length: int, document_mask: bool = False
) -> Iterator[RowFiles]:
    """Yield the open files of a split, with headers for num_rows rows; document_mask: also that of the boundaries."""
    files: dict[str, BinaryIO] = {}
    try:
        for part, descr in DTYPES.items():
            if part == "starts" and not document_mask:
                continue
            shape = {"lengths": (num_rows,), "sha256": (num_rows, 32)}.get(part, (num_rows, seq_length))
            files[part] = (folder / f"{name}_{part}.npy").open("wb")
            np.lib.format.write_array_header_1_0(files[part], {"descr": descr, "fortran_order": False, "shape": shape})
        yield RowFiles(files, num_rows)
    finally:
        for file in files.values():
            file.close()


def described(path: Path) -> dict[str, Any]:
    """Return a file's name, size and sha256, as a manifest lists them."""
    content = atomic_files.checksum(path)
    return {"path": path.name, "bytes": content.bytes, "sha256": content.sha256}


def write(folder: Path, work: Path, blocks: list[TokenBlock], data: Data, *, pad: int, where: str) -> dict[str, Any]:
    """Write both splits from the blocks in `work`; return the manifest with the counts of rows and skipped records.

    Raises:
        ConfigError: the blocks have fewer rows than the config requires; `where` names their files.
    """
    documents = np.concatenate([tokenization.documents(work, block) for block in blocks])
    chosen = splits.choose(documents, data)
    masks = {"train": chosen.train, "eval": chosen.eval}
    available = {name: splits.num_rows(documents[mask], data) for name, mask in masks.items()}
    splits.require(available, data, where)
    written = {}
    for name, mask in masks.items():
        num_rows = (data.train_rows or available["train"]) if name == "train" else data.eval_rows
        sizes = {"num_rows": num_rows, "seq_length": data.seq_length}
        with opened(folder, name, **sizes, document_mask=data.document_mask) as out:
            for rows in _rows(_documents(work, blocks, mask, data), data, pad):
                out.write(rows)
                if out.is_full:
                    break
        written[name] = out.written | {"rows_there": available[name], "documents": int(mask.sum())}
    records = splits.described(documents, chosen, data)
    records |= {"left_out_empty": sum(block.num_empty for block in blocks)}
    if with_special_tokens := sum(block.num_with_special_tokens for block in blocks):
        records |= {"left_out_special_tokens": with_special_tokens}
    records |= {"left_out_long_prompts": int((~(chosen.train | chosen.eval)).sum())}
    version = {"starts_version": STARTS_VERSION} if data.document_mask else {}
    return {"data": data.name, "records": records, "splits": written} | version


def _documents(work: Path, blocks: list[TokenBlock], mask: np.ndarray, data: Data) -> Iterator[Documents]:
    """Yield the documents selected by a mask over all documents, in chunks."""
    start = 0
    for block in blocks:
        listed, tokens = tokenization.documents(work, block), tokenization.tokens(work, block)
        for chunk in packing.chunks(tokens, listed, tokenization.counts(work, block), seq_length=data.seq_length):
            stop = start + len(chunk.lengths)
            if mask[start:stop].any():
                yield chunk.chosen(mask[start:stop])
            start = stop


def _rows(documents: Iterator[Documents], data: Data, pad: int) -> Iterator[Rows]:
    if data.packing:
        yield from packing.packed(documents, seq_length=data.seq_length, answer_only=data.answer_only)
        return
    for part in documents:
        yield packing.padded(part, seq_length=data.seq_length, answer_only=data.answer_only, pad=pad)


def checksums(submit: Submit, folder: Path, blocks: list[TokenBlock]) -> dict[str, Any]:
    """Return size and sha256 of the files that were read and written, for the manifest."""
    read = list(dict.fromkeys(block.block.path for block in blocks))
    written = sorted(map(str, folder.glob("*.npy")))
    described = list(submit({"file": path} for path in [*read, *written]))
    sources = [one | {"path": path} for path, one in zip(read, described, strict=False)]
    return {"source": {"files": sources}, "files": described[len(read) :]}
