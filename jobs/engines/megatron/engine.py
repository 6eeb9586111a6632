"""Implement the protocol of `jobs.engines` with the functions of this package."""

from pathlib import Path

import numpy as np
from torch import Tensor

from bench.contract.plan import Plan
from jobs.data.rows import Rows
from jobs.engines import WarmUpTimes
from jobs.engines.megatron import checkpoint, loop, model
from jobs.engines.megatron.model import Ops


class MegatronEngine:
    """This rank's part of the model and its optimizer; see `jobs.engines.Engine`."""

    def __init__(self, plan: Plan, seed: int, *, ops: Ops | None = None) -> None:
        self.parts = model.build(plan, seed, ops=ops)

    def load(self, folder: Path, *, adapters: bool) -> None:
        checkpoint.load(self.parts, folder, adapters=adapters)

    def save(self, folder: Path, *, adapters: bool) -> None:
        checkpoint.save(self.parts, folder, adapters=adapters)

    def warm_up(self, iterations: int, seed: int, *, profile: Path | None) -> WarmUpTimes | None:
        return loop.warm_up(self.parts, iterations, seed, profile=profile)

    def train_step(self, rows: Rows, indices: np.ndarray, step: int) -> Tensor:
        return loop.train_step(self.parts, rows, indices, step)

    def mean_loss(self, share: Tensor) -> float:
        return loop.mean_loss(share, self.parts.plan.batch.global_batch_size)

    def evaluate(self, rows: Rows) -> float:
        return loop.evaluate(self.parts, rows)
