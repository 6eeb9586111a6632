"""The history of nodes from verdicts, by hand: the order of the nodes, and which findings still count."""

from pathlib import Path

from bench.history.node_verdicts import NodeVerdict, VerdictKind
from bench.history.nodes import histories


def verdict(node: str, kind: VerdictKind, time_ms: int, backend: str = "slurm") -> NodeVerdict:
    return NodeVerdict(node=node, backend=backend, kind=kind, time_ms=time_ms, rule=None, what="")


def test_a_finding_counts_until_the_node_passes_a_later_check() -> None:
    runs = [Path("one"), Path("two"), Path("three")]
    slow, passed = VerdictKind.slow, VerdictKind.passed
    every = histories(
        {
            runs[0]: [verdict("c", passed, 5), verdict("a", slow, 7), verdict("b", slow, 9), verdict("d", slow, 0)],
            runs[1]: [verdict("a", passed, 8), verdict("b", passed, 9), verdict("c", slow, 6), verdict("c", slow, 20)],
            runs[2]: [verdict("c", slow, 12), verdict("a", slow, 3, "ray"), verdict("d", slow, 1)],
        }
    )
    bad = {(one.backend, one.node): one.bad and (one.bad[0].name, one.bad[1].time_ms) for one in every}
    assert list(bad.items()) == [
        (("ray", "a"), ("three", 3)),
        (("slurm", "c"), ("two", 20)),
        (("slurm", "d"), ("three", 1)),
        (("slurm", "a"), None),
        (("slurm", "b"), None),
    ]
    c = next(one for one in every if one.node == "c")
    assert [each.time_ms for _, each in c.verdicts] == [5, 6, 12, 20] and c.last_seen_ms == 20
    assert [run.name for run in c.runs] == ["one", "two", "three"]
    assert [each.time_ms for _, each in c.select(slow)] == [6, 12, 20]
    assert (c.is_bad(since_ms=20), c.is_bad(since_ms=20.5), every[-1].is_bad(since_ms=0)) == (True, False, False)
