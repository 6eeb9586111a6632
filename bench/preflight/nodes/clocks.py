"""Judge the clocks of the nodes: lower bounds on how much they differ.

Ranks start at different times, so their times cannot be compared directly. Instead, each node reads its clock before
and after an event whose time is known on a clock that all nodes share, which gives an upper and a lower bound.
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
"""The resolution of file times: Linux uses its timer tick, and some file systems store whole seconds."""


class Bounds(NamedTuple):
    """How far a clock is ahead of the shared clock: at least low, at most high."""

    low_ms: float
    high_ms: float


def clocks(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes whose clocks differ from the others by more than a second for certain.

    The health check has the tightest bounds, from collectives; without it, file times in the run folder are used. A
    node whose facts have a later time than the clock of this host, which reads them, is ahead of this host.
    """
    bounds = _by_collectives(facts) or _by_files(facts)
    skewed = dict(_skewed(bounds))
    for rank in facts.ranks:
        ahead_ms = rank.time_ms - facts.read_ms
        if rank.machine is not None and ahead_ms > MAX_SKEW_MS and rank.node not in skewed:
            skewed[rank.node] = f"at least {ahead_ms / 1000:,.1f} s ahead of the clock of {socket.gethostname()}"
    for node, difference in skewed.items():
        yield broken("HW-06", f"the clock of this node is {difference}", node, severity="warning")


def _skewed(bounds: dict[str, Bounds]) -> Iterator[tuple[str, str]]:
    """Yield the nodes that differ from the reference node, which is the first of those that most others agree with."""
    if not bounds:
        return
    reference = min(
        bounds, key=lambda node: sum(abs(_ahead_ms(bounds[node], other)) > MAX_SKEW_MS for other in bounds.values())
    )
    for node, own in bounds.items():
        ahead_ms = _ahead_ms(own, bounds[reference])
        if abs(ahead_ms) > MAX_SKEW_MS:
            side = "ahead of" if ahead_ms > 0 else "behind"
            yield node, f"at least {abs(ahead_ms) / 1000:,.1f} s {side} the clock of {reference}"


def _ahead_ms(own: Bounds, other: Bounds) -> float:
    """Return the least difference between two clocks, negative if `own` is behind; 0 if the bounds overlap."""
    return max(own.low_ms - other.high_ms, 0) - max(other.low_ms - own.high_ms, 0)


def _by_collectives(facts: Facts) -> dict[str, Bounds]:
    """Return bounds relative to rank 0's clock from health.json: a barrier is between two readings of each clock."""
    nodes = facts.health.nodes if facts.health else ()
    return {node.node: Bounds(0, 0) if 0 in node.ranks else Bounds(*node.clock_ms) for node in nodes}


def _by_files(facts: Facts) -> dict[str, Bounds]:
    """Return bounds relative to the file system's clock from the modification times of files in the run folder.

    With NFS the file server sets these times. With Lustre or a local disk the node itself sets them; then the bounds
    include 0 and no node is reported.
    """
    times = {node: machine.results.clock for node, machine in facts.machines.items()}
    return {node: _bounds(time) for node, time in times.items() if time is not None}


def _bounds(time: FileTime) -> Bounds:
    coarse_ms = TICK_MS if time.file_ms % WHOLE_SECOND_MS else WHOLE_SECOND_MS
    return Bounds(time.before_ms - time.file_ms - coarse_ms, time.after_ms - time.file_ms)
