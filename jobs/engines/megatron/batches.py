"""Cut rows of tokens into the micro-batches of this rank."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from bench.contract.plan import Plan
from jobs.data.rows import Rows
from jobs.data.targets import targets
from jobs.engines.megatron.attention import positions


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: tensors [B, S / cp] of this rank's part of the sequence.

    The weights sum to 1 over the tokens of a row that count (to 0 over a row that only fills the batch), so that the
    loss is the mean over rows of each row's mean in every layout.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    position_ids: Tensor

    def summed(self, losses_BS: Tensor) -> Tensor:
        """Return the sum of the rows' losses in FP32, from those of their tokens."""
        return (losses_BS.float() * self.weights).sum()


def micro_batches(plan: Plan, rows: Rows, indices: np.ndarray) -> list[MicroBatch]:
    """Return this rank's share of the rows, cut into micro-batches; -1 is an empty row."""
    mine = np.split(indices, plan.world.dp)[parallel_state.get_data_parallel_rank()]
    return [micro_batch(plan, rows, part) for part in np.split(mine, len(mine) // plan.batch.micro_batch_size)]


def micro_batch(plan: Plan, rows: Rows, indices: np.ndarray) -> MicroBatch:
    """Return this context-parallel rank's part of the rows, on the device."""
    tokens, labels, weights = targets(rows, indices)
    mine = positions(tokens.shape[1], plan.world.cp, parallel_state.get_context_parallel_rank())
    device = torch.cuda.current_device()
    parts = (x[:, mine].to(device, non_blocking=True) for x in (tokens, labels, weights))
    return MicroBatch(*parts, mine.to(device).expand(len(indices), -1))
