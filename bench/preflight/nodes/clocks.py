"""Judge the clocks of the nodes: how far they certainly are apart.

Ranks start at different times, so their times alone prove nothing. Bounds do: a node's clock before and after something
whose moment is known on a clock that all nodes share.
"""

import socket
from collections.abc import Iterator
from typing import NamedTuple

from bench.contract.node_facts import FileTime
from bench.contract.plan import Plan
from bench.preflight.nodes.load import Facts
from bench.rules.check import Finding, broken

MAX_SKEW_MS = 1000
TICK_MS, WHOLE_SECOND_MS = 10, 1000
"""How coarse the times of files are: Linux takes those of its timer tick, and some file systems have whole seconds."""


class Bounds(NamedTuple):
    """How far a clock is ahead of one that all nodes share: at least low, at most high."""

    low_ms: float
    high_ms: float


def clocks(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes whose clocks certainly are more than a second away from the others.

    The health check has the sharpest bounds, from collectives; without one the times of files in the run folder serve.
    A node whose facts were written later than this host reads them is ahead of this host in any case.
    """
    bounds = _by_collectives(facts) or _by_files(facts)
    apart = dict(_apart(bounds))
    for rank in facts.ranks:
        ahead_ms = rank.time_ms - facts.read_ms
        if rank.machine is not None and ahead_ms > MAX_SKEW_MS and rank.node not in apart:
            apart[rank.node] = f"at least {ahead_ms / 1000:,.1f} s ahead of that of {socket.gethostname()}"
    for node, how in apart.items():
        yield broken("HW-06", f"its clock is {how}", node, severity="warning")


def _apart(bounds: dict[str, Bounds]) -> Iterator[tuple[str, str]]:
    """Yield the nodes that differ from the one that agrees with most others, the first of these, and how."""
    if not bounds:
        return
    reference = min(
        bounds, key=lambda node: sum(abs(_ahead_ms(bounds[node], other)) > MAX_SKEW_MS for other in bounds.values())
    )
    for node, own in bounds.items():
        ahead_ms = _ahead_ms(own, bounds[reference])
        if abs(ahead_ms) > MAX_SKEW_MS:
            side = "ahead of" if ahead_ms > 0 else "behind"
            yield node, f"at least {abs(ahead_ms) / 1000:,.1f} s {side} that of {reference}"


def _ahead_ms(own: Bounds, other: Bounds) -> float:
    """Return how far one clock certainly is ahead of another, negative if it is behind; 0 where the bounds meet."""
    return max(own.low_ms - other.high_ms, 0) - max(other.low_ms - own.high_ms, 0)


def _by_collectives(facts: Facts) -> dict[str, Bounds]:
    """Return the bounds from health.json, against rank 0's clock: the moment of a barrier lies between two readings."""
    nodes = facts.health.nodes if facts.health else ()
    return {node.node: Bounds(0, 0) if 0 in node.ranks else Bounds(*node.clock_ms) for node in nodes}


def _by_files(facts: Facts) -> dict[str, Bounds]:
    """Return the bounds from the times that files got in the run folder, against the file system's clock.

    A file server gives them (NFS). Where the node itself does (Lustre, a local disk), they agree with its clock, the
    bounds hold 0, and nothing is claimed.
    """
    times = {node: machine.results.clock for node, machine in facts.machines.items()}
    return {node: _bounds(time) for node, time in times.items() if time is not None}


def _bounds(time: FileTime) -> Bounds:
    coarse_ms = TICK_MS if time.file_ms % WHOLE_SECOND_MS else WHOLE_SECOND_MS
    return Bounds(time.before_ms - time.file_ms - coarse_ms, time.after_ms - time.file_ms)
