"""Decide which ranks are persistently slower than the others, why, and what they cost.

A rank is compared with the other ranks of its pipeline stage. It is slow in a window if the median of its own time (a
step without its waiting) exceeds the median of the others by at least LEAST and three times the noise. A rank that is
slow in PERSISTENT windows one after another is reported. A slow rank delays its whole model replica (tp, cp, pp), so
all ranks of the replica may be named; telemetry then shows which GPU it is.

Standard library only.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, sqrt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jobs.ranks import gpu_reasons

LEAST = 0.05
"""Share of the usual own time: smaller differences are not looked for."""
SIGMAS = 3.0
PERSISTENT = 5
LEAST_OF_EVALUATION, EVALUATIONS = 0.2, 3
"""An evaluation is timed once, so its noise is unknown: it must be slower by this share, so many times."""
COMPUTATION, LOADING, HOST, EVALUATION = "computation", "data loading", "host contention", "evaluation"
"""What is slow. The first three are parts of a step. Host contention: the rank waits for a CPU of its node."""


class Place(NamedTuple):
    """Where a rank runs."""

    node: str
    local_rank: int


class Window(NamedTuple):
    """Medians of one rank over the steps of a window."""

    num_steps: float
    step_s: float
    own_s: float
    """Of a step without waiting for other ranks."""
    noise_s: float
    """Standard error of own_s."""
    loading_s: float
    """The host's time for reading rows."""
    host_wait_s: float
    """Mean time of a step in which the rank waited for a CPU."""
    evaluation_s: float
    """Of an evaluation in this window, without waiting; 0 without one."""
    elapsed_s: float
    """Since the start of training."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Slow ranks of one node."""

    node: str
    ranks: tuple[int, ...]
    cause: str
    own_s: float
    """Of the slowest: its own time of a step or an evaluation."""
    usual_s: float
    """The median of the other ranks."""
    percent: float
    """What it has cost so far, in percent of the run: the steps would have been shorter by this without it."""
    reasons: tuple[str, ...]
    """What telemetry shows about its GPUs."""
    excess_s: float = 0.0
    """How much longer its slowest rank takes for a step than the slowest rank of the other nodes."""

    def about(self) -> dict[str, Any]:
        """Return the metadata of its log record."""
        times_ms = {"own_ms": round(1e3 * self.own_s, 3), "usual_ms": round(1e3 * self.usual_s, 3)}
        more = {"reasons": list(self.reasons)} if self.reasons else {}
        return {"node": self.node, "cause": self.cause, **times_ms, "percent": round(self.percent, 2), **more}


def noise_of_median(values: Sequence[float]) -> float:
    """Return the standard error of the median, from the median absolute deviation of normally distributed values."""
    middle = median(values)
    return 1.253 * 1.4826 * median(abs(value - middle) for value in values) / sqrt(len(values))


