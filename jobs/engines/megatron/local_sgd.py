"""Train apart: this rank's share of each batch, and the outer step that merges the groups every H inner steps.

    change = outer - inner, its mean over the groups        the outer step's gradient
    momentum = mu momentum + change                         torch.optim.SGD with nesterov=True, as DiLoCo has it
    outer = outer - rate (change + mu momentum)             the merged weights; each group goes on from them

The outer weights and the momentum are FP32 in host memory, of the shard whose master weights this rank has. Adam's
moments stay each group's own. The mean of uncompressed weights needs no outer weights.

With `overlap_steps` the shard is copied, and a thread exchanges it while inner steps go on. Its result is applied after
so many: inner = outer + (inner - the copy), so that what was trained meanwhile is kept and is part of the next change.
Source: Douillard et al. 2025, Streaming DiLoCo, arXiv 2501.18512, whose fragments are all weights here.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.contract import mllog
from bench.contract.local_sgd import Average, Compress, LocalSgd
from bench.contract.plan import Plan
from bench.errors import BenchError
from jobs.engines import Fact
from jobs.engines.megatron.engine import MegatronEngine
from jobs.ranks.groups import Groups
from jobs.ranks.merging import PIECE, Meeting, Merged


class Outer:
    """The outer weights of some flat tensors, and their optimizer. Pieces are numbered over all tensors."""

    def __init__(self, inner: list[Tensor], local_sgd: LocalSgd) -> None:
        self.inner, self._settings = inner, local_sgd
        is_mean = local_sgd.average is Average.parameters
        self.weights = [] if is_mean and local_sgd.compress is Compress.none else _on_host(inner)
        self.momentum = [torch.zeros_like(one) for one in self.weights] if local_sgd.outer_momentum else []
        self._means: list[Tensor] = []

    def restart(self) -> None:
        """Go on from the inner weights, which are the same in all groups."""
        for outer, inner in zip(self.weights, self.inner, strict=False):  # there may be no outer weights
            outer.copy_(inner)

    def pieces(self, source: list[Tensor]) -> Iterator[Tensor]:
        """Yield what the groups exchange: how the weights have changed, or themselves where no outer weights are."""
        for number, begin in self._places():
            piece = source[number][begin : begin + PIECE].to("cpu", torch.float32)
            yield self.weights[number][begin : begin + PIECE] - piece if self.weights else piece

    def take(self, place: int, mean: Tensor) -> None:
        """Take the mean of a piece over the groups, until `step`."""
        if len(self._means) != len(self.inner):
            self._means = [torch.empty(one.shape, dtype=torch.float32) for one in self.inner]
        number, begin = self._places()[place]
        self._means[number][begin : begin + PIECE].copy_(mean)

    def step(self) -> list[Tensor]:
        """Make the outer step with the means; return the merged weights, in host memory."""
        if not self.weights:
            return self._means
        mu, rate = self._settings.outer_momentum, self._settings.outer_lr
        for number, (outer, mean) in enumerate(zip(self.weights, self._means, strict=True)):
            if mu:
                self.momentum[number].mul_(mu).add_(mean)
                mean.add_(self.momentum[number], alpha=mu)
            outer.sub_(mean, alpha=rate)
        return self.weights

    def apply(self, merged: list[Tensor], copy: list[Tensor]) -> None:
        """Let the inner weights be the merged ones, and keep what was trained since a copy of them, if there is one."""
        for number, (inner, new) in enumerate(zip(self.inner, merged, strict=True)):
            if copy:
                inner.add_((new - copy[number]).to(inner.device))
            else:
                inner.copy_(new)

    def _places(self) -> list[tuple[int, int]]:
        return [(number, begin) for number, one in enumerate(self.inner) for begin in range(0, len(one), PIECE)]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A merge that was begun after a step."""

    step: int
    copy: list[Tensor]
    future: "Future[Merged]"


