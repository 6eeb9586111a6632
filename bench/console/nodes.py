"""Show what all runs found out about each node."""

from collections.abc import Sequence
from pathlib import Path
from time import localtime, strftime

from bench.history.node_verdicts import VerdictKind
from bench.history.nodes import NodeHistory, reason
from bench.report.tables import TextTable
from bench.runs.folder import short

_COLUMNS = ("node", "backend", "runs", "checks passed", "slow", "failures", "last seen", "left out", "newest finding")


def nodes_sheet(root: Path, nodes: Sequence[NodeHistory], *, since_ms: float, within: str, are_any: bool) -> TextTable:
    """Return one row for each node, or a sentence if there is none."""
    if not nodes:
        return TextTable(f"nodes of the runs in {short(root)}", [], caption=_why_none(are_any))
    rows = [_row(one, since_ms=since_ms) for one in nodes]
    caption = (
        "Left out: by cluster.avoid=auto, if the newest finding is at most "
        f"{within} old and the node has passed no check since."
    )
    return TextTable(f"nodes of the runs in {short(root)}", rows, _COLUMNS, caption)


def _why_none(are_any: bool) -> str:
    if are_any:
        return "cluster.avoid=auto leaves out none of these nodes"
    return "no run here has used a node: only runs on other machines have nodes (Slurm, Kubernetes, Ray, ssh)"


def _row(node: NodeHistory, *, since_ms: float) -> tuple[str, ...]:
    counts = [len(node.select(kind)) for kind in (VerdictKind.passed, VerdictKind.slow, VerdictKind.failure)]
    last = strftime("%Y-%m-%d %H:%M", localtime(node.last_seen_ms / 1000))
    is_left_out = "yes" if node.is_bad(since_ms=since_ms) else "no"
    newest = reason(node) if node.bad is not None else ""
    return (node.node, node.backend, str(len(node.runs)), *map(str, counts), last, is_left_out, newest)
