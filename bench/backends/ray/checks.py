"""Checks of a plan for Ray: LAPTOP checks read the plan alone, LOGIN checks query the cluster."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from bench import masking as known_secrets
from bench.backends.kubernetes import checks
from bench.backends.ray import client, manifest, placement_group, request
from bench.contract.cluster import Ray
from bench.contract.plan import Plan, nodes_of_job
from bench.contract.schema import Runtime
from bench.errors import BenchError
from bench.planning.avoided_nodes import too_few
from bench.rules.check import Answer, CannotTellError, Check, Finding, Subject, Tier, broken

PAGES = {"version": "/api/version", "nodes": "/api/v0/nodes?detail=1&limit=10000"}
"""Pages of the dashboard that are queried. Source: Ray's dashboard, version and state modules."""


def block(plan: Plan) -> Ray:
    """Return the plan's Ray settings, or the defaults if it has none."""
    return plan.config.cluster.ray or Ray()


def uses_kuberay(plan: Plan) -> bool:
    """Return whether KubeRay creates the Ray cluster for this run."""
    return block(plan).kuberay is not None


def cluster_exists(plan: Plan) -> bool:
    """Return whether the Ray cluster exists independently of the run."""
    return not uses_kuberay(plan)


def address(subject: Subject) -> Iterator[Finding | str]:
    """Yield the cluster's address, or an error if none is configured."""
    try:
        yield request.address(subject.plan)
    except BenchError as error:
        yield broken("RAY-01", error.what, error.where, fix=error.fix)


def no_container(subject: Subject) -> Iterator[Finding]:
    """Yield an error if a container runtime is set: ranks run in the environment of the Ray node."""
    container = subject.plan.config.container
    if container.runtime is not Runtime.none:
        fix = "set container=none, and install torch and the engine on the Ray nodes"
        yield broken("PYX-04", "the Ray backend cannot start containers", f"container={container.name}", fix=fix)


def passed_variables(subject: Subject) -> Iterator[Finding | str]:
    """Yield variables of `cluster.ray.environment` that are not set, or whose secret values Ray would show."""
    import os

    where = "cluster.ray.environment"
    for name in block(subject.plan).environment:
        value = os.environ.get(name)
        if value is None:
            yield broken(
                "CFG-06",
                f"the environment variable {name} is not set",
                where,
                fix=f"export {name}=…, or remove {name} from {where}",
            )
        elif secret := known_secrets.named(name, value) or known_secrets.first(value):
            fix = f"remove {name} from {where}; set {name} on the nodes before `ray start`, or in a Secret for the pods"
            yield broken(
                "CFG-07", f"{name} contains a secret ({secret}), which Ray's dashboard would show", where, fix=fix
            )
        else:
            yield name


def no_array(subject: Subject) -> Iterator[Finding]:
    """Yield an error if trials should run as tasks of a job array, which Ray does not have."""
    if subject.plan.config.launch.array:
        fix = "set launch.array=false, so that the trials run one after another on the same nodes"
        yield broken("CFG-09", "the Ray backend does not support job arrays", "launch.array", fix=fix)


def needs_kubectl(subject: Subject) -> Iterator[Finding | str]:
    """Yield that the user must start a KubeRay run with kubectl."""
    fix = "run `runstop render` with the same arguments to get the manifest FILE, then run `kubectl apply -f FILE`"
    yield broken("RAY-10", "`runstop launch` cannot submit a run to KubeRay", "cluster.ray.kuberay", fix=fix)


def version(subject: Subject) -> Iterator[Finding | str]:
    """Yield the cluster's Ray version, and a warning if the client's differs."""
    import ray

    server = str(_answer(subject, "version")["ray_version"])
    yield f"Ray {server}"
    if server.split(".")[:2] != ray.__version__.split(".")[:2]:
        what = f"the cluster has Ray {server}, but this machine has Ray {ray.__version__}"
        fix = f"if Ray refuses jobs, run on this machine: pip install 'ray[default]=={server}'"
        yield broken("RAY-02", what, request.address(subject.plan), fix=fix, severity="warning")


