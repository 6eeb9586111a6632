"""Find measured rates below their floors and the slow nodes; print the table of all rates."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.contract.node_facts import (
    BELOW_FLOOR,
    HEALTHY,
    NOT_JUDGED,
    AllReduceRate,
    Health,
    HealthFinding,
    RankRates,
    Search,
    SlowPart,
)

_LOOK_AT = {
    "gpu": "nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC",
    "host": "nvidia-smi topo -m` and `nvidia-smi nvlink -s",
    "nic": "ibstat",
    "link": "ibdiagnet",
    "rail": "ibdiagnet",
}
"""By kind of SlowPart: the command that shows more."""
MAX_PAIRS = 40
_RANK_RATES = {
    "gemm_tflops": ("TFLOP/s of a GEMM", "nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE"),
    "copy_gbs": ("GB/s of a memory copy", "nvidia-smi -q -d ECC,CLOCK"),
}
"""By field of RankRates: its name in messages, and the command that shows more."""


class _Below(NamedTuple):
    """A finding, and the node that causes it, if it is a single one."""

    finding: HealthFinding
    node: str | None


def judged(report: Health) -> Health:
    """Return the report with its verdict, its findings and the nodes to exclude."""
    below = [*_ranks(report), *_nodes(report), *_all(report)]
    floors = report.floors
    has_floors = any(f is not None for f in (floors.busbw_gbs, floors.node_busbw_gbs, *_rank_floors(report).values()))
    slow = dict.fromkeys([*(one.node for one in below if one.node), *(report.search.excluded if report.search else ())])
    all_are = len(slow) == len(report.nodes) > 1  # then no single node is the cause
    return replace(
        report,
        verdict=BELOW_FLOOR if below else HEALTHY if has_floors else NOT_JUDGED,
        findings=tuple(one.finding for one in below),
        slow_nodes=() if all_are else tuple(slow),
    )


def best_gbs(rates: Sequence[AllReduceRate]) -> float | None:
    """Return the bus bandwidth of the best message size; None if none was measured, as on a single rank."""
    return max((rate.busbw_gbs for rate in rates), default=None)


def is_below(report: Health) -> bool:
    """Return whether the bus bandwidth of all ranks together is below its floor."""
    return _below(best_gbs(report.allreduce), report.floors.busbw_gbs)


def table(report: Health) -> str:
    """Return a text table with the rates of all nodes and their floors."""
    floors = report.floors
    sizes = "   ".join(f"{rate.mib} MiB {_number(rate.busbw_gbs)}" for rate in report.allreduce)
    rows = [["node", "all-reduce GB/s", "GEMM TFLOP/s", "copy GB/s", "clock offset ms"]]
    for node in report.nodes:
        ranks = [rank for rank in report.ranks if rank.node == node.node]
        rates = (_span([getattr(rank, key) for rank in ranks]) for key in _RANK_RATES)
        rows.append([node.node, _span([best_gbs(node.allreduce)]), *rates, _span(node.clock_ms)])
    lowest = [floors.node_busbw_gbs, *_rank_floors(report).values()]
    rows.append(["floor", *(_span([floor]) for floor in lowest), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    body = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(
        [
            f"{report.verdict}: nodes {len(report.nodes)}, ranks {len(report.ranks)}, "
            f"{report.dtype} over {report.backend}, measured in {report.seconds:.0f} s",
            f"all-reduce of all ranks, GB/s: {sizes or '-'}   floor {_span([floors.busbw_gbs])}",
            *body,
            *(f"pair {' '.join(pair.nodes)}: {_number(pair.busbw_gbs)} GB/s" for pair in report.pairs[:MAX_PAIRS]),
            *(
                [f"{len(report.pairs) - MAX_PAIRS} more pairs: see health.json"]
                if len(report.pairs) > MAX_PAIRS
                else []
            ),
            *([_verdict(report.search)] if report.search else []),
        ]
    )


def _rank_floors(report: Health) -> dict[str, float | None]:
    return {key: getattr(report.floors, key) for key in _RANK_RATES}


def _ranks(report: Health) -> Iterator[_Below]:
    """Yield one finding for each node with slow ranks, about the slowest of them."""
    for key, floor in _rank_floors(report).items():
        if floor is None:
            continue
        slow: dict[str, list[RankRates]] = {}
        for rank in report.ranks:
            if _below(getattr(rank, key), floor):
                slow.setdefault(rank.node, []).append(rank)
        are_all = len(slow) == len(report.nodes) > 1
        for node, ranks in slow.items():
            yield _slow_ranks(key, node, ranks, floor=floor, are_all=are_all)


def _slow_ranks(key: str, node: str, ranks: list[RankRates], *, floor: float, are_all: bool) -> _Below:
    """Return the finding about a node's slow ranks; are_all: no node reaches the floor."""
    words, command = _RANK_RATES[key]
    worst = min(ranks, key=lambda rank: getattr(rank, key))
    lowest = _number(getattr(worst, key))
    what = (
        f"{len(ranks)} ranks of this node reach less than the floor of {_number(floor)} {words}; the lowest: {lowest}"
    )
    fix = f"{_exclude([node])}, and run `{command}` there"
    if are_all:
        fix = f"no node reaches the floor: correct cluster.health.{key} for this cluster, or run `{command}` on a node"
    return _Below(HealthFinding("HW-01", what, f"{node}, local rank {worst.local_rank}", fix), node)


