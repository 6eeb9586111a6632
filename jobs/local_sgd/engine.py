"""Local SGD in the training loop: this group's share of each batch, and the outer step every H inner steps.

With `overlap_steps` the shard is copied, and a thread exchanges it while inner steps run; see `OuterOptimizer.step`. On
a GPU that thread has a stream of its own with high priority, so that neither waits for the kernels of the other.
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
from jobs.local_sgd import rejoin
from jobs.local_sgd.averaging import AllReduceResult, GroupAllReduce
from jobs.local_sgd.groups import Groups
from jobs.local_sgd.outer_optimizer import OuterOptimizer


@dataclass(frozen=True, slots=True)
class _Pending:
    """A weight averaging that was started after a step."""

    step: int
    copy: list[Tensor]
    future: "Future[AllReduceResult]"


class LocalSgdTraining:
    """Local SGD on one rank (`jobs.engines.LocalSgdEngine`)."""

    def __init__(self, engine: MegatronEngine, plan: TrainingPlan, groups: Groups) -> None:
        local_sgd = plan.recipe.averaging
        assert local_sgd is not None
        self._engine, self._plan, self._groups, self._settings = engine, plan, groups, local_sgd
        self._all_reduce = GroupAllReduce(groups, local_sgd.compress, local_sgd.time_limit_s)
        engine.outer = self._outer = OuterOptimizer(
            [state.master for state in engine.parts.optimizer.states()], local_sgd
        )
        self._thread, self._stream = _thread_and_stream(self._outer.library)
        self._rows_at_once = plan.world.dp * plan.batch.micro_batch_size
        self._pending: _Pending | None = None
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start after step 0, or after the step whose state was loaded."""
        if not step:
            self._outer.restart()
        self._num_steps = 0

    def rejoin(self, step: int) -> int:
        """Return the step after which this group trains: the given one, or that of its readmission after a restart.

        Raises:
            BenchError: the other groups have finished, or do not readmit it.
        """
        if not self._groups.restart_count:
            return step
        header = rejoin.receive_state(self._groups, tensors=self._state(), limit_s=self._settings.time_limit_s)
        self._groups.active = header["active"]
        self._all_reduce.begin()
        self._engine.parts.optimizer.resume(header["num_steps"])
        self._engine.parts.refresh_weights()
        rejoined_after: int = header["step"]
        return rejoined_after

    def group_rows(self, indices: np.ndarray) -> np.ndarray:
        """Return this group's share of the rows of a batch, which is split over the active groups.

        Raises:
            BenchError: the batch cannot be split equally over the active groups.
        """
        if not self._num_steps:  # after a weight averaging and the evaluation or checkpoint that follows it
            self._since_s = time.perf_counter()
        self._num_steps += 1
        active = self._groups.active
        if len(indices) % (len(active) * self._rows_at_once):
            raise self._uneven(len(indices))
        return np.split(indices, len(active))[active.index(self._groups.number)]

    def is_due(self, step: int, *, is_saved: bool) -> bool:
        """Return whether `average` has something to do."""
        must_end = self._pending is not None and (is_saved or step >= self._pending.step + self._settings.overlap_steps)
        return must_end or step % self._settings.interval == 0 or step == self._plan.max_steps

    def average(self, step: int, loss_share: Tensor, *, is_saved: bool) -> list[Fact]:
        """Start or end the weight averaging that is due after a step; return its log records.

        An evaluation, a checkpoint and the end of the run wait for the averaging to end.
        """
        loss, facts = self._engine.mean_loss(loss_share.clone()), []
        report = {"loss": loss, "step_s": (time.perf_counter() - self._since_s) / self._num_steps}
        if self._pending is not None:
            facts += self._finish(step)
        if step % self._settings.interval == 0 or step == self._plan.max_steps:
            waits = is_saved or step == self._plan.max_steps or step in self._plan.evaluation.at_steps
            self._start(step, report, is_copied=bool(self._settings.overlap_steps) and not waits)
            assert self._pending is not None
            if not self._pending.copy:
                facts += self._finish(step)
        self._num_steps = 0
        return facts

    def _uneven(self, num_rows: int) -> BenchError:
        return BenchError(
            f"a group has left, and {num_rows} rows cannot be split over the other {len(self._groups.active)} groups "
            f"in micro-batches of {self._plan.batch.micro_batch_size}",
            where="recipe.global_batch_size, recipe.micro_batch_size",
            fix="resume from a checkpoint with all groups, or set recipe.global_batch_size to a number of "
            "rows that can also be split over fewer groups",
            rule="RUN-19",
        )

    def _start(self, step: int, report: dict[str, float], *, is_copied: bool) -> None:
        copy = self._outer.copy() if is_copied else []
        source = copy or self._outer.inner
        work = (f"weight averaging {step}", report, lambda: self._outer.chunks(source), self._outer.set_mean)
        ends_after = step + (self._settings.overlap_steps if is_copied else 0)
        may_readmit = ends_after < self._plan.max_steps  # a readmitted group must have a step left to train
        self._stream.wait_stream(self._outer.library.current_stream())  # the weights may still be computed there
        self._pending = _Pending(step, copy, self._thread.submit(self._average, *work, may_readmit=may_readmit))

    def _average(self, *work: Any, may_readmit: bool) -> AllReduceResult:
        """Exchange the chunks, in a thread. The work of its stream is complete when this returns."""
        library = self._outer.library
        done = library.Event()
        with library.stream(self._stream):
            result = self._all_reduce.average(*work, may_readmit=may_readmit)
            done.record()
        done.synchronize()
        return result

    def _finish(self, step: int) -> list[Fact]:
        """Wait for the pending weight averaging, and apply it."""
        pending, since_s = self._pending, time.perf_counter()
        assert pending is not None
        result = pending.future.result()
        self._outer.step(pending.copy)
        optimizer = self._engine.parts.optimizer
        optimizer.resume(optimizer.num_steps)
        self._engine.parts.refresh_weights()
        self._groups.active, self._pending = sorted({*result.groups, *result.readmitted}), None
        joined = [self._readmit(group, count, step) for group, count in result.readmitted.items()]
        stopped_s = time.perf_counter() - since_s
        return [*self._left(result, pending), self._fact(result, pending.step, stopped_s), *joined]

    def _readmit(self, group: int, restart_count: int, step: int) -> Fact:
        """Readmit a restarted group: group 0 sends it its training state."""
        since_s, sent, optimizer = time.perf_counter(), 0, self._engine.parts.optimizer
        if self._groups.number == 0:
            header = {"step": step, "active": self._groups.active, "num_steps": optimizer.num_steps}
            limit_s = self._settings.time_limit_s
            try:
                sent = rejoin.send_state(
                    self._groups,
                    group,
                    restart_count=restart_count,
                    header=header,
                    tensors=self._state(),
                    limit_s=limit_s,
                )
            except RuntimeError as error:  # gloo's; the next weight averaging will find that the group is missing
                print(f"group {group} could not rejoin: {str(error).splitlines()[0]}", flush=True)
        return mllog.GROUP_JOINED, group, {"rank_bytes": sent, "seconds": round(time.perf_counter() - since_s, 6)}

    def _state(self) -> list[Tensor]:
        """Return the training state without the random generators."""
        states = self._engine.parts.optimizer.states()
        of_optimizer = [tensor for state in states for tensor in (state.master, state.exp_avg, state.exp_avg_sq)]
        return [*of_optimizer, *self._outer.weights, *self._outer.momentum]

    def _left(self, result: AllReduceResult, pending: _Pending) -> list[Fact]:
        return [
            (mllog.GROUP_LEFT, group, {"merge_step": pending.step, "time_limit_s": self._settings.time_limit_s})
            for group in result.left
        ]

    def _fact(self, result: AllReduceResult, step: int, stopped_s: float) -> Fact:
        losses, step_times = {}, {}
        for group, report in zip(result.groups, result.reports, strict=True):
            losses[str(group)], step_times[str(group)] = report["loss"], round(report["step_s"], 6)
        metadata = {
            "merge_step": step,
            "groups": result.groups,
            "losses": losses,
            "step_times_s": step_times,
            "rank_bytes": result.rank_bytes,
            "exchange_s": round(result.exchange_s, 6),
            "waited_for_groups_s": round(result.waited_s, 6),
            "training_stopped_s": round(stopped_s, 6),
        }
        return mllog.OUTER_STEP, -(-step // self._settings.interval), metadata


def _thread_and_stream(library: Any) -> tuple[ThreadPoolExecutor, Any]:
    """Return a thread with the same current device as this one, and a stream for it."""
    on_device = {"initializer": library.set_device, "initargs": (library.current_device(),)}
    return ThreadPoolExecutor(1, thread_name_prefix="weight-averaging", **on_device), library.Stream(priority=-1)
