"""Implement the protocol of `jobs.engines` with the functions of this package."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bench.contract.plan import Plan
from jobs.data.rows import Rows
from jobs.engines import Fact, WarmUpTimes
from jobs.engines.megatron import checkpoint, loop, model, training_state
from jobs.engines.megatron.model import Ops
from jobs.profiles import Profile
from jobs.weights import checkpoint_writer


class MegatronEngine:
    """This rank's part of the model and its optimizer; see `jobs.engines.Engine`."""

    def __init__(self, plan: Plan, seed: int, *, ops: Ops | None = None) -> None:
        self.parts = model.build(plan, seed, ops=ops)
        self._snapshots: training_state.Snapshots | None = None

    def load(self, folder: Path, *, adapters: bool) -> None:
        checkpoint.load(self.parts, folder, adapters=adapters)

    def save(self, folder: Path, *, adapters: bool) -> None:
        checkpoint.save(self.parts, folder, adapters=adapters)

    def state_bytes(self) -> int:
        return self._snapshotting().num_bytes

    def snapshot(self) -> training_state.Snapshot:
        return self._snapshotting().take()

    def complete(self, folder: Path, about: dict[str, Any]) -> None:
        checkpoint_writer.complete(folder, about)

    def load_state(self, folder: Path, *, step: int, seed: int, same_layout: bool) -> None:
        training_state.load(self.parts, folder, step=step, seed=seed, same_layout=same_layout)

    def _snapshotting(self) -> training_state.Snapshots:
        self._snapshots = self._snapshots or training_state.Snapshots(self.parts)
        return self._snapshots

    def warm_up(self, iterations: int, seed: int, *, profile: Profile | None) -> WarmUpTimes | None:
        return loop.warm_up(self.parts, iterations, seed, profile=profile)

    def facts(self) -> list[Fact]:
        return []

    def train_step(self, rows: Rows, indices: np.ndarray, step: int) -> Tensor:
        return loop.train_step(self.parts, rows, indices, step)

    def mean_loss(self, share: Tensor) -> float:
        return loop.mean_loss(share, self.parts.plan.batch.global_batch_size)

    def evaluate(self, rows: Rows) -> float:
        return loop.evaluate(self.parts, rows)
