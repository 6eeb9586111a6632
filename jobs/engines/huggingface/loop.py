"""Train and evaluate: steps in, losses out. Logs, targets and clocks are not known here."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.contract.modules import Part, Phase
from bench.contract.plan import Plan, learning_rate
from bench.contract.schema import ProfileKind
from jobs.data import rows as rows_of
from jobs.engines import WarmUpTimes
from jobs.engines.huggingface import activations
from jobs.engines.huggingface.batches import micro_batches
from jobs.engines.huggingface.observed import Observed
from jobs.engines.huggingface.packages import settings
from jobs.engines.huggingface.parts import parts_of
from jobs.engines.huggingface.placement import Placement
from jobs.profiles import Profile, recording
from jobs.profiles.ranges import named
from jobs.ranks.timing import device_time_s

NOTHING = nullcontext()


class Loop:
    """Passes batches through a placed model."""

    def __init__(self, plan: Plan, placement: Placement, device: torch.device) -> None:
        self.plan, self.placement, self.device = plan, placement, device
        self.observed = Observed()

    def train_step(self, rows: rows_of.Rows, indices: np.ndarray, step: int) -> Tensor:
        """Update the weights with one global batch; return this rank's share of the sum of the rows' losses."""
        return self.update(rows, indices, learning_rate(self.plan, step))

    def update(
        self, rows: rows_of.Rows, indices: np.ndarray, lr: float, around: AbstractContextManager[Any] = NOTHING
    ) -> Tensor:
        """Update the weights as `train_step` does, at this learning rate; `around` is entered for forward passes."""
        self.placement.module.train()
        with named(Phase.forward), named(Part.input):
            batches = micro_batches(self.plan, rows, indices, self.device)
        share = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            with self.placement.accumulating(is_last=number == len(batches)):
                with named(Phase.forward), self._storing(), around:
                    total = batch.summed_loss(self.placement.module)
                with named(Phase.backward):
                    self.placement.pass_backward(total / self.plan.batch.micro_batch_size)
            share += total.detach().to(self.device)
        with named(Phase.optimizer):
            self.placement.update(lr)
        return share

    def _storing(self) -> AbstractContextManager[Any]:
        """Return the context that decides where activations are stored."""
        if not settings(self.plan).offload_activations:
            return NOTHING
        return activations.in_host_memory(self.placement.model)

    def evaluate(self, rows: rows_of.Rows) -> float:
        """Return the mean over all evaluation rows of each row's mean loss (nats per token that counts)."""
        shares = [self.share_of(rows, indices) for indices in rows_of.eval_order(self.plan)]
        return mean_loss(torch.stack(shares).sum(), self.plan.config.data.eval_rows, self.plan)

    @torch.no_grad()
    def share_of(self, rows: rows_of.Rows, indices: np.ndarray) -> Tensor:
        """Return this rank's share of the sum of the rows' losses, without training on them."""
        self.placement.module.eval()
        share = torch.zeros((), device=self.device)
        for batch in micro_batches(self.plan, rows, indices, self.device):
            share += batch.summed_loss(self.placement.module).to(self.device)
        return share

    def warm_up(self, iterations: int, profile: Profile | None) -> list[WarmUpTimes]:
        """Train and evaluate on synthetic rows at learning rate 0; return what each iteration took."""
        times, rows = [], rows_of.synthetic(self.plan)
        indices = np.arange(self.plan.batch.global_batch_size)
        step = partial(self.update, rows, indices, lr=0.0)
        kernels = profile.kernels if profile and profile.kind is ProfileKind.kernels else None
        if iterations:
            self._observe(step)
        for left in reversed(range(iterations)):
            start_s = device_time_s()
            with recording.kernels_to(None if left else kernels):
                step()
            trained_s = device_time_s()
            self.share_of(rows, indices)
            times.append(WarmUpTimes(step_s=trained_s - start_s, eval_batch_s=device_time_s() - trained_s))
        if profile and profile.kind is ProfileKind.modules:
            recording.record(step, profile, modules=list(parts_of(self.placement.model)))
        return times

    def _observe(self, step: Callable[..., Tensor]) -> None:
        """Make a step whose operations are noted; what is compiled later is not yet."""
        with torch.compiler.set_stance("force_eager"):
            step(around=self.observed)


def mean_loss(share: Tensor, num_rows: int, plan: Plan) -> float:
    """Return the mean loss over the rows of all ranks, the same on every rank; this waits for the device."""
    if plan.world.dp > 1:
        torch.distributed.all_reduce(share)
    return share.item() / num_rows
