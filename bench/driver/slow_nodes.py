"""Leave out slow and lost nodes (launch.replace_slow), and choose those that the trials use.

left_out.json keeps the nodes that were left out. `.nodes` passes names to the batch script, `.spares` to the ranks.
"""

import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from bench import masked_json
from bench.contract import node_lists, regular_files, run_files
from bench.contract.node_facts import Health
from bench.contract.plan import Plan
from bench.contract.run_files import LEFT_OUT, SLOW_NODE, SPARE_NODES, USED_NODES
from bench.preflight import nodes

RANK_KILLED = "RUN-02"
"""The rule of a rank that was killed by the system."""


class Chosen(IntEnum):
    """What the batch script does next: the exit code of `replace`."""

    trials = 0
    """Run the trials on the nodes in `.nodes`: they have passed the check."""
    failed = 1
    """End the job: the check failed, and no node is the cause."""
    check_again = 4
    """Check the nodes in `.nodes`: without the slow ones, enough are left."""
    start_again = 5
    """Start the job again without the nodes in `.nodes`, which are slow: without them, too few are left."""


def choose(run: Path, plan: Plan, *, job: str, check_passed: bool) -> Chosen:
    """Write the nodes to use next into `.nodes`, after a node check of all nodes that are not left out."""
    report = nodes.check_result(run / run_files.HEALTH)
    if report is None:
        return Chosen.failed
    names = [node.node for node in report.nodes]
    if check_passed:
        _use(run, plan, names)
        if plan.config.cluster.spare_nodes:  # the nodes of the trials collect theirs again
            for facts in (run / run_files.FACTS).glob("rank_*.json"):
                facts.unlink()
        return Chosen.trials
    slow = [name for name in names if name in report.slow_nodes]
    if not slow:
        return Chosen.failed
    why = {name: _reason(report, name) for name in slow}
    _leave_out(run, why, time_ms=report.time_ms, job=job)
    for name, reason in why.items():
        print(f"{time.strftime('%F %T')} {name} is slow and is left out: {reason}", flush=True)
    for error in run.glob(run_files.rank_error("health", "*")):  # else `why` would blame them for a later failure
        error.unlink()
    (run / run_files.HEALTH).rename(_kept(run))  # the next check writes its own
    left = [name for name in names if name not in slow]
    enough = len(left) >= plan.world.num_nodes
    node_lists.write(run / USED_NODES, left if enough else slow)
    return Chosen.check_again if enough else Chosen.start_again


def use_spare(run: Path, plan: Plan, *, job: str, lost: Sequence[str], why: str) -> Chosen:
    """Write the nodes for the next attempt of a trial into `.nodes`: those that passed the check, without lost ones.

    lost: nodes that failed, whose rank was killed, or whose rank stays slow.
    """
    report = nodes.check_result(run / run_files.HEALTH)
    if report is None:
        return Chosen.failed
    entries = _leave_out(run, dict.fromkeys(lost, why), time_ms=time.time_ns() // 1_000_000, job=job)
    left = [node.node for node in report.nodes if entries.get(node.node, {}).get("job") != job]
    if len(left) < plan.world.num_nodes:
        return Chosen.failed
    _use(run, plan, left)
    return Chosen.trials


def leave_out(run: Path, *, job: str, is_check: bool, killed_on: str | None) -> str | None:
    """Record the node that the next attempt leaves out, and return why; None if no spare is left, or no node is named.

    For drivers without srun, whose backend wrote `.spares`. is_check: the node check failed. Otherwise the ranks of a
    trial have named a slow node, or a rank was killed on a node.
    """
    spares = node_lists.names(run / SPARE_NODES)
    text = regular_files.read_text(run / SLOW_NODE) if (run / SLOW_NODE).exists() else ""
    slow, _, why = text.strip().partition("\n")
    lost = {}
    if is_check:
        report = nodes.check_result(run / run_files.HEALTH)
        lost = {name: _reason(report, name) for name in report.slow_nodes} if report is not None else {}
    elif slow:
        lost = {slow: why}
    elif killed_on is not None:
        lost = {killed_on: f"{RANK_KILLED}: a rank was killed on {killed_on}"}
    if not 0 < len(lost) <= len(spares):
        return None
    _leave_out(run, lost, time_ms=time.time_ns() // 1_000_000, job=job)
    if is_check:
        (run / run_files.HEALTH).rename(_kept(run))  # the next check writes its own
    return "; ".join(lost.values())


def _kept(run: Path) -> Path:
    """Return the file to which a check that found slow nodes is moved; the history of the nodes reads it."""
    paths = (run / run_files.health(f"_before_{number}") for number in range(1, 10_000))
    return next(path for path in paths if not path.exists())


def _reason(report: Health, name: str) -> str:
    """Return the first finding about a slow node; without one, the first finding about all of them."""
    about = [one for one in report.findings if name in one.where.split(", ")]
    finding = next(iter(about or report.findings), None)
    return f"{finding.rule}: {finding.what}" if finding else "slow"


def _leave_out(run: Path, why: Mapping[str, str], *, time_ms: int, job: str) -> dict[str, dict[str, Any]]:
    """Add nodes to left_out.json, each with the reason; return its content."""
    added = {name: {"why": reason, "time_ms": time_ms, "job": job} for name, reason in why.items()}
    entries = node_lists.entries(run) | added
    masked_json.write(run / LEFT_OUT, entries)
    return entries


def _use(run: Path, plan: Plan, names: list[str]) -> None:
    """Use the first of these nodes for the trials; the others are spare, which the ranks must know."""
    needed = plan.world.num_nodes
    node_lists.write(run / USED_NODES, names[:needed])
    node_lists.write(run / SPARE_NODES, names[needed:])
