"""Cut rows of tokens into the micro-batches of this rank; every rank is a replica of its own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.contract.modules import Part
from bench.contract.plan import Plan
from jobs.data.rows import Rows
from jobs.data.targets import targets
from jobs.profiles.ranges import named


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: tensors [B, S]; see `targets` for the weights."""

    tokens_BS: Tensor
    labels_BS: Tensor
    weights_BS: Tensor

    def summed_loss(self, model: torch.nn.Module) -> Tensor:
        """Return the sum of the rows' losses in FP32: transformers' logits, and cross-entropy as transformers has it.

        There is no mask: what is padded lies behind what counts, and attention is causal.
        """
        logits_BSV = model(input_ids=self.tokens_BS, use_cache=False).logits
        with named(Part.loss):
            labels_M = self.labels_BS.flatten().to(logits_BSV.device)
            losses_M = cross_entropy(logits_BSV.flatten(0, 1).float(), labels_M, reduction="none")
            return (losses_M * self.weights_BS.flatten().to(losses_M.device)).sum()


def micro_batches(plan: Plan, rows: Rows, indices: np.ndarray, device: torch.device) -> list[MicroBatch]:
    """Return this rank's share of the rows, cut into micro-batches; -1 is an empty row."""
    rank = torch.distributed.get_rank() if plan.world.dp > 1 else 0
    mine = np.split(indices, plan.world.dp)[rank]
    return [
        MicroBatch(*(x.to(device, non_blocking=True) for x in targets(rows, part)))
        for part in np.split(mine, len(mine) // plan.batch.micro_batch_size)
    ]
