"""Time what each rank computes in a step and how long it waits for other ranks; exchange the medians of windows.

Ranks that wait for each other all have the time of the slowest one. Only the time until a rank begins to wait shows
which one is slow. An engine marks where it waits and where it reads rows:

    with waiting():
        finalize_model_grads(…)

Without a running measurement a mark does nothing. On GPUs a mark is a pair of CUDA events of the current stream, else
two times of the host's clock. Marks are read at log lines only, when the device has completed all steps anyway. There
each rank starts to gather the medians of its last steps, without waiting for them: rank 0 reads them at the next log
line. So no step gets another synchronization.

The time of the log line itself is in no step. `jobs.ranks.slow_ranks` decides which ranks are slow, and
`jobs.ranks.replacement` whether the node of a slow rank is replaced. All ranks get to know this with the next medians.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bench.contract import mllog
from bench.contract.plan import Plan
from bench.errors import BenchError
from jobs.ranks import process_group
from jobs.ranks.identity import Rank, node_name
from jobs.ranks.replacement import Replacement
from jobs.ranks.slow_ranks import Place, Slow, SlowRanks, Window, noise_of_median
from jobs.ranks.timing import now, seconds

if TYPE_CHECKING:
    import torch

Moment = Any
"""A time of the host in seconds, or a CUDA event."""
WINDOW_STEPS, WINDOW_S = 10, 2.0
"""The medians are exchanged at a log line, after at least so many steps and, from the second window on, seconds."""
SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a CPU, nanoseconds of waiting for a CPU while ready to run, and time slices of this thread."""


class _Marks:
    """The marks since the last step."""

    def __init__(self) -> None:
        self.is_on = False
        self.clear()

    def clear(self) -> None:
        self.waits: list[tuple[Moment, Moment]] = []
        self.loading_s = 0.0
        self.wait_since: Moment | None = None


_marks = _Marks()


@contextmanager
def waiting() -> Iterator[None]:
    """Mark that this rank waits for other ranks inside the block."""
    wait_from_here()
    yield
    wait_until_here()


def wait_from_here() -> None:
    """Mark that this rank has computed its part and may now wait for others; the last such mark counts."""
    if _marks.is_on:
        _marks.wait_since = now()


def wait_until_here() -> None:
    """End what `wait_from_here` began, if anything."""
    if _marks.is_on and _marks.wait_since is not None:
        _marks.waits.append((_marks.wait_since, now()))
        _marks.wait_since = None


@contextmanager
def loading() -> Iterator[None]:
    """Mark that the host reads rows inside the block."""
    if not _marks.is_on:
        yield
        return
    since_s = perf_counter()
    yield
    _marks.loading_s += perf_counter() - since_s


class _Step(NamedTuple):
    """One step of this rank, or one evaluation."""

    start: Moment
    end: Moment
    waits: list[tuple[Moment, Moment]]
    loading_s: float

    def step_s(self) -> float:
        """Return its time; the device must have completed it."""
        return seconds(self.start, self.end)

    def own_s(self) -> float:
        """Return its time without waiting for other ranks; the device must have completed it."""
        return self.step_s() - sum(seconds(*wait) for wait in self.waits)


