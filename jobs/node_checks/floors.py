"""Which of the measured rates are below a floor, whose fault that is, and the table of it all."""

from collections.abc import Iterator, Sequence
from typing import Any

SLOW = 0.8
"""A node is slow with every partner if its best pair is below the floor, and below this share of the best of all pairs."""
_RANK_RATES = {
    "gemm_tflops": ("TFLOP/s of a matrix product", "nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE"),
    "copy_gbs": ("GB/s of a memory copy", "nvidia-smi -q -d ECC,CLOCK"),
}


def judged(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with its verdict, its findings and the nodes to leave out."""
    findings = [*_ranks(report), *_nodes(report), *_all(report)]
    compared = any(floor is not None for floor in report["floors"].values())
    slow = dict.fromkeys([*(f["node"] for f in findings if f["node"]), *_slow_in_pairs(report)])
    all_are = len(slow) == len(report["nodes"]) > 1  # then none of them is to blame
    return report | {
        "verdict": "below a floor" if findings else "healthy" if compared else "not judged: no floors",
        "findings": [{key: f[key] for key in ("rule", "what", "where", "fix")} for f in findings],
        "slow_nodes": [] if all_are else list(slow),
    }


def best_gbs(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the bus bandwidth of the best message size; None where nothing could be measured, as on a single rank."""
    return max((row["busbw_gbs"] for row in rows), default=None)


def is_below(report: dict[str, Any]) -> bool:
    """Return whether all ranks together stay below the floor of their bus bandwidth."""
    return _below(best_gbs(report["allreduce"]), report["floors"]["busbw_gbs"])


def table(report: dict[str, Any]) -> str:
    """Return what a person wants to see of it."""
    floors = report["floors"]
    sizes = "   ".join(f"{row['mib']} MiB {_number(row['busbw_gbs'])}" for row in report["allreduce"])
    rows = [["node", "all-reduce GB/s", "product TFLOP/s", "copy GB/s", "clock ms"]]
    for node in report["nodes"]:
        ranks = [rank for rank in report["ranks"] if rank["node"] == node["node"]]
        rates = (_span([rank[key] for rank in ranks]) for key in _RANK_RATES)
        rows.append([node["node"], _span([best_gbs(node["allreduce"])]), *rates, _span(node["clock_ms"])])
    rows.append(["floor", *(_span([floors[key]]) for key in ("node_busbw_gbs", *_RANK_RATES)), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    body = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(
        [
            f"{report['verdict']}: nodes {len(report['nodes'])}, ranks {len(report['ranks'])}, "
            f"{report['dtype']} over {report['backend']}, measured in {report['seconds']:.0f} s",
            f"all-reduce of all ranks, GB/s: {sizes or '-'}   floor {_span([floors['busbw_gbs']])}",
            *body,
            *(f"pair {' '.join(pair['nodes'])}: {_number(pair['busbw_gbs'])} GB/s" for pair in report["pairs"]),
        ]
    )


def _ranks(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one finding for each node with ranks that are slow by themselves, about the slowest."""
    for key, (words, look) in _RANK_RATES.items():
        floor = report["floors"][key]
        slow: dict[str, list[dict[str, Any]]] = {}
        for rank in report["ranks"]:
            if _below(rank[key], floor):
                slow.setdefault(rank["node"], []).append(rank)
        for node, ranks in slow.items():
            worst = min(ranks, key=lambda rank: rank[key])
            what = (
                f"{len(ranks)} of its ranks below the floor of {_number(floor)} {words}: down to {_number(worst[key])}"
            )
            fix = f"{_leave_out([node])}; there, `{look}`"
            if len(slow) == len(report["nodes"]) > 1:
                fix = (
                    f"no node reaches it, so see whether cluster.health.{key} is right for this cluster, then `{look}`"
                )
            yield _finding("HW-01", what, f"{node}, local rank {worst['local_rank']}", node, fix)


def _nodes(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for node in report["nodes"]:
        rate, floor = best_gbs(node["allreduce"]), report["floors"]["node_busbw_gbs"]
        if _below(rate, floor):
            what = f"its ranks reach {_number(rate)} GB/s all-reduce bus bandwidth, and the floor is {_number(floor)}"
            fix = f"{_leave_out([node['node']])}; there, `nvidia-smi topo -m` and `nvidia-smi nvlink -s`"
            yield _finding("NCC-04", what, node["node"], node["node"], fix)


def _all(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not is_below(report):
        return
    rate, floor = best_gbs(report["allreduce"]), report["floors"]["busbw_gbs"]
    names, slow = [node["node"] for node in report["nodes"]], _slow_in_pairs(report)
    if slow:
        fix = f"{_leave_out(slow)}; there, `ibstat` and `nvidia-smi nvlink -s`"
    elif report["pairs"]:
        fix = "no node is slower than the others, so look at what they share: NCCL_DEBUG=INFO says whether it uses InfiniBand"
    elif len(names) > 1:
        fix = "two nodes cannot tell which of them it is: run with a third, or each alone; NCCL_DEBUG=INFO names the transport"
    else:
        fix = f"{_leave_out(names)}; there, `nvidia-smi topo -m` and `nvidia-smi nvlink -s`"
    what = f"all ranks together reach {_number(rate)} GB/s all-reduce bus bandwidth, and the floor is {_number(floor)}"
    yield _finding("NCC-04", what, ", ".join(slow or names), names[0] if len(names) == 1 else None, fix)


def _slow_in_pairs(report: dict[str, Any]) -> list[str]:
    """Return the nodes that are slow with every partner, where others are not."""
    reached: dict[str, float] = {}
    for pair in report["pairs"]:
        for node in pair["nodes"]:
            reached[node] = max(reached.get(node, 0.0), pair["busbw_gbs"])
    floor, best = report["floors"]["busbw_gbs"], max(reached.values(), default=0.0)
    return [node for node, rate in reached.items() if rate < min(floor, SLOW * best)]


def _finding(rule: str, what: str, where: str, node: str | None, fix: str) -> dict[str, Any]:
    return {"rule": rule, "what": what, "where": where, "node": node, "fix": fix}


def _leave_out(nodes: Sequence[str]) -> str:
    return f"leave it out (--exclude={','.join(nodes)}) and have it looked at"


def _below(rate: float | None, floor: float | None) -> bool:
    return rate is not None and floor is not None and rate < floor


def _span(values: Sequence[float | None]) -> str:
    """Return `low` or `low to high`, and - for what was not measured or not set."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = _number(min(known)), _number(max(known))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Return three significant digits, and all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
