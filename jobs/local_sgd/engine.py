"""Train apart: this rank's share of each batch, and the outer step that merges the groups every H inner steps.

With `overlap_steps` the shard is copied, and a thread exchanges it while inner steps go on; see `outer.Outer.step`. On
a GPU that thread has a stream of its own, of high priority, so that neither waits for the kernels of the other.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from bench.contract import mllog
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError
from jobs.engines import Fact
from jobs.engines.megatron.engine import MegatronEngine
from jobs.local_sgd import joining
from jobs.local_sgd.groups import Groups
from jobs.local_sgd.merging import Meeting, Merged
from jobs.local_sgd.outer import Outer


@dataclass(frozen=True, slots=True)
class _Pending:
    """A merge that was begun after a step."""

    step: int
    copy: list[Tensor]
    future: "Future[Merged]"


class LocalSgdTraining:
    """What a rank does to train apart. `mine` and `after` are called at every step."""

    def __init__(self, engine: MegatronEngine, plan: TrainingPlan, groups: Groups) -> None:
        local_sgd = plan.recipe.averaging
        assert local_sgd is not None
        self._engine, self._plan, self._groups, self._settings = engine, plan, groups, local_sgd
        self._meeting = Meeting(groups, local_sgd.compress, local_sgd.time_limit_s)
        engine.outer = self._outer = Outer([state.master for state in engine.parts.optimizer.states()], local_sgd)
        self._thread, self._stream = _thread_and_stream(self._outer.library)
        self._rows_at_once = plan.world.dp * plan.batch.micro_batch_size
        self._pending: _Pending | None = None
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin after a step: the first time, or after the state of this step was loaded."""
        if not step:
            self._outer.restart()
        self._num_steps = 0

    def enter(self, step: int) -> int:
        """Return the step after which this group trains: the given one, or where it was started again, its entry's.

        Raises:
            BenchError: the others do not let it in any more.
        """
        if not self._groups.life:
            return step
        about = joining.take(self._groups, tensors=self._state(), limit_s=self._settings.time_limit_s)
        self._groups.living = about["living"]
        self._meeting.begin()
        self._engine.parts.optimizer.resume(about["num_steps"])
        self._engine.parts.refresh_weights()
        entered: int = about["step"]
        return entered

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
        return must_end or step % self._settings.interval == 0 or step == self._plan.max_steps

    def after(self, step: int, share: Tensor, *, is_saved: bool) -> list[Fact]:
        """Merge what is due after a step; return what the log must say of it.

        What is evaluated or saved next waits for its merge, as does the end.
        """
        loss, facts = self._engine.mean_loss(share.clone()), []
        said = {"loss": loss, "step_s": (time.perf_counter() - self._since_s) / self._num_steps}
        if self._pending is not None:
            facts += self._ended(step)
        if step % self._settings.interval == 0 or step == self._plan.max_steps:
            waits = is_saved or step == self._plan.max_steps or step in self._plan.evaluation.at_steps
            self._begun(step, said, is_copied=bool(self._settings.overlap_steps) and not waits)
            assert self._pending is not None
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
        copy = self._outer.copy() if is_copied else []
        source = copy or self._outer.inner
        work = (f"merge/{step}", said, lambda: self._outer.pieces(source), self._outer.take)
        ends_after = step + (self._settings.overlap_steps if is_copied else 0)
        lets_in = ends_after < self._plan.max_steps  # a group enters at the end of a merge, and has to train
        self._stream.wait_stream(self._outer.library.current_stream())  # which still has to compute the weights
        self._pending = _Pending(step, copy, self._thread.submit(self._merge, *work, lets_in=lets_in))

    def _merge(self, *work: Any, lets_in: bool) -> Merged:
        """Exchange the pieces, in a thread. What its stream does is complete when this returns."""
        library = self._outer.library
        done = library.Event()
        with library.stream(self._stream):
            merged = self._meeting.merge(*work, lets_in=lets_in)
            done.record()
        done.synchronize()
        return merged

    def _ended(self, step: int) -> list[Fact]:
        """Wait for the merge that is on its way, and apply it."""
        pending, since_s = self._pending, time.perf_counter()
        assert pending is not None
        merged = pending.future.result()
        self._outer.step(pending.copy)
        optimizer = self._engine.parts.optimizer
        optimizer.resume(optimizer.num_steps)
        self._engine.parts.refresh_weights()
        self._groups.living, self._pending = sorted({*merged.groups, *merged.joined}), None
        joined = [self._let_in(group, life, step) for group, life in merged.joined.items()]
        stopped_s = time.perf_counter() - since_s
        return [*self._left(merged, pending), self._fact(merged, pending.step, stopped_s), *joined]

    def _let_in(self, group: int, life: int, step: int) -> Fact:
        """Let a group that was started again go on as a copy of group 0, which sends it its state."""
        since_s, sent, optimizer = time.perf_counter(), 0, self._engine.parts.optimizer
        if self._groups.number == 0:
            about = {"step": step, "living": self._groups.living, "num_steps": optimizer.num_steps}
            state, limit_s = self._state(), self._settings.time_limit_s
            try:
                sent = joining.give(self._groups, group, life=life, about=about, tensors=state, limit_s=limit_s)
            except RuntimeError as error:  # gloo's; it is missed at the next merge
                print(f"group {group} does not join: {str(error).splitlines()[0]}", flush=True)
        return mllog.GROUP_JOINED, group, {"rank_bytes": sent, "seconds": round(time.perf_counter() - since_s, 6)}

    def _state(self) -> list[Tensor]:
        """Return all that training goes on from, but the generators."""
        states = self._engine.parts.optimizer.states()
        of_optimizer = [tensor for state in states for tensor in (state.master, state.exp_avg, state.exp_avg_sq)]
        return [*of_optimizer, *self._outer.weights, *self._outer.momentum]

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
        return mllog.OUTER_STEP, -(-step // self._settings.interval), about


def _thread_and_stream(library: Any) -> tuple[ThreadPoolExecutor, Any]:
    """Return a thread whose current device is that of this one, and a stream for it."""
    on_device = {"initializer": library.set_device, "initargs": (library.current_device(),)}
    return ThreadPoolExecutor(1, thread_name_prefix="merging", **on_device), library.Stream(priority=-1)
