"""The verdict of a search, with its confidences, for each kind of slow part: golden_verdicts.txt.

After a change on purpose, run it once with WRITE_VERDICTS=1, and read the difference.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import golden
from jobs.node_checks import culprit
from jobs.node_checks.culprit import Measurements, Pair, Verdict

GOLDEN = Path(__file__).with_name("golden_verdicts.txt")
SHAPES = ((2, 1), (2, 2), (3, 1), (4, 2), (5, 1), (6, 3), (9, 2))
"""Numbers of nodes and of rails."""
SLOW = {
    "nothing": [],
    "GPU 0 of node 1 alone": [("gemm", 1, 0)],
    "all GPUs of node 1 alone": [("gemm", 1, None)],
    "inside node 0": [("inside", 0, None)],
    "inside node 1, and its rail 0": [("inside", 1, None), ("node", 1, 0)],
    "inside node 1, and all its rails": [("inside", 1, None), ("node", 1, None)],
    "rail 0 of node 1": [("node", 1, 0)],
    "all rails of node 1": [("node", 1, None)],
    "rail 0": [("rail", None, 0)],
    "rail 0 of the link from node 0 to 1": [("link", 0, 0)],
    "rail 0 of nodes 0 and 2": [("node", 0, 0), ("node", 2, 0)],
    "GPU 0 of node 1 alone, and its rail": [("gemm", 1, 0), ("node", 1, 0)],
    "GPU 0 of node 1 alone, and rail 0 of node 0": [("gemm", 1, 0), ("node", 0, 0)],
}


def measured(num_nodes: int, num_rails: int, slow: list[tuple[str, int, int | None]], factor: float) -> Measurements:
    """Return rates of 100 with 1 % noise between parts and between samples; those of slow parts are `factor` of it."""
    random = np.random.default_rng(num_nodes * 100 + num_rails)

    def rates(*shape: int) -> Any:
        noise = 0.01 * random.standard_normal((*shape, 5)) + 0.01 * random.standard_normal((*shape, 1))
        return 100 * np.exp(noise)

    gemm, inside = rates(num_nodes, num_rails), rates(num_nodes)
    played = [pair for round_ in culprit.rounds(num_nodes) for pair in round_]
    between = [Pair(pair, rates(num_rails)) for pair in played]
    for what, node, rail in slow:
        rails = slice(None) if rail is None else rail
        if what == "gemm":
            gemm[node, rails] *= factor
        if what == "inside":
            inside[node] *= factor
        for pair in between:
            is_link = what == "link" and set(pair.nodes) == {0, 1}
            if what == "rail" or is_link or (what == "node" and node in pair.nodes):
                pair.rates[rails] *= factor
    return Measurements(
        {"GEMM": gemm, "copy": rates(num_nodes, num_rails)},
        inside if num_rails > 1 else None,
        num_nodes,
        num_rails,
        between,
    )


def uncertainty(confidence: float) -> str:
    """Return 1 - confidence, which shows small differences of high confidences."""
    return f"{1 - confidence:.2g}" if confidence < 1 - 1e-7 else "0"


def shown(verdict: Verdict, num_rounds: int) -> str:
    parts = [
        f"{one.kind} of {'-'.join(map(str, one.nodes)) or 'all'}{'' if one.rail is None else f' on {one.rail}'} "
        f"(uncertainty {uncertainty(one.confidence)})"
        for one in verdict.culprits
    ]
    state = ("settled" if verdict.is_settled else "decided") if verdict.decided else "undecided"
    uncertainties = f"uncertainties {uncertainty(verdict.confidence)}, {uncertainty(verdict.rest)}"
    return f"{state} after {num_rounds} rounds, {uncertainties}: {', '.join(parts) or 'nothing'}"


def searched(whole: Measurements) -> tuple[Verdict, int]:
    left = [*whole.pairs]
    return culprit.searched(replace(whole, pairs=[]), lambda pairs: [left.pop(0) for _ in pairs])


@pytest.mark.long
def test_the_verdicts_on_clusters_with_a_slow_part() -> None:
    lines = []
    for num_nodes, num_rails in SHAPES:
        lines.append(f"{num_nodes} nodes, {num_rails} rails")
        for name, slow in SLOW.items():
            is_of_rails = any(what in ("inside", "rail") or rail is None for what, _, rail in slow)
            if (num_nodes == 2 and name == "rail 0 of nodes 0 and 2") or (num_rails == 1 and is_of_rails):
                continue
            for factor in (0.93, 0.6) if slow else (1.0,):
                verdict = shown(*searched(measured(num_nodes, num_rails, slow, factor)))
                lines.append(f"  {name}, {factor:.0%}: {verdict}")
    golden.require("\n".join(lines) + "\n", GOLDEN, variable="WRITE_VERDICTS")


@pytest.mark.parametrize(
    ("num_nodes", "rounds"),
    [
        (2, "01, 01"),
        (3, "01, 12, 20, 01"),
        (4, "01 23, 12 30, 02 13, 01 23"),
        (5, "01 23, 12 34, 40, 03 24, 01 23, 02 13"),
        (6, "01 23 45, 12 34 50, 03 24 15, 01 23 45, 04 35 12, 12 34 50"),
    ],
)
def test_the_pairs_of_each_round(num_nodes: int, rounds: str) -> None:
    played = [" ".join(f"{a}{b}" for a, b in pairs) for pairs in culprit.rounds(num_nodes)]
    assert ", ".join(played) == rounds
