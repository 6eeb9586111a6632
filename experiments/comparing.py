"""Simulate how often comparisons of two systems are wrong, for docs/comparing.md.

python experiments/comparing.py
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from bench.results import comparison
from bench.results.comparison import Verdict, verdicts

NUM = 20_000
BOUND = math.log(1.02)
TEST = {"bound": BOUND, "confidence": 0.95}
SIGNIFICANT = (Verdict.different, Verdict.equivalent_different)
rng = np.random.default_rng(1)


def main() -> None:
    for spread in (0.003, 0.005, 0.01):
        for difference in (0.0, 0.01, 0.05):
            called = decided(pairs(6, spread) + math.log1p(-difference))
            rates = ", ".join(f"{verdict} {share(called, verdict)}" for verdict in list(Verdict)[:4])
            print(f"6 pairs, spread {spread:.1%}, {difference:.0%} slower: {rates}")
    for spread in (0.005, 0.01, 0.02):
        looking_again(spread)
    steps_as_samples()
    drift()


def pairs(num_pairs: int, spread: float) -> Any:
    """Return log ratios of pairs of equal systems with this run-to-run variation."""
    return rng.normal(0, math.sqrt(2) * spread, (NUM, num_pairs))


def decided(ratios: Any) -> Any:
    return verdicts(comparison.of_pairs(ratios, **TEST), **TEST)


def share(called: Any, *those: Verdict) -> str:
    return f"{np.isin(called, those).mean():.1%}"


def looking_again(spread: float) -> None:
    """Print the verdicts on equal systems after 4 pairs and then the reported further pairs, or one by one."""
    ratios = pairs(400, spread)
    first = decided(ratios[:, :4])
    last = first.copy()
    for place in np.flatnonzero(first == Verdict.undecided):
        needed = comparison.num_needed(float(np.std(ratios[place, :4], ddof=1)), **TEST) or 400
        last[place] = decided(ratios[place : place + 1, : min(needed, 400)])[0]
    print(
        f"equal systems, spread {spread:.1%}: 4 pairs: {share(first, *SIGNIFICANT)} called different, "
        f"{share(first, Verdict.undecided)} undecided; with the reported number of pairs: "
        f"{share(last, *SIGNIFICANT)} different, "
        f"{share(last, Verdict.undecided)} undecided; {one_by_one(ratios)} different if tested after every pair"
    )


def one_by_one(ratios: Any) -> str:
    """Return how often a difference is called somewhere from 3 pairs to 20."""
    looks = [np.isin(decided(ratios[:, :num_pairs]), SIGNIFICANT) for num_pairs in range(3, 21)]
    return f"{np.any(looks, axis=0).mean():.1%}"


def steps_as_samples() -> None:
    """One run each of equal systems, with a spread of 0.5 % between runs and of 1 % between the 100 steps of a run."""
    first, second = (rng.normal(0, 0.005, (4000, 1)) + rng.normal(0, 0.01, (4000, 100)) for _ in range(2))
    wrong = (stats.ttest_ind(first, second, axis=1).pvalue < 0.05).mean()
    print(f"one run each of equal systems, 100 steps used as samples: called different in {wrong:.0%}")


def drift() -> None:
    """The machine gets 2 % slower over twelve runs with a spread of 0.3 %: six of each system, in two orders."""
    times = rng.normal(0, 0.003, (4000, 12)) + np.linspace(0, -0.02, 12)
    orders: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        "AAAAAABBBBBB": (range(6), range(6, 12)),
        "ABBAABBAABBA": ((0, 3, 4, 7, 8, 11), (1, 2, 5, 6, 9, 10)),
    }
    for name, (a, b) in orders.items():
        for difference in (0.0, 0.01):
            first, second = times[:, a] + math.log1p(difference), times[:, b]
            unpaired = verdicts(comparison.of_sets(first, second, **TEST), **TEST)
            by_turns = f", paired in {share(decided(first - second), *SIGNIFICANT)}" if name.startswith("ABB") else ""
            print(f"{name}, difference {difference:.0%}: called different in {share(unpaired, *SIGNIFICANT)}{by_turns}")


if __name__ == "__main__":
    main()
