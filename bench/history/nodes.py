"""The history of each node: what all runs found out about it, and the nodes that new runs should leave out."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.contract.schema import Cluster
from bench.history import store
from bench.history.node_verdicts import NodeVerdict, VerdictKind, title
from bench.planning import avoided_nodes
from bench.runs import names


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """What all runs found out about one node."""

    node: str
    backend: str
    runs: tuple[Path, ...]
    """The oldest first."""
    verdicts: tuple[tuple[Path, NodeVerdict], ...]
    """Each with its run, the oldest first."""

    def select(self, kind: VerdictKind) -> list[tuple[Path, NodeVerdict]]:
        """Return the verdicts of one kind."""
        return [(run, one) for run, one in self.verdicts if one.kind is kind]

    @property
    def last_seen_ms(self) -> int:
        return max(one.time_ms for _, one in self.verdicts)

    @property
    def bad(self) -> tuple[Path, NodeVerdict] | None:
        """The newest finding against the node; None if there is none, or if the node has passed a check since."""
        passed_ms = max((one.time_ms for _, one in self.select(VerdictKind.passed)), default=0)
        findings = [(run, one) for run, one in self.verdicts if one.kind.is_bad and one.time_ms > passed_ms]
        return findings[-1] if findings else None

    def is_bad(self, *, since_ms: float) -> bool:
        """Return whether the newest finding against the node is not older than a time."""
        return self.bad is not None and self.bad[1].time_ms >= since_ms


def histories(verdicts_by_run: Mapping[Path, Iterable[NodeVerdict]]) -> list[NodeHistory]:
    """Return the history of each node, from the verdicts of all runs; the nodes found bad come first."""
    groups: dict[tuple[str, str], list[tuple[Path, NodeVerdict]]] = {}
    for run, verdicts in verdicts_by_run.items():
        for one in verdicts:
            groups.setdefault((one.backend, one.node), []).append((run, one))
    every = []
    for (backend, node), of_node in groups.items():
        of_node.sort(key=lambda pair: pair[1].time_ms)
        runs = tuple(dict.fromkeys(run for run, _ in of_node))
        every.append(NodeHistory(node=node, backend=backend, runs=runs, verdicts=tuple(of_node)))
    return sorted(every, key=lambda one: (one.bad is None, one.backend, one.node))


def bad(cluster: Cluster, root: Path | None = None, *, now_s: float | None = None) -> dict[str, str]:
    """Return the nodes of a cluster's backend that were found bad within cluster.avoid_within, each with the reason.

    root: the folder of runs, by default LOGDIR; if it does not exist, no node is bad.
    """
    folder = root or names.root()
    if not folder.is_dir():
        return {}
    within_s = avoided_nodes.seconds(cluster.avoid_within, where="cluster.avoid_within")
    since_ms = ((time.time() if now_s is None else now_s) - within_s) * 1000
    every = histories(store.node_verdicts(folder))
    of_backend = (one for one in every if one.backend == cluster.backend.name)
    return {one.node: reason(one) for one in of_backend if one.is_bad(since_ms=since_ms)}


def reason(history: NodeHistory) -> str:
    """Return why a node is bad: what was found, when and in which run."""
    assert history.bad is not None
    run, verdict = history.bad
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(verdict.time_ms / 1000))
    what = "slow" if verdict.kind is VerdictKind.slow else "failed"
    words = title(verdict.rule)
    rule = f" ({verdict.rule}{f': {words}' if words else ''})" if verdict.rule else ""
    return f"{what} on {day}{rule} in {run.name}"
