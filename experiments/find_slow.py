"""Grade the search for slow parts of a cluster: does it name the part that was made slow in a simulated one?

    python experiments/find_slow.py            # 1,000 cases, with a new seed
    python experiments/find_slow.py --cases 200 --seed 7 --wrong

A case has 2 to 512 nodes with 1, 2, 4 or 8 GPUs, and a noise of 1, 2 or 5 %. Every sample has this noise, and every
GPU and every link also has a fixed offset of half this noise. One thing is slowed by at least 5 %, at least three times
the noise, and at most 50 %: one GPU, GPUs of two nodes, a host, a NIC, the link between two neighbours, a rail, or
nothing. A slow GPU is slow in GEMMs; or in copies and to all other GPUs; or only to other GPUs. Cases that no
measurement can distinguish are not drawn: with one GPU on each node, a host is its GPU, a slow rail is the network, and
a GPU that is slow only to others is its NIC.

Right: exactly the slow part is named. Of two nodes, the pair is right for what is slow only between them, and also if
nothing is slow: the search starts only below a floor. Undecided: nothing is named, though something is slow. False:
something that is not slow is named. Wrong: everything else.
"""

import argparse
import secrets
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobs.node_checks import culprit
from jobs.node_checks.culprit import OWN_SAMPLES, PAIR_SAMPLES, Kind, Measurements, Pair, Verdict

KINDS = ("gpu", "two gpus", "host", "nic", "link", "rail", "none")
NOISE = (0.01, 0.02, 0.05)
MAX_NODES = 512
OUTCOMES = ("right", "undecided", "wrong", "false")
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Cluster:
    """A simulated cluster: the factor of each part's rate; 1 is healthy."""

    kind: str
    noise: float
    slow: tuple[tuple[Kind, tuple[int, ...], int | None, float], ...]
    """Kind, nodes, rail and slowdown of what is slow."""
    gemm: Floats
    copy: Floats
    """[node, GPU]"""
    inside: Floats
    """[node]"""
    rails: Floats
    """[node, rail]; the rate of a pair is the lower one of its two ends"""
    link: tuple[tuple[int, int], float] | None
    random: np.random.Generator

    def sampled(self, factors: Floats, num: int) -> Floats:
        """Return samples of these rates, with a new last dimension."""
        offset = 1 + self.noise / 2 * self.random.standard_normal(factors.shape)
        noise = 1 + self.noise * self.random.standard_normal((*factors.shape, num))
        return (factors * offset)[..., None] * noise


def random_cluster(random: np.random.Generator, max_nodes: int = MAX_NODES) -> Cluster:
    """Return a random cluster with a random slow part."""
    num_nodes = int(round(2 ** random.uniform(1, np.log2(max_nodes))))
    num_gpus = int(random.choice([1, 2, 4, 8]))
    noise = float(random.choice(NOISE))
    one = num_gpus == 1
    possible = [
        kind for kind in KINDS if not (kind in ("rail", "host") and one) and not (kind == "two gpus" and num_nodes < 4)
    ]
    kind = str(random.choice(possible))
    c = Cluster(
        kind,
        noise,
        (),
        gemm=np.ones((num_nodes, num_gpus)),
        copy=np.ones((num_nodes, num_gpus)),
        inside=np.ones(num_nodes),
        rails=np.ones((num_nodes, num_gpus)),
        link=None,
        random=random,
    )
    nodes = random.choice(num_nodes, size=2, replace=False)
    for node in map(int, nodes[: 2 if kind == "two gpus" else 1]):
        gpu, slowdown = int(random.integers(num_gpus)), float(random.uniform(max(0.05, 3 * noise), 0.5))
        rate = 1 - slowdown
        if kind in ("gpu", "two gpus"):
            mode = random.choice(["gemm", "copy"] if one else ["gemm", "copy", "others"])
            if mode == "gemm":
                c.gemm[node, gpu] = rate
            else:
                c.copy[node, gpu] = rate if mode == "copy" else 1.0
                c.inside[node] = c.rails[node, gpu] = rate
            c.slow += ((Kind.GPU, (node,), gpu, slowdown),)
        elif kind == "host":
            if random.random() < 0.5:
                c.gemm[node] = c.copy[node] = rate
            c.inside[node] = c.rails[node] = rate
            c.slow = ((Kind.HOST, (node,), None, slowdown),)
        elif kind == "nic":
            rail = None if one or random.random() < 0.25 else gpu
            c.rails[node, slice(None) if rail is None else rail] = rate
            c.slow = ((Kind.NIC, (node,), 0 if one else rail, slowdown),)
        elif kind == "rail":
            c.rails[:, gpu] = rate
            c.slow = ((Kind.RAIL, (), gpu, slowdown),)
        elif kind == "link":
            ends = tuple(sorted((node, (node + 1) % num_nodes)))
            c.link, c.slow = ((ends[0], ends[1]), rate), ((Kind.LINK, ends, None, slowdown),)
    return c


