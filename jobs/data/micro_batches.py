"""Split a global batch into micro-batches, with their labels and loss weights; used by every engine."""

import numpy as np
import torch
from torch import Tensor

from bench.contract.plan_kinds import TrainingPlan
from jobs.data.rows import Rows


def cut(plan: TrainingPlan, indices: np.ndarray, *, replica: int) -> list[np.ndarray]:
    """Return the row indices of one data-parallel replica's share of a global batch, one array per micro-batch."""
    share = np.split(indices, plan.world.dp)[replica]
    return np.split(share, len(share) // plan.batch.micro_batch_size)


def targets(rows: Rows, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, labels, weights and positions [B, S] of the rows; -1 is an empty row.

    The weights sum to 1 over the tokens of a row whose successors count, and to 0 over an empty row, so that the sum
    of all weighted losses is the sum over rows of each row's mean loss. With a document mask positions start at 0 in
    each document, and the last token of a document has no successor, as if the document were alone in a row. Rows that
    have their next token predict it, too.

    Raises:
        ConfigError: a row was changed since it was written.
    """
    read_tokens, read_counts, starts = rows.read(indices)
    tokens = torch.from_numpy(read_tokens.astype(np.int64))
    counts = torch.from_numpy(read_counts.astype(np.float32)) * torch.from_numpy(indices >= 0)[:, None]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if rows.document_mask:
        assert starts is not None, "rows with a document mask have document boundaries"
        is_start = torch.from_numpy(starts)
        positions = positions - torch.where(is_start, positions, 0).cummax(dim=1).values
        counts = counts.masked_fill(is_start, 0)
    labels, weights = tokens.roll(-1, dims=1), counts.roll(-1, dims=1)
    weights[:, -1] = 0  # the last token has no successor in the row
    if rows.has_next:
        tokens, labels, weights, positions = (
            each[:, :-1].contiguous() for each in (tokens, labels, weights, positions)
        )
    weights /= weights.sum(dim=1, keepdim=True).clamp(min=1)
    return tokens, labels, weights, positions


def document_lengths(positions: Tensor) -> Tensor:
    """Return the lengths [D] of the documents in rows one after another, from the positions [B, S] of `targets`."""
    flat = positions.flatten()
    starts = torch.cat([(flat == 0).nonzero().flatten(), torch.tensor([len(flat)])])
    return starts.diff()
