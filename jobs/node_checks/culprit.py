"""Name the GPU, host, NIC, rail or link that makes a job slow, from measurements of its nodes and of pairs of nodes.

The nodes are a ring, in the order of their ranks: a link that the ring does not use cannot slow its all-reduce. The
ranks with the same local rank on all nodes use one *rail*. Pairs of nodes are measured in rounds, one group of two
ranks for each rail. A round measures all its pairs at the same time.

Each candidate (say, the NIC of node 5 on rail 2) has a set of measured cells that it would slow. Its weight is the
likelihood of all cells with these slowed by some amount, relative to no slow cell, times a prior. The amount is
integrated over 5 to 99 %, and the rate of the healthy cells is fitted. The noise is estimated from the cells: from
repeated samples of a cell, and from the spread between cells. A candidate is named if its weight is at least NAMED of
the sum of its own weight, the weight of "nothing is slow", and the weights of all candidates that share a cell with it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

OWN_SAMPLES, PAIR_SAMPLES = 20, 5
"""Samples of each test of a GPU alone and of each node, and of each pair in a round."""
NAMED = 0.98
"""The lowest confidence of a culprit that is named."""
SETTLED = 0.999
"""At this confidence of every culprit no more rounds are needed."""
LEAST_REST, LEAST_HEALTHY = 0.2, 0.5
"""The lowest confidence that nothing else is slow, with a culprit and without; below it, the verdict is undecided."""
NOTHING_SLOW = 0.9
"""The prior of a test in which nothing is slow: a slow part is seen in one to three of the tests."""
SLOW_AS_WELL = 0.3
"""The prior of the parts that another test has found to be slow."""
MAX_CULPRITS = 8
MANY_ROUNDS = 32
FEW_NODES = 8
"""Of so few nodes, two slow ones touch most pairs, and are also tried together."""
LEAST_SLOWDOWN, LEAST_NOISES, NUM_SLOWDOWNS = 0.05, 3.0, 20
"""Slowdowns are looked for from 5 %, but from three times the noise of one sample, up to 99 %."""
FEW_CELLS = 12
LEAST_SPREAD = 0.003
"""Healthy parts differ by at least this share."""


class Kind(StrEnum):
    """What is slow."""

    GPU = "gpu"
    HOST = "host"
    NIC = "nic"
    RAIL = "rail"
    LINK = "link"


OF_ONE_NODE = (Kind.GPU, Kind.HOST, Kind.NIC)
Place = tuple[int, int | None]
"""A node and a local rank; None: all of the node."""


class Culprit(NamedTuple):
    """Something slow: its nodes by position in the ring, and its local rank (of a GPU) or rail; None: all of them."""

    kind: Kind
    nodes: tuple[int, ...]
    rail: int | None
    confidence: float


class Verdict(NamedTuple):
    """The culprits; without any, a decided verdict means that no part is slower than the others: it is the fabric."""

    culprits: tuple[Culprit, ...]
    decided: bool
    confidence: float
    """The lowest confidence of the culprits; without any, `rest`."""
    rest: float
    """The confidence that nothing else is slow."""

    @property
    def is_settled(self) -> bool:
        """Return whether more rounds are not needed; they are, as long as no culprit is found."""
        return self.decided and bool(self.culprits) and self.rest >= NAMED and self.confidence >= SETTLED


@dataclass(frozen=True, slots=True)
class Pair:
    """The rates of two nodes in one round, [rail, sample]; any unit, higher is faster."""

    nodes: tuple[int, int]
    rates: Floats


@dataclass(slots=True)
class Measurements:
    """All rates that were measured; any unit for each test, higher is faster."""

    own: dict[str, Floats]
    """The tests of each GPU alone, by name: [node, local rank, sample]."""
    inside: Floats | None
    """All-reduce within each node: [node, sample]; None with one rank on each node."""
    num_nodes: int
    num_rails: int
    pairs: list[Pair] = field(default_factory=list)


def max_rounds(num_nodes: int) -> int:
    """Return 2 ceil(log2 n) + 1, the most rounds of a search, the last ring included."""
    return 2 * (num_nodes - 1).bit_length() + 1


def rounds(num_nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round, a node at most once in each; the last round is left for a ring.

    The first two rounds (three, for an odd number of nodes) have all links of the ring. Then rounds in which each node
    has a new partner alternate with the rounds of the ring.
    """
    even = [(node, node + 1) for node in range(0, num_nodes - 1, 2)]
    odd = [(node, (node + 1) % num_nodes) for node in range(1, num_nodes - num_nodes % 2, 2)]
    ring = [even, odd, [(num_nodes - 1, 0)]][: 2 + num_nodes % 2] if num_nodes > 2 else [even]
    links, left = {frozenset(pair) for pairs in ring for pair in pairs}, max_rounds(num_nodes) - 1 - len(ring)
    strangers = sorted(
        _partners(num_nodes, MANY_ROUNDS), key=lambda pairs: sum(frozenset(pair) in links for pair in pairs)
    )
    yield from ring
    for number in range(left):
        yield ring[number // 2 % len(ring)] if number % 2 or num_nodes <= 3 else strangers[number // 2]


def _partners(num_nodes: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds in which no pair repeats: the tournament of the circle method."""
    seats: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    for _ in range(min(most, len(seats) - 1)):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def searched(measured: Measurements, measure: Callable[[list[tuple[int, int]]], list[Pair]]) -> tuple[Verdict, int]:
    """Measure rounds of pairs until the verdict is settled; return it, and the number of rounds.

    measure: returns the rates of the pairs of one round, which are added to `measured`.
    """
    for number, pairs in enumerate(rounds(measured.num_nodes), start=1):
        measured.pairs += measure(pairs)
        if _covers_ring(measured):
            verdict = decide(measured)
            if verdict.is_settled:
                return verdict, number
    return verdict, number


def _covers_ring(measured: Measurements) -> bool:
    """Return whether every link of the ring was measured; before that, no verdict is sound."""
    seen = {frozenset(pair.nodes) for pair in measured.pairs}
    return all(frozenset((node, (node + 1) % measured.num_nodes)) in seen for node in range(measured.num_nodes))


def decide(measured: Measurements) -> Verdict:
    """Return what is slow.

    A GPU is named if it is slow alone, or if its node is slow inside and only its rail is slow to other nodes. A host
    is named if all its GPUs or all its rails are, or if only its inside is slow. A NIC is slow to all nodes on a rail
    (rail None: on all), while the node is fast inside. With two nodes, what no test of a single node shows is the pair.
    """
    every_rail = (None, *range(measured.num_rails))
    likely: set[Place] = set()
    for _ in range(2):
        culprits, certainties = _slow_alone(measured, likely)
        slow_inside, inside_certainty = _slow_inside(measured, {node for node, _ in likely})
        inside = {(node, rail) for node in slow_inside for rail in every_rail}
        between, between_certainty = _slow_between(measured, culprits, likely | inside)
        certainties += [inside_certainty, between_certainty]
        of_node = [culprit for culprit in (*culprits, *between) if culprit.kind in OF_ONE_NODE]
        likely = {(culprit.nodes[0], culprit.rail) for culprit in of_node}
        if not likely or min(certainties) >= NAMED:
            break
    for culprit in between:
        guilty = [node for node in culprit.nodes if node in slow_inside]
        is_pair = measured.num_nodes == 2 and culprit.kind is Kind.LINK and len(guilty) == 1
        if guilty and (culprit.kind is Kind.NIC or is_pair):
            kind = Kind.HOST if culprit.rail is None else Kind.GPU
            confidence = min(culprit.confidence, slow_inside[guilty[0]])
            culprits.append(Culprit(kind, (guilty[0],), culprit.rail, confidence))
        else:
            culprits.append(culprit)
    for node, confidence in slow_inside.items():
        if not any(node in culprit.nodes and culprit.kind in (Kind.GPU, Kind.HOST) for culprit in culprits):
            culprits.append(Culprit(Kind.HOST, (node,), None, confidence))
    rest = min(certainties)
    if not culprits and measured.num_nodes == 2 and measured.pairs:
        culprits = [Culprit(Kind.LINK, (0, 1), None, rest)]
    accused = {culprit.nodes[0] for culprit in culprits if culprit.kind in OF_ONE_NODE}
    least = LEAST_REST if culprits else LEAST_HEALTHY
    too_many = 2 * len(accused) > measured.num_nodes
    confidence = min([culprit.confidence for culprit in culprits], default=rest)
    return Verdict(tuple(sorted(culprits)), rest >= least and not too_many, confidence, rest)


def _slow_alone(measured: Measurements, likely: Collection[Place]) -> tuple[list[Culprit], list[float]]:
    """Return the GPUs and hosts that are slow alone, and how certain it is for each test that no other is."""
    best: dict[tuple[Kind, int, int | None], float] = {}
    certainties = []
    num_gpus = measured.num_rails
    for rates in measured.own.values():
        nodes, gpus = np.divmod(np.arange(measured.num_nodes * num_gpus), num_gpus)
        candidates = _Candidates(len(nodes))
        candidates.add(np.arange(len(nodes)), size=len(nodes))
        if num_gpus > 1 and measured.num_nodes > 1:
            candidates.add(nodes, size=measured.num_nodes)
            candidates.likely += [len(nodes) + node for node, gpu in likely if gpu is None]
        candidates.likely += [node * num_gpus + gpu for node, gpu in likely if gpu is not None]
        named, certainty = _named(_cells(rates.reshape(len(nodes), -1)), candidates)
        certainties.append(certainty)
        for number, confidence in named:
            is_gpu = number < len(nodes)
            node = int(nodes[number]) if is_gpu else number - len(nodes)
            key = (Kind.GPU, node, int(gpus[number])) if is_gpu else (Kind.HOST, node, None)
            best[key] = max(best.get(key, 0.0), confidence)
    hosts = {node for kind, node, _ in best if kind is Kind.HOST}
    return [
        Culprit(kind, (node,), gpu, confidence)
        for (kind, node, gpu), confidence in best.items()
        if kind is Kind.HOST or node not in hosts
    ], certainties


def _slow_inside(measured: Measurements, likely: Collection[int]) -> tuple[dict[int, float], float]:
    """Return the nodes whose all-reduce is slow, with their confidence, and how certain the rest is."""
    if measured.inside is None:
        return {}, 1.0
    candidates = _Candidates(measured.num_nodes)
    candidates.add(np.arange(measured.num_nodes), size=measured.num_nodes)
    candidates.likely += likely
    named, certainty = _named(_cells(measured.inside), candidates)
    return dict(named), certainty


def _slow_between(
    measured: Measurements, known: Iterable[Culprit], likely: Collection[Place]
) -> tuple[list[Culprit], float]:
    """Return the NICs, rails and links that are slow, and how certain the rest is; `known` culprits are left out."""
    if not measured.pairs:
        return [], 1.0
    num_nodes, num_rails = measured.num_nodes, measured.num_rails
    rounds_of: dict[tuple[int, int], list[Floats]] = {}
    for pair in measured.pairs:
        rounds_of.setdefault((min(pair.nodes), max(pair.nodes)), []).append(pair.rates)
    links = list(rounds_of)
    cells = _joined([[_cells(rates) for rates in each] for each in rounds_of.values()])
    link, rail = np.divmod(np.arange(len(links) * num_rails), num_rails)
    ends = np.array(links)[link]
    kept = np.ones(len(link), dtype=bool)
    for culprit in known:
        touched = np.isin(ends, culprit.nodes).any(axis=1)
        kept &= ~(touched if culprit.rail is None else touched & (rail == culprit.rail))
    candidates, meanings = _Candidates(len(link)), list[tuple[Kind, tuple[int, ...], int | None]]()

    def add(kind: Kind, places: Sequence[tuple[int, ...]], *columns: Integers, by_rail: bool) -> None:
        numbers = [column * num_rails + rail if by_rail else column for column in columns]
        candidates.add(*numbers, size=len(places) * (num_rails if by_rail else 1))
        meanings.extend((kind, place, r) for place in places for r in (range(num_rails) if by_rail else [None]))

    each_node = [(node,) for node in range(num_nodes)]
    add(Kind.LINK, links, link, by_rail=True)
    if num_nodes > 2:
        add(Kind.NIC, each_node, ends[:, 0], ends[:, 1], by_rail=True)
        if num_rails > 1:
            add(Kind.LINK, links, link, by_rail=False)
            add(Kind.NIC, each_node, ends[:, 0], ends[:, 1], by_rail=False)
            add(Kind.RAIL, [()], np.zeros_like(rail), by_rail=True)
    unknown = {node for node, _ in likely}.difference(*(culprit.nodes for culprit in known))
    if 2 < num_nodes <= FEW_NODES and len(unknown) > 1:
        twos = list(combinations(range(num_nodes), 2))
        touching = [[number for number, two in enumerate(twos) if {a, b} & set(two)] for a, b in ends]
        add(Kind.NIC, twos, *np.array(touching).T, by_rail=True)
    candidates.impossible += [
        number
        for number, (kind, nodes, _) in enumerate(meanings)
        if kind is Kind.LINK and (nodes[1] - nodes[0]) not in (1, num_nodes - 1)  # not a link of the ring
    ]
    candidates.likely += [
        number
        for number, (kind, nodes, r) in enumerate(meanings)
        if kind is Kind.NIC and all((node, r) in likely for node in nodes)
    ]
    named, certainty = _named(cells, candidates, kept)
    culprits = []
    for number, confidence in named:
        kind, nodes, r = meanings[number]
        at = None if kind is Kind.LINK and num_rails == 1 else r
        each = [(node,) for node in nodes] if kind is Kind.NIC else [nodes]
        culprits += [Culprit(kind, those, at, confidence) for those in each]
    return culprits, certainty


class _Cells(NamedTuple):
    """The logarithm of each cell's rate, the number of its samples, and the variance between its samples."""

    log_rate: Floats
    num_samples: Floats
    variance: Floats

    def noise(self) -> float:
        """Return the variance of one sample; a few cells with single hiccups do not change it much."""
        middle = np.median if len(self.variance) >= FEW_CELLS else np.mean
        return float(middle(self.variance))


def _cells(rates: Floats) -> _Cells:
    """Reduce [cell, sample]: with five samples or more, the highest and the lowest are left out of the mean."""
    logs = np.sort(np.log(rates), axis=1)
    num = logs.shape[1]
    inner = logs[:, 1:-1] if num >= 5 else logs
    variance = logs.var(axis=1, ddof=1) if num > 1 else np.zeros(len(logs))
    return _Cells(inner.mean(axis=1), np.full(len(logs), float(num)), variance)


def _joined(of_links: Sequence[Sequence[_Cells]]) -> _Cells:
    """Return the cells of all links; the rounds of one link are averaged."""
    return _Cells(
        np.concatenate([np.mean([one.log_rate for one in each], axis=0) for each in of_links]),
        np.concatenate([np.sum([one.num_samples for one in each], axis=0) for each in of_links]),
        np.concatenate([np.mean([one.variance for one in each], axis=0) for each in of_links]),
    )


class _Candidates:
    """What can be slow: the candidates of each cell, and the prior of each candidate."""

    def __init__(self, num_cells: int) -> None:
        self.of_cell: Integers = np.empty((num_cells, 0), dtype=np.int64)
        self.class_sizes: list[int] = []
        self.likely: list[int] = []
        """The candidates whose part another test has found to be slow."""
        self.impossible: list[int] = []

    def add(self, *columns: Integers, size: int) -> None:
        """Add the candidates of one class; each column has, for every cell, a number from 0 to size - 1."""
        first, stacked = sum(self.class_sizes), np.stack(columns, axis=1)
        self.of_cell = np.concatenate([self.of_cell, first + stacked], axis=1)
        self.class_sizes.append(size)

    def log_prior(self) -> Floats:
        """Every class of candidates has the same share, and the likely ones have more."""
        shares = np.concatenate(
            [np.full(size, (1 - NOTHING_SLOW) / len(self.class_sizes) / size) for size in self.class_sizes]
        )
        shares[self.impossible] = 1e-300
        if self.likely:
            shares[self.likely] = np.maximum(shares[self.likely], SLOW_AS_WELL / len(self.likely))
        logs: Floats = np.log(shares)
        return logs


def _named(
    cells: _Cells, candidates: _Candidates, kept: NDArray[np.bool_] | None = None
) -> tuple[list[tuple[int, float]], float]:
    """Return the candidates that are slow, with their confidence, and the confidence that no other is.

    The candidate with the highest weight is named first, and its cells are left out. A candidate that is likely but not
    sure ends the search: the returned confidence is then low.
    """
    kept = np.ones(len(cells.log_rate), dtype=bool) if kept is None else kept.copy()
    log_prior, named = candidates.log_prior(), list[tuple[int, float]]()
    log_none = np.log(NOTHING_SLOW)
    while True:
        if kept.sum() < 2:
            return named, 1.0
        of_cell = candidates.of_cell[kept]
        best = int((_log_evidence(cells, of_cell, kept, _variance(cells, kept), len(log_prior)) + log_prior).argmax())
        own_cells = kept & (candidates.of_cell == best).any(axis=1)
        variance = _variance(cells, kept, healthy=kept & ~own_cells)
        weights = _log_evidence(cells, of_cell, kept, variance, len(log_prior)) + log_prior
        rivals = np.unique(candidates.of_cell[own_cells])
        confidence = float(np.exp(weights[best] - np.logaddexp.reduce([*weights[rivals], log_none])))
        if confidence < NAMED or len(named) == MAX_CULPRITS:
            return named, float(np.exp(log_none - np.logaddexp.reduce([*weights, log_none])))
        named.append((best, confidence))
        kept &= ~own_cells


def _log_evidence(
    cells: _Cells, of_cell: Integers, kept: NDArray[np.bool_], variance: Floats, num_candidates: int
) -> Floats:
    """Return, of each candidate, the logarithm of the likelihood ratio "its cells are slow" to "no cell is slow".

    With x the cells' distances from their mean weighted by 1/v (v: variances), S0 and S1 the sums of 1/v and x/v over
    the cells of a candidate, and T0 the sum of 1/v over all cells, a slowdown d has the log-likelihood ratio
    -d S1 - d^2 S0 (1 - S0 / T0) / 2, where the mean of the other cells is fitted for each d.
    """
    values, precision = cells.log_rate[kept], 1 / variance
    values = values - np.average(values, weights=precision)
    columns = of_cell.shape[1]
    s0 = np.bincount(of_cell.ravel(), np.repeat(precision, columns), num_candidates)
    s1 = np.bincount(of_cell.ravel(), np.repeat(precision * values, columns), num_candidates)
    curvature = s0 * np.maximum(1 - s0 / precision.sum(), 0.0)
    least = np.clip(LEAST_NOISES * np.sqrt(cells.noise()), LEAST_SLOWDOWN, 0.9)
    shifts = -np.log1p(-np.geomspace(least, 0.99, NUM_SLOWDOWNS))
    ratios = -np.outer(shifts, s1) - np.outer(shifts**2 / 2, curvature)
    highest = ratios.max(axis=0)
    evidence = highest + np.log(np.exp(ratios - highest).mean(axis=0))
    return np.where(curvature > 1e-9 * precision.sum(), evidence, -np.inf)  # no cell, or all cells: no comparison


def _variance(cells: _Cells, kept: NDArray[np.bool_], healthy: NDArray[np.bool_] | None = None) -> Floats:
    """Return the variance of each kept cell: that of its mean, and that between healthy cells.

    healthy: the cells whose median absolute deviation shows the variance between them. Without it, the shortest
    interval that has half of the cells is used instead, which is right even if half of the cells are slow. With few
    cells, the result is close to what the noise of the samples suggests.
    """
    sample = cells.noise()
    of_mean = sample / cells.num_samples[kept]
    if healthy is None:
        ordered = np.sort(cells.log_rate[kept])
        half = (len(ordered) + 1) // 2
        seen = (float((ordered[half:] - ordered[:-half]).min()) / 1.349) ** 2
        num = len(ordered)
    else:
        values = cells.log_rate[healthy]
        num = len(values)
        seen = (1.4826 * float(np.median(np.abs(values - np.median(values))))) ** 2 if num else 0.0
    if num < FEW_CELLS:
        seen, num = 0.0, 0
    expected = float(of_mean.mean()) + sample / 4
    total = (num * seen + FEW_CELLS * expected) / (num + FEW_CELLS)
    between = max(total - float(of_mean.mean()), sample / 16, LEAST_SPREAD**2)
    return of_mean + between
