"""Random rows, made up in memory: for speed, and for what is timed on random strings of one length.

A row of random tokens costs what a random string costs that a tokenizer made as many tokens of. Nothing can be learned
from it.
"""

import numpy as np


def rows(
    num_rows: int, seq_length: int, *, vocab_size: int, seed: int, lengths: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens and counts [num_rows, seq_length] and the real tokens of each row, the same on every rank.

    Without lengths every token is real and counts, so the work is at least that of real rows. With them each row's
    length is drawn from the list, and the rest is padding of token 0.
    """
    shape, rng = (num_rows, seq_length), np.random.default_rng(seed)
    tokens = rng.integers(vocab_size, size=shape, dtype=np.int32)
    if lengths is None:
        return tokens, np.broadcast_to(np.True_, shape), np.broadcast_to(np.int32(seq_length), num_rows)
    drawn = rng.choice(np.asarray(lengths, dtype=np.int32), size=num_rows)
    counts = np.arange(seq_length) < drawn[:, None]
    return np.where(counts, tokens, 0), counts, drawn
