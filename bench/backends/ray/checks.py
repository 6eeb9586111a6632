"""Whether a plan fits a Ray cluster: what the plan says, and what the cluster answers."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from bench import masking as known_secrets
from bench.backends.kubernetes import checks
from bench.backends.ray import client, manifest, placement_group, request
from bench.contract.cluster import Ray
from bench.contract.plan import Plan
from bench.contract.schema import Runtime
from bench.errors import BenchError
from bench.rules.check import Answer, CannotTellError, Check, Finding, Subject, Tier, broken

PAGES = {"version": "/api/version", "nodes": "/api/v0/nodes?detail=1&limit=10000"}
"""What a cluster is asked. Source: Ray's dashboard, version and state modules."""


def block(plan: Plan) -> Ray:
    """Return what the plan says of its Ray cluster."""
    return plan.config.cluster.ray or Ray()


def is_made(plan: Plan) -> bool:
    """Return whether KubeRay makes the cluster, for this run alone."""
    return block(plan).kuberay is not None


def is_there(plan: Plan) -> bool:
    """Return whether the cluster exists without the run."""
    return not is_made(plan)


def address(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether somebody has said where the cluster is."""
    try:
        yield request.address(subject.plan)
    except BenchError as error:
        yield broken("RAY-01", error.what, error.where, fix=error.fix)


def no_container(subject: Subject) -> Iterator[Finding]:
    """Yield whether ranks should run in a container: theirs is that of the Ray node, if that has one."""
    container = subject.plan.config.container
    if container.runtime is not Runtime.none:
        fix = "choose container=none; the nodes of a Ray cluster bring torch and the engine themselves"
        yield broken("PYX-04", "actors of Ray start no container", f"container={container.name}", fix=fix)


def passed_on(subject: Subject) -> Iterator[Finding | str]:
    """Yield variables that are named to be passed on, and are not set, or hold secrets that Ray would show."""
    import os

    where = "cluster.ray.environment"
    for name in block(subject.plan).environment:
        value = os.environ.get(name)
        if value is None:
            yield broken("CFG-06", f"{name} is not set", where, fix=f"export {name}=…, or leave it out")
        elif found := known_secrets.named(name, value) or known_secrets.first(value):
            fix = "set it where Ray is started on the nodes, as a Secret where they are pods"
            yield broken("CFG-07", f"{found} would stand on Ray's dashboard", where, fix=fix)
        else:
            yield name


def one_job(subject: Subject) -> Iterator[Finding]:
    """Yield whether trials are asked to run as elements of an array, which Ray does not have."""
    if subject.plan.config.launch.array:
        fix = "leave it out: trials follow each other on the same nodes"
        yield broken("CFG-09", "a Ray job is no array of trials", "launch.array", fix=fix)


def by_hand(subject: Subject) -> Iterator[Finding | str]:
    """Yield that nothing here starts this run."""
    fix = "`python -m bench render …` with the same words writes it; `kubectl apply -f FILE` starts the run"
    yield broken("RAY-10", "bench.launch has no cluster to send this run to", "cluster.ray.kuberay", fix=fix)


def version(subject: Subject) -> Iterator[Finding | str]:
    """Yield how the cluster's Ray differs from the client's."""
    import ray

    found = str(_answer(subject, "version")["ray_version"])
    yield f"Ray {found}"
    if found.split(".")[:2] != ray.__version__.split(".")[:2]:
        what = f"the cluster has Ray {found}, and here is {ray.__version__}"
        fix = f"pip install 'ray[default]=={found}', if jobs are refused"
        yield broken("RAY-02", what, request.address(subject.plan), fix=fix, severity="warning")


def nodes(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the cluster has as many nodes of that size as the run takes, free or not."""
    plan, wanted = subject.plan, placement_group.bundle(subject.plan)
    listed = _answer(subject, "nodes")["data"]["result"]["result"]
    alive = [node["resources_total"] for node in listed if node["state"] == "ALIVE"]
    large, size = placement_group.num_large(alive, wanted), placement_group.shown(wanted)
    yield f"{len(alive)} nodes, {large} of them with {size}"
    if large < plan.world.num_nodes:
        what = f"{large} of {len(alive)} nodes have {size}, and the run takes {plan.world.num_nodes}"
        fix = "lower cluster.num_nodes, ranks_per_node or ray.cpus_per_node, or add nodes; where an autoscaler adds "
        yield broken("RAY-03", what, request.address(plan), fix=f"{fix}them, launch.force=true starts the run")


def _answer(subject: Subject, name: str) -> Any:
    answer = subject.answers[name].result()
    if answer.exit_code:
        raise CannotTellError(answer.err)
    return json.loads(answer.out)


def reachable(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the cluster answers."""
    answer = subject.answers["version"].result()
    if block(subject.plan).address is None:
        raise CannotTellError(answer.err)
    if answer.exit_code:
        yield broken("RAY-01", answer.err, "cluster.ray.address")
    else:
        yield f"dashboard {request.address(subject.plan)}"


def subject(plan: Plan, tier: Tier) -> Subject:
    """Return what the checks of a tier look at; from login on, with what the cluster answers."""
    try:
        text = manifest.text(plan) if is_made(plan) else ""
    except BenchError:
        text = ""  # a check of its own says what is wrong
    if tier == "laptop" or is_made(plan) or block(plan).address is None:
        return Subject(plan, text, answers={} if tier == "laptop" else dict.fromkeys(PAGES, _done(_NO_ADDRESS)))
    return Subject(plan, text, answers={name: _done(_asked(plan, page)) for name, page in PAGES.items()})


_NO_ADDRESS = Answer(1, "", "no address to ask")


def _asked(plan: Plan, page: str) -> Answer:
    try:
        return Answer(0, json.dumps(client.get(request.address(plan), page)), "")
    except BenchError as error:
        return Answer(1, "", error.what)


def _done(answer: Answer) -> "Future[Answer]":
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


LAPTOP = (
    Check("address of the cluster", ("RAY-01",), address, is_there),
    Check("no container", ("PYX-04",), no_container, is_there),
    Check("variables that are passed on", ("CFG-06", "CFG-07"), passed_on),
    Check("one job", ("CFG-09",), one_job),
    *(replace(check, applies=is_made) for check in checks.CONFIG_CHECKS),
    Check("manifest", ("RAY-10",), by_hand, is_made),
)
LOGIN = (
    Check("cluster", ("RAY-01",), reachable, is_there),
    Check("version", ("RAY-02",), version, is_there),
    Check("nodes", ("RAY-03",), nodes, is_there),
)