def searched(cluster: Cluster) -> tuple[Verdict, int]:
    """Return the verdict of the search, and after how many rounds of pairs it came."""
    num_nodes, num_gpus = cluster.rails.shape
    own = {"GEMM": cluster.gemm, "copy": cluster.copy}
    measured = Measurements(
        {name: cluster.sampled(factors, OWN_SAMPLES) for name, factors in own.items()},
        cluster.sampled(cluster.inside, OWN_SAMPLES) if num_gpus > 1 else None,
        num_nodes,
        num_gpus,
    )
    offsets: dict[tuple[int, int], Floats] = {}

    def measure(pairs: list[tuple[int, int]]) -> list[Pair]:
        of_round = []
        for a, b in pairs:
            ends = (min(a, b), max(a, b))
            factors = np.minimum(cluster.rails[a], cluster.rails[b])
            if cluster.link is not None and cluster.link[0] == ends:
                factors = factors * cluster.link[1]
            if ends not in offsets:
                offsets[ends] = 1 + cluster.noise / 2 * cluster.random.standard_normal(num_gpus)
            noise = 1 + cluster.noise * cluster.random.standard_normal((num_gpus, PAIR_SAMPLES))
            of_round.append(Pair(ends, (factors * offsets[ends])[:, None] * noise))
        return of_round

    return culprit.searched(measured, measure)


def outcome(cluster: Cluster, verdict: Verdict) -> str:
    """Return how right the verdict is; see the top of this file."""
    num_nodes, num_gpus = cluster.rails.shape
    named = {(one.kind, one.nodes, one.rail) for one in verdict.culprits if verdict.decided}
    slow = {(kind, nodes, rail) for kind, nodes, rail, _ in cluster.slow}
    if num_nodes == 2 and cluster.kind in ("nic", "link", "rail", "none"):
        pair = {(Kind.LINK, (0, 1), None), *((Kind.LINK, (0, 1), rail) for _, _, rail, _ in cluster.slow)}
        if named and named <= pair:
            return "right"
    if named == slow and (named or verdict.decided):
        return "right"
    if not named:
        return "undecided" if not verdict.decided else "wrong"
    return "wrong" if named < slow else "false"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="default: a new one from the system")
    parser.add_argument("--wrong", action="store_true", help="print every case that is not right")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    rounds, began = list[int](), time.monotonic()
    for number in range(args.cases):
        cluster = random_cluster(np.random.default_rng([seed, number]))
        verdict, num_rounds = searched(cluster)
        result = outcome(cluster, verdict)
        counts[cluster.kind][result] += 1
        rounds.append(num_rounds)
        if args.wrong and result != "right":
            print(f"case {number}: {result}; {cluster.rails.shape} noise {cluster.noise} {cluster.slow} -> {verdict}")
    print(f"seed {seed}, {args.cases} cases in {time.monotonic() - began:.0f} s")
    print(f"{'slow':10} {'cases':>6} " + " ".join(f"{name:>10}" for name in OUTCOMES))
    total: Counter[str] = sum(counts.values(), Counter())
    for kind, count in [*counts.items(), ("all", total)]:
        print(f"{kind:10} {count.total():6} " + " ".join(f"{count[name]:10}" for name in OUTCOMES))
    print(f"rounds of pairs: median {int(np.median(rounds))}, at most {max(rounds)}")
    right, false = total["right"] / args.cases, total["false"] / args.cases
    print(f"named right {right:.1%} (goal: at least 99 %), false accusations {false:.1%} (goal: at most 1 %)")
    return 0 if right >= 0.99 and false <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