def _nodes(report: Health) -> Iterator[_Below]:
    """Yield a finding for each node whose own ranks are below the floor of their bus bandwidth."""
    for node in report.nodes:
        rate, floor = best_gbs(node.allreduce), report.floors.node_busbw_gbs
        if rate is not None and floor is not None and rate < floor:
            what = (
                f"this node's ranks reach {_number(rate)} GB/s all-reduce bus bandwidth; the floor is {_number(floor)}"
            )
            fix = f"{_exclude([node.node])}, and run `nvidia-smi topo -m` and `nvidia-smi nvlink -s` there"
            yield _Below(HealthFinding("NCC-04", what, node.node, fix), node.node)


def _all(report: Health) -> Iterator[_Below]:
    """Yield the finding about all ranks together."""
    if not is_below(report):
        return
    rate, floor = best_gbs(report.allreduce), report.floors.busbw_gbs
    assert rate is not None and floor is not None
    names, result = [node.node for node in report.nodes], report.search
    what = f"all ranks together reach {_number(rate)} GB/s all-reduce bus bandwidth; the floor is {_number(floor)}"
    if result is None:  # several nodes are searched, so this is a single one
        fix = f"{_exclude(names)}, and run `nvidia-smi topo -m` and `nvidia-smi nvlink -s` there"
        yield _Below(HealthFinding("NCC-04", what, names[0], fix), names[0])
        return
    where = ", ".join(dict.fromkeys(node for part in result.parts for node in part.nodes)) or ", ".join(names)
    yield _Below(HealthFinding("NCC-04", f"{what}. {_verdict(result)}", where, _search_fix(result)), None)


def _verdict(result: Search) -> str:
    """Return a sentence about what the search found."""
    rounds = f"after {result.rounds} round{'' if result.rounds == 1 else 's'}"
    if not result.decided:
        candidates = "; suspected: " + ", ".join(map(_words, result.parts)) if result.parts else ""
        return f"The measurements do not show what is slow, {rounds}{candidates}"
    if not result.parts:
        return f"No node and no link is slower than the others, {rounds}: the network is slow, or the floor too high"
    parts = ", ".join(f"{_words(part)} (confidence {_percent(part.confidence)})" for part in result.parts)
    others = ""
    if result.others_busbw_gbs is not None:
        others = f"; without {', '.join(result.excluded)}, the others reach {_number(result.others_busbw_gbs)} GB/s"
    return f"Slow, {rounds}: {parts}{others}"


def _words(part: SlowPart) -> str:
    nodes = " and ".join(part.nodes)
    at = "" if part.rail is None else f" of local rank {part.rail}"
    return {
        "gpu": f"the GPU{at} on {nodes}",
        "host": f"the host {nodes}",
        "nic": f"the network adapter{at} on {nodes}",
        "link": f"the connection between {nodes}" + ("" if part.rail is None else f" for local rank {part.rail}"),
        "rail": f"the rail{at} on all nodes",
    }[part.kind]


def _percent(share: float) -> str:
    return "above 99.9 %" if share > 0.999 else f"{100 * share:.1f} %"


def _search_fix(result: Search) -> str:
    """Return what to do about what the search found."""
    if not result.decided:
        return "run the check again while no other job uses the network, or with more nodes"
    if not result.parts:
        return "check the shared network and cluster.health.busbw_gbs; NCCL_DEBUG=INFO shows if NCCL uses InfiniBand"
    look = " and ".join(dict.fromkeys(f"`{_LOOK_AT[part.kind]}`" for part in result.parts))
    if result.excluded:
        one_end = ", which is one end of the connection" if [part.kind for part in result.parts] == ["link"] else ""
        return f"{_exclude(result.excluded)}{one_end}, and run {look} there"
    if result.parts[0].kind == "link":
        return f"run the check with a third node to find out which node is slow, or run {look}"
    return f"check the switch of this rail: run {look}"


def _exclude(nodes: Sequence[str]) -> str:
    return f"exclude {'the nodes' if len(nodes) > 1 else 'the node'} (--exclude={','.join(nodes)})"


def _below(rate: float | None, floor: float | None) -> bool:
    return rate is not None and floor is not None and rate < floor


def _span(values: Sequence[float | None]) -> str:
    """Return `low` or `low to high`; `-` if nothing was measured or set."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = _number(min(known)), _number(max(known))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Return three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
