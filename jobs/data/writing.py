"""Write the rows of tokenised blocks, and what a manifest says of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.contract.data import Data
from jobs.data import files, layout, splits, token_blocks
from jobs.data.layout import Documents, Rows
from jobs.data.token_blocks import TokenBlock
from jobs.data.workers import Ask


def write(folder: Path, work: Path, made: list[TokenBlock], data: Data, *, pad: int, where: str) -> dict[str, Any]:
    """Write both splits of the blocks in `work`; return what is in them and what was left out.

    Raises:
        ConfigError: the blocks hold fewer rows than the config says; `where` names their files.
    """
    documents = np.concatenate([token_blocks.documents(work, block) for block in made])
    chosen = splits.choose(documents, data)
    masks = {"train": chosen.train, "eval": chosen.eval}
    there = {name: splits.num_rows(documents[mask], data) for name, mask in masks.items()}
    splits.require(there, data, where)
    written = {}
    for name, mask in masks.items():
        wanted = data.train_rows if name == "train" else data.eval_rows
        with files.opened(folder, name, num_rows=wanted, seq_length=data.seq_length) as out:
            for rows in _rows(_documents(work, made, mask, data), data, pad):
                out.write(rows)
                if out.is_full:
                    break
        written[name] = out.written | {"rows_there": there[name], "documents": int(mask.sum())}
    records = splits.described(documents, chosen, data)
    records |= {"left_out_empty": sum(block.num_empty for block in made)}
    records |= {"left_out_long_prompts": int((~(chosen.train | chosen.eval)).sum())}
    return {"data": data.name, "records": records, "splits": written}


def _documents(work: Path, made: list[TokenBlock], mask: np.ndarray, data: Data) -> Iterator[Documents]:
    """Yield the documents that a mask over all of them chooses, in chunks."""
    start = 0
    for block in made:
        listed, tokens = token_blocks.documents(work, block), token_blocks.tokens(work, block)
        for chunk in layout.chunks(tokens, listed, seq_length=data.seq_length):
            stop = start + len(chunk.lengths)
            if mask[start:stop].any():
                yield chunk.chosen(mask[start:stop])
            start = stop


def _rows(documents: Iterator[Documents], data: Data, pad: int) -> Iterator[Rows]:
    if data.packing:
        yield from layout.packed(documents, seq_length=data.seq_length, answer_only=data.answer_only)
        return
    for part in documents:
        yield layout.padded(part, seq_length=data.seq_length, answer_only=data.answer_only, pad=pad)


def checksums(ask: Ask, folder: Path, made: list[TokenBlock]) -> dict[str, Any]:
    """Return what a manifest says of the files that were read and of those that were written."""
    read = list(dict.fromkeys(block.block.path for block in made))
    written = sorted(map(str, folder.glob("*.npy")))
    described = list(ask({"file": path} for path in [*read, *written]))
    sources = [one | {"path": path} for path, one in zip(read, described, strict=False)]
    return {"source": {"files": sources}, "files": described[len(read) :]}
