"""Rows of tokens: written by prepare, read by the loop as micro-batches of this rank.

A data folder holds, for `train` and `eval`, NAME_tokens.npy (int32 [rows, S]) and NAME_counts.npy (bool [rows, S]: the
tokens that count in the loss).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from bench.errors import ConfigError
from bench.plan import Plan, is_random
from jobs.megatron.attention import positions


@dataclass(frozen=True, slots=True)
class Rows:
    """A split of the data, memory-mapped: tokens and counts [rows, S]."""

    tokens: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass takes, each [B, S / cp] on this rank's part of the sequence.

    weights sum to 1 over the tokens that count of a row (0 over a row that only fills the batch), so that the loss is
    the mean over rows of each row's mean, whatever the layout.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    position_ids: Tensor


def save(folder: Path, name: str, tokens: np.ndarray, counts: np.ndarray) -> None:
    """Write one split."""
    np.save(folder / f"{name}_tokens.npy", tokens)
    np.save(folder / f"{name}_counts.npy", counts)


def load(plan: Plan, name: str) -> Rows:
    """Return a split, checked against the plan's row count and length; for random weights, made-up rows.

    Raises:
        ConfigError: a file is missing or its shape is not the plan's.
    """
    folder, want = Path(str(plan.data_dir)), plan.config.data
    num_rows = want.train_rows if name == "train" else want.eval_rows
    if is_random(plan.config):
        return made_up(num_rows, want.seq_length, vocab_size=plan.config.model.vocab_size, seed=want.seed)
    try:
        tokens = np.load(folder / f"{name}_tokens.npy", mmap_mode="r")
        counts = np.load(folder / f"{name}_counts.npy", mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the {name} rows of {want.name} cannot be read: {error}",
            where=str(folder),
            fix="run the prepare step, or point DATADIR at prepared rows",
        ) from error
    if tokens.shape != (num_rows, want.seq_length) or counts.shape != tokens.shape:
        raise ConfigError(
            f"{name} holds rows {tokens.shape} and counts {counts.shape}; the plan says {(num_rows, want.seq_length)}",
            where=str(folder),
            fix="prepare the data again, or correct data.train_rows, data.eval_rows and data.seq_length",
        )
    return Rows(tokens, counts)


def train_order(plan: Plan, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each step, [GBS]: a new seeded shuffle each epoch, the incomplete last batch dropped."""
    rng, size = np.random.default_rng(seed), plan.batch.global_batch_size
    while True:
        order = rng.permutation(plan.config.data.train_rows)
        yield from order[: len(order) // size * size].reshape(-1, size)


def micro_batches(plan: Plan, rows: Rows, indices: np.ndarray) -> list[MicroBatch]:
    """Return this rank's share of the rows, cut into micro-batches; -1 is an empty row."""
    mine = np.split(indices, plan.world.dp)[parallel_state.get_data_parallel_rank()]
    return [micro_batch(plan, rows, part) for part in np.split(mine, len(mine) // plan.batch.micro_batch_size)]


def micro_batch(plan: Plan, rows: Rows, indices: np.ndarray) -> MicroBatch:
    """Return the rows as tensors on the device, this context-parallel rank's part of each."""
    tokens = torch.from_numpy(rows.tokens[indices].astype(np.int64))
    counts = torch.from_numpy(rows.counts[indices].astype(np.float32)) * torch.from_numpy(indices >= 0)[:, None]
    labels, weights = tokens.roll(-1, dims=1), counts.roll(-1, dims=1)
    weights[:, -1] = 0  # the last token's successor lies outside the row
    weights /= weights.sum(dim=1, keepdim=True).clamp(min=1)
    mine = positions(tokens.shape[1], plan.world.cp, parallel_state.get_context_parallel_rank())
    device = torch.cuda.current_device()
    parts = (x[:, mine].to(device, non_blocking=True) for x in (tokens, labels, weights))
    return MicroBatch(*parts, mine.to(device).expand(len(indices), -1))


def eval_order(plan: Plan) -> np.ndarray:
    """Return the row numbers of one evaluation, [batches, GBS], the last batch filled with -1."""
    size = plan.batch.global_batch_size
    order = np.arange(plan.config.data.eval_rows)
    filled = np.pad(order, (0, -len(order) % size), constant_values=-1)
    return filled.reshape(-1, size)


def made_up(num_rows: int, seq_length: int, *, vocab_size: int, seed: int) -> Rows:
    """Return random rows, the same on every rank; every token counts, which is at least the work of real rows."""
    shape = (num_rows, seq_length)
    tokens = np.random.default_rng(seed).integers(vocab_size, size=shape, dtype=np.int32)
    return Rows(tokens, np.broadcast_to(np.True_, shape))


def synthetic(plan: Plan) -> Rows:
    """Return as many made-up rows as one step takes: the warm-up's data."""
    shape = (plan.batch.global_batch_size, plan.config.data.seq_length)
    tokens = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape) % plan.config.model.vocab_size
    return Rows(tokens, np.ones(shape, dtype=bool))