class RankTimes:
    """The measurement of one rank, from its first step to its last."""

    def __init__(
        self,
        slow: SlowRanks | None = None,
        log: mllog.Writer | None = None,
        replacement: Replacement | None = None,
    ) -> None:
        """Only rank 0 logs, and may replace a node. Without `slow`, nothing is measured."""
        self.is_on = slow is not None
        self._slow, self._log, self._replacement = slow, log, replacement
        self.to_replace: Slow | None = None
        """On rank 0: the node that a spare node replaces."""
        self.must_end = False
        """On all ranks at the same step: whether this attempt must end, because a node is replaced."""
        self._window: list[_Step] = []
        self._evaluation: _Step | None = None
        """The last evaluation in this window."""
        self._gathering: tuple[Any, torch.Tensor, torch.Tensor] | None = None
        self._window_steps = WINDOW_STEPS
        self._since_s = perf_counter()
        self._host_wait_s = waited_for_cpu_s()

    def begin(self, start: Moment) -> None:
        """Start here, at the start of training and after an evaluation or a checkpoint."""
        _marks.clear()
        _marks.is_on = self.is_on
        self._start = start

    def stepped(self, end: Moment) -> None:
        """Add a step that ends here."""
        if self.is_on:
            self._window.append(_Step(self._start, end, _marks.waits, _marks.loading_s))
            self._start = end
            _marks.clear()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Mark the evaluation inside the block."""
        if not self.is_on:
            yield
            return
        _marks.clear()
        start = now()
        yield
        self._evaluation = _Step(start, now(), _marks.waits, _marks.loading_s)
        _marks.clear()

    def exchange(self, step: int) -> None:
        """Judge the last window and start to gather this one, if it is long enough; all ranks call this together.

        The host has read a loss of all ranks just before, so the device has completed all marks.
        """
        if not self.is_on:
            return
        if len(self._window) >= self._window_steps:
            self._judge(step)
            self._gather()
        self.begin(now())

    def finish(self) -> None:
        """Judge the last window, and log the medians of all windows; all ranks call this together, after run_stop."""
        _marks.is_on = False
        if not self.is_on:
            return
        self._judge()
        if self._slow is not None and self._log is not None and (summary := self._slow.summary()) is not None:
            self._log.event(mllog.RANK_TIMES, summary)

    def end_attempt(self) -> NoReturn:
        """End this attempt because a node is replaced; all ranks call this together.

        Raises:
            BenchError: always; that of rank 0 names the node.
        """
        import torch

        if self._replacement is not None and self.to_replace is not None:
            error = self._replacement.requested(self.to_replace)
        else:
            what = "the attempt ends, because the node of a slow rank is replaced"
            error = BenchError(what, where="this rank", fix="nothing: rank 0 names the node", rule="RUN-26")
        torch.distributed.barrier()  # the batch script learns the node before any rank has ended
        raise error

    def _gather(self) -> None:
        """Start to gather the medians of this rank's window."""
        import torch

        own_s = [step.own_s() for step in self._window]
        waited_s = waited_for_cpu_s()
        window = Window(
            num_steps=len(self._window),
            step_s=median(step.step_s() for step in self._window),
            own_s=median(own_s),
            noise_s=noise_of_median(own_s),
            loading_s=median(step.loading_s for step in self._window),
            host_wait_s=(waited_s - self._host_wait_s) / len(self._window),
            evaluation_s=0.0 if self._evaluation is None else self._evaluation.own_s(),
            elapsed_s=perf_counter() - self._since_s,
        )
        self._window, self._evaluation, self._host_wait_s = [], None, waited_s
        sent = [*window, float(self.to_replace is not None)]
        own = torch.tensor(sent, dtype=torch.float64, device=process_group.device())
        everyone = torch.empty(torch.distributed.get_world_size() * len(sent), dtype=torch.float64, device=own.device)
        # torch 2.13 has given it another name.
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        work = gather(everyone, own, async_op=True)
        self._gathering = work, own, everyone

    def _judge(self, step: int | None = None) -> None:
        """Read the gathered medians, if there are any; rank 0 logs the ranks that have become slow.

        All ranks read them, so that all have the same length of the next window.
        """
        if self._gathering is None:
            return
        work, _, everyone = self._gathering
        self._gathering = None
        work.wait()
        rows = everyone.view(-1, len(Window._fields) + 1)
        self.must_end = bool(rows[0, -1])
        slowest_s = float(rows[:, Window._fields.index("step_s")].max())
        self._window_steps = max(WINDOW_STEPS, math.ceil(WINDOW_S / slowest_s))
        if self._slow is None or self._log is None:
            return
        for slow in self._slow.add([Window(*row[:-1]) for row in rows.tolist()]):
            at = {} if step is None else {"step": step}
            self._log.event(mllog.SLOW_RANKS, list(slow.ranks), **slow.about(), **at)
        candidate = self._slow.to_replace()
        if candidate is not None and self._replacement is not None and step is not None and self.to_replace is None:
            self.to_replace = candidate if self._replacement.is_worth(candidate, step) else None


def of_trial(plan: Plan, who: Rank, log: mllog.Writer, folder: Path, trial: int) -> RankTimes:
    """Return the measurement of this rank; all ranks call this together.

    Nothing is measured with a single rank, or with local SGD, whose groups have process groups of their own.
    """
    if who.world_size == 1 or plan.world.groups is not None:
        return RankTimes()
    places = [Place(*each) for each in process_group.gathered(who, (node_name(), who.local_rank))]
    stage_size = who.world_size // plan.world.pp
    stages = [rank // stage_size for rank in range(who.world_size)]
    slow = SlowRanks(places, stages, folder, trial)
    if who.rank != 0:
        return RankTimes(slow)
    return RankTimes(slow, log, Replacement.of_trial(plan, folder))


def waited_for_cpu_s() -> float:
    """Return how long this thread has waited for a CPU while it could have run; 0 if the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    return 0.0