def nodes(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if too few nodes of the cluster, free or busy, are large enough for the run."""
    plan, required = subject.plan, placement_group.bundle(subject.plan)
    listed = _answer(subject, "nodes")["data"]["result"]["result"]
    used = [
        node
        for node in listed
        if not placement_group.is_avoided(plan, (node.get("node_name"), node.get("node_ip"), node.get("hostname")))
    ]
    alive = [node["resources_total"] for node in used if node["state"] == "ALIVE"]
    large, size = placement_group.num_large(alive, required), placement_group.shown(required)
    needed = nodes_of_job(plan)
    yield f"{len(alive)} nodes, {large} of them with {size}"
    if avoided := plan.config.cluster.avoided:
        yield f"left out: {', '.join(avoided)}"
        if large < needed:
            error = too_few(large, needed, avoided, where="cluster.num_nodes")
            yield broken("RAY-03", error.what, error.where, fix=error.fix)
            return
    if large < needed:
        what = f"only {large} of {len(alive)} Ray nodes have {size}, but the run needs {needed} such nodes"
        fix = (
            "add nodes, or lower cluster.num_nodes, cluster.ranks_per_node or cluster.ray.cpus_per_node; "
            "if an autoscaler adds nodes on demand, set launch.force=true"
        )
        yield broken("RAY-03", what, request.address(plan), fix=fix)


def _answer(subject: Subject, name: str) -> Any:
    answer = subject.answers[name].result()
    if answer.exit_code:
        raise CannotTellError(answer.err)
    return json.loads(answer.out)


def reachable(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if the cluster does not answer."""
    answer = subject.answers["version"].result()
    if block(subject.plan).address is None:
        raise CannotTellError(answer.err)
    if answer.exit_code:
        yield broken("RAY-01", answer.err, "cluster.ray.address")
    else:
        yield f"dashboard {request.address(subject.plan)}"


def subject(plan: Plan, tier: Tier) -> Subject:
    """Return the subject of a tier's checks; from tier login on, with the cluster's answers."""
    try:
        text = manifest.text(plan) if uses_kuberay(plan) else ""
    except BenchError:
        text = ""  # another check reports this error
    if tier == "laptop" or uses_kuberay(plan) or block(plan).address is None:
        return Subject(plan, text, answers={} if tier == "laptop" else dict.fromkeys(PAGES, _done(_NO_ADDRESS)))
    return Subject(plan, text, answers={name: _done(_query(plan, page)) for name, page in PAGES.items()})


_NO_ADDRESS = Answer(1, "", "the address of the Ray cluster is not set")


def _query(plan: Plan, page: str) -> Answer:
    try:
        return Answer(0, json.dumps(client.get(request.address(plan), page)), "")
    except BenchError as error:
        return Answer(1, "", error.what)


def _done(answer: Answer) -> "Future[Answer]":
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


def _of_kuberay(check: Check, plan: Plan) -> bool:
    return uses_kuberay(plan) and check.applies(plan)


LAPTOP = (
    Check("cluster address", ("RAY-01",), address, cluster_exists),
    Check("no container", ("PYX-04",), no_container, cluster_exists),
    Check("passed environment variables", ("CFG-06", "CFG-07"), passed_variables),
    Check("no job array", ("CFG-09",), no_array),
    *(replace(check, applies=partial(_of_kuberay, check)) for check in checks.CONFIG_CHECKS),
    Check("manifest", ("RAY-10",), needs_kubectl, uses_kuberay),
)
LOGIN = (
    Check("cluster", ("RAY-01",), reachable, cluster_exists),
    Check("version", ("RAY-02",), version, cluster_exists),
    Check("nodes", ("RAY-03",), nodes, cluster_exists),
)
