"""The rows as a Lightning datamodule: the same micro-batches in the same order as in engine=megatron.

Shape letters: B rows of a micro-batch, S tokens of a row.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import lightning.pytorch as pl
import numpy as np
import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bench.contract.plan_kinds import TrainingPlan
from jobs.data import rows as rows_of
from jobs.data.micro_batches import cut, targets
from jobs.data.rows import Rows

Batch = dict[str, Tensor]
"""Input of NeMo's GPT models: tokens, labels, loss_mask and position_ids [B, S], and on a CPU an attention_mask."""


class RowsModule(pl.LightningDataModule):
    """Training and evaluation rows of a plan, opened at the first access."""

    def __init__(self, plan: TrainingPlan, seed: int) -> None:
        super().__init__()
        self._plan, self._seed = plan, seed
        self._rows = {split: cache(partial(rows_of.load, plan, split, seed=seed)) for split in ("train", "eval")}
        self.seq_length = plan.config.training_data.seq_length
        self.micro_batch_size = plan.batch.micro_batch_size
        self.global_batch_size = plan.batch.global_batch_size
        self.tokenizer = None
        self.data_sampler = _FixedOrder(
            seq_len=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            output_log=False,
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        order = rows_of.train_order(self._plan, self._seed)
        return DataLoader(_MicroBatches(self._plan, self._rows["train"], order), batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(
            _MicroBatches(self._plan, self._rows["eval"], rows_of.eval_order(self._plan)), batch_size=None
        )


class _FixedOrder(MegatronDataSampler):
    """Gives megatron-core the batch sizes; the dataset determines the rows."""

    def transform_dataloader(self, dataloader: DataLoader[Batch], consumed_samples: int = 0) -> DataLoader[Batch]:
        return dataloader


class _MicroBatches(IterableDataset[Batch]):
    """This data-parallel rank's micro-batches of one split."""

    def __init__(self, plan: TrainingPlan, rows: Callable[[], Rows], order: Iterable[np.ndarray]) -> None:
        self._plan, self._rows, self._order = plan, rows, order

    def __iter__(self) -> Iterator[Batch]:
        rows = self._rows()
        for indices in self._order:
            yield from micro_batches(self._plan, rows, indices)


def micro_batches(plan: TrainingPlan, rows: Rows, indices: np.ndarray) -> list[Batch]:
    """Return this rank's share of a global batch, cut into micro-batches; -1 is an empty row."""
    return [_micro_batch(rows, part) for part in cut(plan, indices, replica=parallel_state.get_data_parallel_rank())]


def _micro_batch(rows: Rows, indices: np.ndarray) -> Batch:
    """Return a micro-batch. The weights of a row's tokens (loss_mask) sum to 1, or to 0 in an empty row."""
    tokens_BS, labels_BS, weights_BS, positions_BS = targets(rows, indices)
    size = tokens_BS.shape[1]
    batch = {
        "tokens": tokens_BS,
        "labels": labels_BS,
        "loss_mask": weights_BS,
        "position_ids": positions_BS,
    }
    if torch.cuda.is_available():
        return batch
    # Transformer Engine's attention is causal by itself; megatron-core's own attention needs the mask.
    return batch | {"attention_mask": torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)}


class RowLoss(MaskedTokenLossReduction):
    """The mean over rows of each row's mean, as in engine=megatron and the log; NeMo's is one mean over all tokens."""

    def forward(self, batch: Batch, forward_out: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        weights_BS = batch["loss_mask"]
        summed = (forward_out.float() * weights_BS).sum()
        num_rows = (weights_BS.sum(dim=1) > 0).sum()
        return summed, num_rows.int(), {"loss_sum_and_ub_size": torch.stack([summed.detach(), num_rows.float()])}
