"""Judge the ranks: their number, their software environment, and the paths that they can access."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contract.node_facts import RankFacts
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.schema import Runtime
from bench.images import needed, store
from bench.preflight.host import MIN_FREE_MIB
from bench.preflight.nodes.load import Facts, grouped, listed
from bench.rules.check import Finding, broken
from bench.texts import ranges


def world(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield an error if the world size differs from the plan, or ranks are missing."""
    planned, present = plan.world.num_ranks, {rank.rank for rank in facts.ranks}
    for size, nodes in grouped((rank.world_size, rank.node) for rank in facts.ranks).items():
        if size != planned:
            what = f"ranks were started with a world size of {size}, but the plan has {planned} ranks"
            what += ": every process is rank 0" if size == 1 else ""
            yield broken("NCC-05", what, listed(nodes))
    if missing := sorted(set(range(planned)) - present):
        what = f"{len(missing)} of {planned} ranks wrote no file about their node: ranks {ranges(missing)}"
        fix = (
            "read the output of these ranks in the job's log; if there is no output, put LOGDIR on a shared file system"
        )
        yield broken("NCC-05", what, facts.folder, fix=fix)


def image(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes whose ranks run outside the container, in another image, or in one without the engine."""
    container = plan.config.container
    images = grouped((rank.software.image, rank.node) for rank in facts.ranks)
    for image_json, nodes in images.items():
        marker = _marker(image_json)
        yield from needed.of_marker(plan.config, marker if isinstance(marker, dict) else {}, listed(nodes))
    if container.runtime is not Runtime.pyxis:
        return
    if outside := [rank.node for rank in facts.ranks if not rank.software.in_enroot]:
        yield broken("PYX-03", "ranks must run in an Enroot container, but run directly on the host", listed(outside))
    path = expanded(container.image)
    record = store.recorded(Path(path)) if path and path.endswith(".sqsh") else None
    if record is None or record.marker is None:
        return
    images = grouped((rank.software.image, rank.node) for rank in facts.ranks if rank.software.in_enroot)
    for image_json, nodes in images.items():
        if _marker(image_json) != record.marker:
            what = f"ranks run in {_name(image_json)}, but the image of the plan is {_name(json.dumps(record.marker))}"
            fix = "put the job id into --container-name, and remove older containers of this name"
            yield broken("PYX-03", what, listed(nodes), fix=fix)


def versions(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the differences between the software of the ranks."""
    in_container = plan.config.container.runtime is Runtime.pyxis
    names = sorted({name for rank in facts.ranks for name in rank.software.packages})
    by_name = {"image": grouped((_name(rank.software.image), rank.node) for rank in facts.ranks)}
    by_name["system"] = grouped((str(rank.software.system), rank.node) for rank in facts.ranks)
    by_name["python"] = grouped((rank.software.python, rank.node) for rank in facts.ranks)
    by_name |= {
        name: grouped((rank.software.packages.get(name, "none"), rank.node) for rank in facts.ranks) for name in names
    }
    differing = {name: groups for name, groups in by_name.items() if len(groups) > 1}
    if differing:
        differences = "; ".join(
            f"{name} is {', '.join(f'{value} on {listed(nodes)}' for value, nodes in groups.items())}"
            for name, groups in differing.items()
        )
        odd = [node for groups in differing.values() for nodes in list(groups.values())[1:] for node in nodes]
        fix = None if in_container else "use the same Python environment on all nodes: a shared folder, or a container"
        rule = "PYX-03" if in_container else "RUN-08"
        yield broken(rule, f"the ranks have different software: {differences}", listed(odd), fix=fix)


def environment(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the variables whose value in the container differs from the plan."""
    if plan.config.container.runtime is not Runtime.pyxis:
        return
    for names, nodes in grouped((rank.not_as_planned, rank.node) for rank in facts.ranks).items():
        if names:
            yield broken(
                "PYX-09",
                f"these variables have different values in the container and in the plan: {', '.join(names)}",
                listed(nodes),
                severity="warning",
            )


def paths(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield required paths that are missing on all nodes, and paths that only some nodes have."""
    every = [(node, path) for node, machine in facts.machines.items() for path in machine.paths]
    for (name, path), _ in grouped(((path.what, path.path), node) for node, path in every).items():
        seen = [(node, reached) for node, reached in every if (reached.what, reached.path) == (name, path)]
        missing = [node for node, reached in seen if not reached.exists]
        if not missing or (len(missing) == len(seen) and not seen[0][1].required):
            continue
        rule, where = "PYX-07" if name == "a mount" else "CFG-06", f"{path or name} on {listed(missing)}"
        if len(missing) == len(seen):
            yield broken(rule, f"{name} is missing on every node", where)
        else:
            yield broken(
                rule,
                f"{name} is missing on {len(missing)} of {len(seen)} nodes",
                where,
                fix="put this path on a shared file system that all nodes mount at the same path",
            )


def results(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes that cannot write into the run folder or have too little free space there."""
    for node, machine in facts.machines.items():
        run_folder, where = machine.results, f"{machine.results.path} on {node}"
        if run_folder.refused is not None:
            yield broken("CFG-08", f"this node cannot write results: {run_folder.refused}", where)
        elif run_folder.free_mib < MIN_FREE_MIB:
            yield broken(
                "CFG-08",
                f"only {run_folder.free_mib} MiB of disk space are free, but a run needs {MIN_FREE_MIB} MiB",
                where,
            )


def health(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the measured rates that are below their minimum."""
    for finding in facts.health.findings if facts.health else ():
        yield broken(finding.rule, finding.what, finding.where, fix=finding.fix)


def _marker(image_json: str | None) -> Any:
    """Return the description in an image, or None if it has none."""
    with suppress(ValueError):
        return json.loads(image_json or "")
    return None


def _name(image_json: str | None) -> str:
    marker = _marker(image_json)
    if isinstance(marker, dict) and "name" in marker:
        return f"{marker['name']} (commit {marker.get('commit', '?')})"
    return image_json or "an image without a description"


def ranks_of(facts: Facts, node: str) -> list[RankFacts]:
    return [rank for rank in facts.ranks if rank.node == node]