@dataclass(slots=True)
class SlowRanks:
    """The windows of all ranks, on rank 0."""

    places: Sequence[Place]
    """Of each rank."""
    stages: Sequence[int]
    """The pipeline stage of each rank."""
    folder: Path
    trial: int
    _recent: deque[Sequence[Window]] = field(default_factory=lambda: deque(maxlen=PERSISTENT))
    _slow_in: deque[set[int]] = field(default_factory=lambda: deque(maxlen=PERSISTENT))
    """The slow ranks of each recent window."""
    _evaluations: deque[Sequence[Window]] = field(default_factory=lambda: deque(maxlen=EVALUATIONS))
    _own_s: list[list[float]] = field(default_factory=list)
    """Of each window, and each rank."""
    _num_steps: int = 0
    _elapsed_s: float = 0.0
    _lost_s: dict[str, float] = field(default_factory=dict)
    """By node."""
    _reported: dict[tuple[str, str], Slow] = field(default_factory=dict)
    """By node and cause, as last found."""
    _blamed: Slow | None = None
    _blamed_for: int = 0
    """Windows one after another in which the same node was blamed."""

    def add(self, windows: Sequence[Window]) -> list[Slow]:
        """Add a window of each rank; return what has become slow with it."""
        self._recent.append(windows)
        self._own_s.append([window.own_s for window in windows])
        self._num_steps += int(windows[0].num_steps)
        self._elapsed_s = windows[0].elapsed_s
        if all(window.evaluation_s > 0 for window in windows):
            self._evaluations.append(windows)
        self._slow_in.append(self._slow_ranks(windows))
        self._count_losses(windows, self._slow_in[-1])
        persistent = set.intersection(*self._slow_in) if len(self._slow_in) == PERSISTENT else set[int]()
        in_steps = [*self._by_node(persistent, "own_s", self._recent)]
        self._blame(in_steps)
        slow_now = [*in_steps, *self._in_evaluations()]
        new = [slow for slow in slow_now if (slow.node, slow.cause) not in self._reported]
        self._reported |= {(slow.node, slow.cause): slow for slow in slow_now}
        return new

    def to_replace(self) -> Slow | None:
        """Return the one node whose slow computation has been found in PERSISTENT windows after the first finding."""
        return self._blamed if self._blamed_for > PERSISTENT else None

    def _blame(self, slow_now: Sequence[Slow]) -> None:
        """Note which node computes slowly: if several do, as in a replica that spans nodes, telemetry must show it."""
        computing = [slow for slow in slow_now if slow.cause == COMPUTATION]
        candidates = computing if len(computing) < 2 else [slow for slow in computing if slow.reasons]
        blamed = candidates[0] if len(candidates) == 1 else None
        is_same = blamed is not None and self._blamed is not None and blamed.node == self._blamed.node
        self._blamed, self._blamed_for = blamed, self._blamed_for + 1 if is_same else int(blamed is not None)

    def summary(self) -> dict[str, Any] | None:
        """Return the log record of the whole run; None without a window."""
        if not self._own_s:
            return None
        own_ms = [round(1e3 * median(of_rank), 3) for of_rank in zip(*self._own_s, strict=True)]
        slow = [{"ranks": list(each.ranks), **self._with_total(each).about()} for each in self._reported.values()]
        return {"windows": len(self._own_s), "steps": self._num_steps, "own_ms": own_ms, "slow": slow}

    def _others(self, rank: int) -> list[int]:
        return [one for one, stage in enumerate(self.stages) if stage == self.stages[rank] and one != rank]

    def _excess(self, windows: Sequence[Window], rank: int, name: str) -> float:
        """Return by how much a time of a rank exceeds the median of the others."""
        usual_s = median(getattr(windows[other], name) for other in self._others(rank))
        return float(getattr(windows[rank], name) - usual_s)

    def _compared(self, windows: Sequence[Window], name: str) -> Iterator[tuple[int, float, float]]:
        """Yield each rank, its value, and the median of the other ranks of its stage, sorted once for many ranks."""
        for stage in set(self.stages):
            values = sorted((getattr(windows[r], name), r) for r, own in enumerate(self.stages) if own == stage)
            only = [value for value, _ in values]
            for place, (value, rank) in enumerate(values[1:], 1):  # the fastest is not slow
                yield rank, value, _median_without(only, place)

    def _slow_ranks(self, windows: Sequence[Window]) -> set[int]:
        noise_s = median(window.noise_s for window in windows)
        return {
            rank
            for rank, own_s, usual_s in self._compared(windows, "own_s")
            if own_s - usual_s > max(LEAST * usual_s, SIGMAS * hypot(windows[rank].noise_s, noise_s))
        }

    def _count_losses(self, windows: Sequence[Window], slow_now: set[int]) -> None:
        """Add what the steps of this window lost by each node: the own time above that of the slowest other rank."""
        rest_s = max((window.own_s for rank, window in enumerate(windows) if rank not in slow_now), default=None)
        if rest_s is None:
            return
        for node in {self.places[rank].node for rank in slow_now}:
            slowest_s = max(windows[rank].own_s for rank in slow_now if self.places[rank].node == node)
            lost_s = max(0.0, slowest_s - rest_s) * windows[0].num_steps
            self._lost_s[node] = self._lost_s.get(node, 0.0) + lost_s

    def _in_evaluations(self) -> Iterator[Slow]:
        """Yield the ranks that are slow in each of the last evaluations, but not in steps."""
        if len(self._evaluations) < EVALUATIONS:
            return
        slow_in = [self._slow_in_evaluation(windows) for windows in self._evaluations]
        persistent = set.intersection(*slow_in).difference(*self._slow_in)
        yield from self._by_node(persistent, "evaluation_s", self._evaluations)

    def _by_node(self, ranks: set[int], name: str, recent: Iterable[Sequence[Window]]) -> Iterator[Slow]:
        """Yield slow ranks by node, each with the cause of its slowest one."""
        joined = _joined(recent) if ranks else []
        for node in dict.fromkeys(self.places[rank].node for rank in sorted(ranks)):
            yield self._slow([rank for rank in sorted(ranks) if self.places[rank].node == node], name, joined)

    def _slow_in_evaluation(self, windows: Sequence[Window]) -> set[int]:
        compared = self._compared(windows, "evaluation_s")
        return {rank for rank, own_s, usual_s in compared if own_s > (1 + LEAST_OF_EVALUATION) * usual_s}

    def _slow(self, ranks: Sequence[int], name: str, joined: Sequence[Window]) -> Slow:
        """Return slow ranks of one node by the medians of all ranks over windows."""
        worst = max(ranks, key=lambda rank: float(getattr(joined[rank], name)))
        own_s, node = float(getattr(joined[worst], name)), self.places[worst].node
        excess_s = self._excess(joined, worst, name)
        if name == "own_s":
            cause, percent = self._cause(joined, worst, excess_s), self._percent(node)
        else:
            cause, percent = EVALUATION, 100 * excess_s * EVALUATIONS / self._elapsed_s
        reasons = self._reasons(node, tuple(ranks), cause) if cause in (COMPUTATION, EVALUATION) else ()
        elsewhere_s = [float(getattr(joined[r], name)) for r, place in enumerate(self.places) if place.node != node]
        more_s = max(0.0, own_s - max(elsewhere_s, default=own_s))
        return Slow(node, tuple(ranks), cause, own_s, own_s - excess_s, percent, reasons, more_s)

    def _reasons(self, node: str, ranks: tuple[int, ...], cause: str) -> tuple[str, ...]:
        """Return what telemetry shows; it reads a file of each node, so ranks that stay slow are looked up once."""
        known = self._reported.get((node, cause))
        if known is not None and known.ranks == ranks:
            return known.reasons
        return gpu_reasons.find(self.folder, self.trial, node, [self.places[rank].local_rank for rank in ranks])

    def _cause(self, joined: Sequence[Window], rank: int, excess_s: float) -> str:
        """Return which part of a step takes at least half of the excess of a rank."""
        if self._excess(joined, rank, "host_wait_s") > excess_s / 2:
            return HOST
        return LOADING if self._excess(joined, rank, "loading_s") > excess_s / 2 else COMPUTATION

    def _percent(self, node: str) -> float:
        return 100 * self._lost_s.get(node, 0.0) / self._elapsed_s if self._elapsed_s else 0.0

    def _with_total(self, slow: Slow) -> Slow:
        return slow if slow.cause == EVALUATION else replace(slow, percent=self._percent(slow.node))


def _median_without(values: Sequence[float], place: int) -> float:
    """Return the median of sorted values without the one at a place."""
    middle = (len(values) - 1) // 2

    def rest(at: int) -> float:
        return values[at + (at >= place)]

    return rest(middle) if len(values) % 2 == 0 else (rest(middle - 1) + rest(middle)) / 2


def _joined(recent: Iterable[Sequence[Window]]) -> list[Window]:
    """Return the medians of each rank over windows of all ranks."""
    of_ranks = zip(*recent, strict=True)
    return [Window(*(median(values) for values in zip(*of_rank, strict=True))) for of_rank in of_ranks]
