"""Measure the speed and the memory of a trial, without waiting for the device between two log lines."""

import gc
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from bench.contract import mllog
from bench.contract import plan as plans
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError

if TYPE_CHECKING:
    import torch
from bench.contract import plan_kinds

GIB = 2**30


class Pace:
    """Logs train_loss and tracked_stats.

    train_step_time is the mean since the last log line or evaluation, by the host's clock. step_times has the time of
    each step since the end of the previous one, by the device's clock.
    """

    def __init__(self, plan: TrainingPlan, log: mllog.Writer, step: int = 0) -> None:
        self._plan, self._log = plan, log
        self._ends: list[float | torch.cuda.Event] = []
        self._times_s: list[float] = []
        self._real_tokens = 0
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start timing here: at the start of training, and after an evaluation, which synchronizes with the device."""
        self._collect()
        self._step, self._since, self._ends = step, time.perf_counter(), [now()]

    @property
    def end(self) -> "float | torch.cuda.Event":
        """The end of the last launched step, or the last restart."""
        return self._ends[-1]

    def stepped(self, real_tokens: int) -> "float | torch.cuda.Event":
        """Record and return the end of a launched step: a time, or on a GPU an event that the device records.

        real_tokens: of the step's rows, without padding.
        """
        self._real_tokens += real_tokens
        self._ends.append(now())
        return self._ends[-1]

    def log(self, step: int, loss: float) -> None:
        """Log the measurements. The host has read the loss, so the device has completed all steps."""
        now, place = time.perf_counter(), {"samples_count": plan_kinds.samples(self._plan, step), "step": step}
        step_time_s = (now - self._since) / (step - self._step)
        lr = plan_kinds.learning_rate(self._plan, step)
        of_group = {} if self._plan.world.groups is None else {"group": 0}
        self._log.event(mllog.TRAIN_LOSS, finite(loss, "training", step), **place, lr=lr, **of_group)
        self._collect()
        stats = {
            "train_step_time": step_time_s,
            "throughput": self._plan.batch.global_batch_size / step_time_s,
            mllog.STEP_TIMES: [round(time_s, 6) for time_s in self._times_s],
            mllog.REAL_TOKENS: self._real_tokens,
        }
        self._log.event(mllog.TRACKED_STATS, stats, **place)
        self._times_s.clear()
        self._real_tokens = 0
        self._step, self._since = step, now

    def _collect(self) -> None:
        self._times_s += [seconds(start, end) for start, end in pairwise(self._ends)]
        self._ends = self._ends[-1:]


def finite(loss: float, phase: str, step: int) -> float:
    """Return the loss; raise BenchError if it is not a finite number."""
    if math.isfinite(loss):
        return loss
    raise BenchError(
        f"the {phase} loss is {loss} at step {step}, but must be a finite number",
        where="recipe.lr, recipe.clip_grad, precision",
        fix="lower recipe.lr, or look for NaN and infinity in the rows and weights",
        rule="RUN-05",
    )


def device_time_s() -> float:
    """Return the time after the device has completed all launched work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def settle() -> None:
    """Collect garbage, and exclude all objects that exist now from later collections (gc.freeze).

    Otherwise Python's garbage collector scans all modules, parameters and hooks from time to time while its GPU waits;
    engines differ in how many they have.
    """
    gc.collect()
    gc.freeze()


def forget_memory(num_gpus: int = 1) -> None:
    """Reset the memory peaks, so that loading and warm-up are not counted."""
    import torch

    if torch.cuda.is_available():
        for index in _own_gpus(num_gpus):
            torch.cuda.reset_peak_memory_stats(index)


def _own_gpus(num_gpus: int) -> Sequence[int | None]:
    """Return the GPUs of this rank: None for its current one, or all over which one process distributes its layers."""
    return range(num_gpus) if num_gpus > 1 else [None]


def peaks_gib(num_gpus: int = 1) -> tuple[float, float]:
    """Return the peaks of allocated and of reserved memory on this rank's GPU; with several GPUs, on the fullest one.

    The memory pools of CUDA graphs count as allocated, although torch does not count them: their tensors are freed in
    torch after the capture, but used at every launch. If the peak includes the capture itself, they are counted twice,
    but the result never exceeds the reserved memory.
    """
    import torch

    own = _own_gpus(num_gpus)
    reserved = max(torch.cuda.max_memory_reserved(index) for index in own)
    allocated = max(torch.cuda.max_memory_allocated(index) for index in own)
    allocated += held_by_graphs(torch.cuda.memory_snapshot())
    return min(allocated, reserved) / GIB, reserved / GIB


def held_by_graphs(segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes in torch's memory pools of CUDA graphs that are not allocated; the default pool is (0, 0)."""
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def log_memory(plan: TrainingPlan, log: mllog.Writer) -> None:
    """Log the memory peaks of the rank that needs most, with the plan's estimate; on a CPU nothing is logged."""
    import torch

    if not torch.cuda.is_available():
        return
    peaks = torch.tensor(
        peaks_gib(plans.gpus_per_rank(plan.config)), dtype=torch.float64, device=torch.cuda.current_device()
    )
    torch.distributed.all_reduce(peaks, op=torch.distributed.ReduceOp.MAX)
    allocated, reserved = peaks.tolist()
    estimated = plan.memory and plan.memory.total_gib
    log.event(mllog.PEAK_MEMORY, {"allocated": allocated, "reserved": reserved, "estimated": estimated})


def now() -> "float | torch.cuda.Event":
    """Return the time; on a GPU, an event that the device records after all work launched so far."""
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    milliseconds: float = cast("torch.cuda.Event", start).elapsed_time(cast("torch.cuda.Event", end))
    return milliseconds / 1000