class LocalSgdTraining:
    """What a rank does to train apart. `mine` and `after` are called at every step."""

    def __init__(self, engine: MegatronEngine, plan: Plan, groups: Groups) -> None:
        local_sgd = plan.config.recipe.local_sgd
        assert local_sgd is not None
        self._engine, self._plan, self._groups, self._settings = engine, plan, groups, local_sgd
        self._meeting = Meeting(groups, local_sgd.compress, local_sgd.time_limit_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="merging")
        engine.outer = self._outer = Outer([state.master for state in engine.parts.optimizer.states()], local_sgd)
        self._rows_at_once = plan.world.dp * plan.batch.micro_batch_size
        self._pending: _Pending | None = None
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin after a step: the first time, or after the state of this step was loaded."""
        if not step:
            self._outer.restart()
        self._num_steps = 0

    def mine(self, indices: np.ndarray) -> np.ndarray:
        """Return this group's share of a batch. The shares of groups that have left are those of the others.

        Raises:
            BenchError: so many groups cannot share a batch.
        """
        if not self._num_steps:  # after a merge, and what was evaluated or saved behind it
            self._since_s = time.perf_counter()
        self._num_steps += 1
        living = self._groups.living
        if len(indices) % (len(living) * self._rows_at_once):
            raise self._uneven(len(indices))
        return np.split(indices, len(living))[living.index(self._groups.number)]

    def is_due(self, step: int, *, is_saved: bool) -> bool:
        """Return whether `after` has something to do."""
        must_end = self._pending is not None and (is_saved or step >= self._pending.step + self._settings.overlap_steps)
        return must_end or step % self._settings.every_steps == 0 or step == self._plan.max_steps

    def after(self, step: int, share: Tensor, *, is_saved: bool) -> list[Fact]:
        """Merge what is due after a step; return what the log must say of it.

        What is evaluated or saved next waits for its merge, as does the end.
        """
        loss, facts = self._engine.mean_loss(share.clone()), []
        said = {"loss": loss, "step_s": (time.perf_counter() - self._since_s) / self._num_steps}
        if self._pending is not None:
            facts += self._ended(step)
        if step % self._settings.every_steps == 0 or step == self._plan.max_steps:
            waits = is_saved or step == self._plan.max_steps or step in self._plan.evaluation.at_steps
            self._begun(step, said, is_copied=bool(self._settings.overlap_steps) and not waits)
            if not self._pending.copy:
                facts += self._ended(step)
        self._num_steps = 0
        return facts

    def _uneven(self, num_rows: int) -> BenchError:
        return BenchError(
            f"a group has left, and {len(self._groups.living)} groups cannot share {num_rows} rows in micro-batches of "
            f"{self._plan.batch.micro_batch_size}",
            where="recipe.global_batch_size, recipe.micro_batch_size",
            fix="resume from a checkpoint, with all groups; next time let every number of groups divide the batch",
            rule="RUN-19",
        )

    def _begun(self, step: int, said: dict[str, float], *, is_copied: bool) -> None:
        copy = _on_host(self._outer.inner) if is_copied else []
        source = copy or self._outer.inner
        work = (f"merge/{step}", said, lambda: self._outer.pieces(source), self._outer.take)
        self._pending = _Pending(step, copy, self._thread.submit(self._meeting.merge, *work))

    def _ended(self, step: int) -> list[Fact]:
        """Wait for the merge that is on its way, and apply it."""
        pending, since_s = self._pending, time.perf_counter()
        assert pending is not None
        merged = pending.future.result()
        self._outer.apply(self._outer.step(), pending.copy)
        optimizer = self._engine.parts.optimizer
        optimizer.resume(optimizer.num_steps)
        self._engine.parts.refresh_weights()
        self._groups.living, self._pending = merged.groups, None
        return [*self._left(merged, pending), self._fact(merged, pending.step, time.perf_counter() - since_s)]

    def _left(self, merged: Merged, pending: _Pending) -> list[Fact]:
        return [
            (mllog.GROUP_LEFT, group, {"merge_step": pending.step, "time_limit_s": self._settings.time_limit_s})
            for group in merged.left
        ]

    def _fact(self, merged: Merged, step: int, stopped_s: float) -> Fact:
        by_group = zip(merged.groups, merged.said, strict=True)
        losses, step_times = {}, {}
        for group, said in by_group:
            losses[str(group)], step_times[str(group)] = said["loss"], round(said["step_s"], 6)
        about = {
            "merge_step": step,
            "groups": merged.groups,
            "losses": losses,
            "step_times_s": step_times,
            "rank_bytes": merged.rank_bytes,
            "exchange_s": round(merged.exchange_s, 6),
            "waited_for_groups_s": round(merged.waited_s, 6),
            "training_stopped_s": round(stopped_s, 6),
        }
        return mllog.OUTER_STEP, -(-step // self._settings.every_steps), about


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    return [one.detach().to("cpu", torch.float32, copy=True) for one in tensors]
