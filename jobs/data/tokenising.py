"""Tokenise files block by block, in many processes, until there are enough tokens for the rows."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.contract.data import Data
from jobs.data import blocks, splits, token_blocks
from jobs.data.token_blocks import TokenBlock
from jobs.data.workers import Ask
from jobs.ranks.progress import tracked

_LOG = logging.getLogger(__name__)


def tokenised(ask: Ask, sources: list[Path], data: Data) -> list[TokenBlock]:
    """Return the tokenised blocks in their order, no more of them than the rows need.

    Raises:
        ConfigError: a file is damaged or of another form, or no file holds a record.
    """
    cut = itertools.chain.from_iterable(map(blocks.cut, sources))
    answers = ask({"block": asdict(block), "number": number} for number, block in enumerate(cut))
    total, unit, size = _whole(sources, data)
    made, documents, tokens, longest = list[TokenBlock](), 0, 0, 0
    for answer in tracked(answers, what=f"{data.name} tokenised", total=total, unit=unit, size=size):
        made.append(token_blocks.from_plain(answer))
        documents, tokens = documents + made[-1].num_documents, tokens + made[-1].num_tokens
        longest = max(longest, made[-1].longest)
        if splits.are_enough(data, num_documents=documents, num_tokens=tokens, longest=longest):
            last = sources.index(Path(made[-1].block.path))
            _LOG.info("%s: %d of %d files hold enough", data.name, last + 1, len(sources))
            break
    if not documents:
        raise blocks.refused("no records", str(sources[0]), "name files in data.files that hold some")
    return made


def _whole(sources: list[Path], data: Data) -> tuple[float, str, Callable[[dict[str, Any]], float]]:
    """Return what the progress counts: tokens where a number of them is enough, otherwise what is read."""
    megabytes = sum(path.stat().st_size for path in sources) / 1e6
    if data.packing and data.test_split is None:
        needed = (data.eval_rows + data.train_rows) * data.seq_length / 1e6
        return needed, "million tokens", lambda answer: answer["num_tokens"] / 1e6
    return megabytes, "MB", lambda answer: answer["block"]["num_bytes"] / 1e6
