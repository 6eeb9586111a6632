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


def targets(rows: Rows, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and weights [B, S] of the rows; -1 is an empty row.

    The weights sum to 1 over the tokens of a row whose successors count, and to 0 over an empty row, so that the sum
    of all weighted losses is the sum over rows of each row's mean loss.

    Raises:
        ConfigError: a row was changed since it was written.
    """
    read = rows.read(indices)
    tokens = torch.from_numpy(read[0].astype(np.int64))
    counts = torch.from_numpy(read[1].astype(np.float32)) * torch.from_numpy(indices >= 0)[:, None]
    labels, weights = tokens.roll(-1, dims=1), counts.roll(-1, dims=1)
    weights[:, -1] = 0  # the last token has no successor in the row
    weights /= weights.sum(dim=1, keepdim=True).clamp(min=1)
    return tokens, labels, weights
