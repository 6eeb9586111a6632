"""What is wrong with the ranks: how many there are, what they run in, what they can reach, when it is for them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contract.node_facts import RankFacts
from bench.contract.plan import Plan, expanded
from bench.contract.schema import Runtime
from bench.images import store
from bench.preflight.host import MIN_FREE_MIB
from bench.preflight.nodes.load import Facts, grouped, listed
from bench.rules.check import Finding, broken

MAX_SKEW_MS = 1000


def world(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield whether the ranks are not one world of the planned size, with each rank once."""
    want, there = plan.world.num_ranks, {rank.rank for rank in facts.ranks}
    for size, nodes in grouped((rank.world_size, rank.node) for rank in facts.ranks).items():
        if size != want:
            what = f"ranks were started as a world of {size}, and the plan is for {want}"
            what += ": each takes itself for rank 0" if size == 1 else ""
            yield broken("NCC-05", what, listed(nodes))
    if missing := sorted(set(range(want)) - there):
        what = f"no word from {len(missing)} of {want} ranks: {_ranges(missing)}"
        fix = (
            "read what they printed in the job's output; if nothing, put LOGDIR on a file system that every node shares"
        )
        yield broken("NCC-05", what, facts.folder, fix=fix)


def image(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes whose ranks are not in the container, or in another image than was asked for."""
    container = plan.config.container
    if container.runtime is not Runtime.pyxis:
        return
    if outside := [rank.node for rank in facts.ranks if not rank.software.in_enroot]:
        yield broken("PYX-03", "ranks run on the host, outside of any Enroot container", listed(outside))
    path = expanded(container.image)
    record = store.recorded(Path(path)) if path and path.endswith(".sqsh") else None
    if record is None or record.marker is None:
        return
    for said, nodes in grouped(
        (rank.software.image, rank.node) for rank in facts.ranks if rank.software.in_enroot
    ).items():
        if _marker(said) != record.marker:
            what = f"ranks run in {_name(said)}, and asked for was {_name(json.dumps(record.marker))}"
            yield broken("PYX-03", what, listed(nodes), fix="give --container-name the job id, and remove older ones")


def versions(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield in what the software of the ranks differs."""
    in_container = plan.config.container.runtime is Runtime.pyxis
    names = sorted({name for rank in facts.ranks for name in rank.software.packages})
    found = {"image": grouped((_name(rank.software.image), rank.node) for rank in facts.ranks)}
    found["system"] = grouped((str(rank.software.system), rank.node) for rank in facts.ranks)
    found["python"] = grouped((rank.software.python, rank.node) for rank in facts.ranks)
    found |= {
        name: grouped((rank.software.packages.get(name, "none"), rank.node) for rank in facts.ranks) for name in names
    }
    differing = {name: groups for name, groups in found.items() if len(groups) > 1}
    if differing:
        what = "; ".join(
            f"{name} is {', '.join(f'{value} on {listed(nodes)}' for value, nodes in groups.items())}"
            for name, groups in differing.items()
        )
        odd = [node for groups in differing.values() for nodes in list(groups.values())[1:] for node in nodes]
        fix = None if in_container else "let every node have the same environment: a shared one, or a container"
        yield broken(
            "PYX-03" if in_container else "RUN-08", f"not all ranks run the same: {what}", listed(odd), fix=fix
        )


def environment(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the variables that have another value in the container than the plan gives them."""
    if plan.config.container.runtime is not Runtime.pyxis:
        return
    for names, nodes in grouped((rank.not_as_planned, rank.node) for rank in facts.ranks).items():
        if names:
            what = f"{', '.join(names)}: not what the plan sets"
            yield broken("PYX-09", what, listed(nodes), severity="warning")


def paths(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield what nodes need and do not have, and what only some of them have."""
    every = [(node, path) for node, machine in facts.machines.items() for path in machine.paths]
    for (what, path), _ in grouped(((path.what, path.path), node) for node, path in every).items():
        seen = [(node, reached) for node, reached in every if (reached.what, reached.path) == (what, path)]
        missing = [node for node, reached in seen if not reached.exists]
        if not missing or (len(missing) == len(seen) and not seen[0][1].required):
            continue
        rule, where = "PYX-07" if what == "a mount" else "CFG-06", f"{path or what} on {listed(missing)}"
        if len(missing) == len(seen):
            yield broken(rule, f"{what} is not there on any node", where)
        else:
            fix = "put it on a file system that every node sees, at the same path"
            yield broken(
                rule, f"{what} is there on {len(seen) - len(missing)} of {len(seen)} nodes only", where, fix=fix
            )


def results(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes that cannot write into the run folder, or that have little room there."""
    for node, machine in facts.machines.items():
        there, where = machine.results, f"{machine.results.path} on {node}"
        if there.refused is not None:
            yield broken("CFG-08", f"results cannot be written: {there.refused}", where)
        elif there.free_mib < MIN_FREE_MIB:
            yield broken("CFG-08", f"{there.free_mib} MiB free, and a run needs {MIN_FREE_MIB}", where)


def clocks(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes whose clocks certainly are more than a second away from rank 0's.

    Ranks start at different times, so times in facts/ prove nothing. `jobs.node_checks.health` gives bounds: the moment of a collective lies,
    on each clock, between going in and coming out.
    """
    for node in facts.health.nodes if facts.health else ():
        low, high = node.clock_ms
        apart = max(low, -high)  # the bound that is nearer to zero; negative when zero lies between them
        if apart > MAX_SKEW_MS:
            side = "ahead of" if low > 0 else "behind"
            what = f"its clock is at least {apart / 1000:.1f} s {side} that of rank 0's node, and logs of both are compared"
            fix = "have its time synchronised (chronyc tracking, timedatectl)"
            yield broken("CFG-08", what, node.node, fix=fix, severity="warning")


def health(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield what jobs.node_checks.health measured to be below a floor."""
    for found in facts.health.findings if facts.health else ():
        yield broken(found.rule, found.what, found.where, fix=found.fix)


def _marker(said: str | None) -> Any:
    """Return what an image says of itself, or None where it does not."""
    with suppress(ValueError):
        return json.loads(said or "")
    return None


def _name(said: str | None) -> str:
    marker = _marker(said)
    if isinstance(marker, dict) and "name" in marker:
        return f"{marker['name']} of commit {marker.get('commit', '?')}"
    return said or "an image that does not say which"


def _ranges(numbers: list[int]) -> str:
    """Return `0, 4-7` for 0, 4, 5, 6, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def ranks_of(facts: Facts, node: str) -> list[RankFacts]:
    """Return the ranks of a node."""
    return [rank for rank in facts.ranks if rank.node == node]
