"""MegatronEngine: implements `jobs.engines.Engine` with the functions of this package."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bench.contract.plan_kinds import TrainingPlan
from jobs.data.rows import Rows
from jobs.engines import Fact, WarmUpTimes
from jobs.engines.megatron import checkpoint, loop, model, training_state
from jobs.engines.megatron.model import Ops
from jobs.profiles import Profile
from jobs.weights import checkpoint_writer

if TYPE_CHECKING:
    from jobs.local_sgd.outer_optimizer import OuterOptimizer


class MegatronEngine:
    """This rank's part of the model and its optimizer; see `jobs.engines.Engine`."""

    def __init__(self, plan: TrainingPlan, seed: int, *, ops: Ops | None = None) -> None:
        self.parts = model.build(plan, seed, ops=ops)
        self._snapshots: training_state.SnapshotBuffers | None = None
        self._num_rows = plan.batch.global_batch_size
        self.outer: OuterOptimizer | None = None
        """The outer optimizer of local SGD, which is part of the training state."""

    def load(self, folder: Path, *, adapters: bool) -> None:
        checkpoint.load(self.parts, folder, adapters=adapters)

    def save(self, folder: Path, *, adapters: bool) -> None:
        checkpoint.save(self.parts, folder, adapters=adapters)

    def state_bytes(self) -> int:
        return self._snapshot_buffers().num_bytes

    def snapshot(self) -> training_state.Snapshot:
        return self._snapshot_buffers().take_snapshot()

    def complete(self, folder: Path, about: dict[str, Any]) -> None:
        checkpoint_writer.complete(folder, about)

    def load_state(self, folder: Path, *, step: int, seed: int, same_layout: bool) -> None:
        training_state.load(self.parts, folder, step=step, seed=seed, same_layout=same_layout, outer=self.outer)

    def _snapshot_buffers(self) -> training_state.SnapshotBuffers:
        self._snapshots = self._snapshots or training_state.SnapshotBuffers(self.parts, self.outer)
        return self._snapshots

    def warm_up(self, iterations: int, seed: int, *, profile: Profile | None) -> WarmUpTimes | None:
        return loop.warm_up(self.parts, iterations, seed, profile=profile)

    def facts(self) -> list[Fact]:
        return []

    def train_step(self, rows: Rows, indices: np.ndarray, step: int) -> Tensor:
        self._num_rows = len(indices)
        return loop.train_step(self.parts, rows, indices, step)

    def mean_loss(self, share: Tensor) -> float:
        return loop.mean_loss(share, self._num_rows)

    def evaluate(self, rows: Rows) -> float:
        return loop.evaluate(self.parts, rows)
