"""What a cluster says of a run: its version, its kinds, whether this user may, whether it takes the very manifest."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from bench.backends.kubernetes import client, names, yaml_text
from bench.backends.kubernetes.client import PATHS, ApiError
from bench.backends.kubernetes.pod_template import Object, resources
from bench.contract.kubernetes import Volume
from bench.contract.plan import Plan
from bench.errors import SubmitError
from bench.rules.check import Answer, CannotTellError, Check, Finding, Subject, broken

WHERE = "cluster.kubernetes"
VERBS = ("create", "delete", "list")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


def ask_all(plan: Plan, script: str) -> Subject:
    """Return the subject with every answer of this cluster; all questions are asked at the same time, each once."""
    k = names.settings(plan)
    made = [one for one in yaml_text.load_all(script) if isinstance(one, dict)]
    kinds = list(dict.fromkeys(one["kind"] for one in made))

    get = partial(partial, client.request, "GET", context=k.context)
    questions: dict[str, Callable[[], Any]] = {
        "version": get("/version"),
        "nodes": get("/api/v1/nodes"),
        "quota": get(client.path_of("ResourceQuota", k.namespace)),
    }
    for claim in claims(plan):
        questions[f"claim {claim}"] = get(client.path_of("PersistentVolumeClaim", k.namespace, claim))
    for kind in kinds:
        questions[f"kind {kind}"] = get(PATHS[kind][0])
    for verb, kind in [*itertools.product(VERBS, kinds), ("list", "Pod")]:
        questions[f"may {verb} {kind}"] = partial(_may, k.context, k.namespace, verb, kind)
    for one in made:
        questions[_dry(one)] = partial(client.create, one, context=k.context, dry_run=True)
    with ThreadPoolExecutor(4) as pool:
        answers = {name: pool.submit(_answered, ask) for name, ask in questions.items()}
    return Subject(plan, script, (), answers)


def _dry(made: Object) -> str:
    return f"dry run of {made['kind']} {made['metadata']['name']}"


def _may(context: str | None, namespace: str, verb: str, kind: str) -> Any:
    path, plural = PATHS[kind]
    group = path.removeprefix("/apis/").partition("/")[0] if path.startswith("/apis/") else ""
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": plural}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return client.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", context=context, body=body)


def _answered(ask: Callable[[], Any]) -> Answer:
    try:
        return Answer(200, json.dumps(ask()), "")
    except ApiError as error:
        return Answer(error.status, error.reason, error.message)


def said(subject: Subject, name: str) -> Any:
    """Return what the cluster answered.

    Raises:
        CannotTellError: nothing, or that this user may not ask.
    """
    answer = refused_or_said(subject, name)
    if answer.exit_code != 200:
        raise CannotTellError(f"{name}: {answer.err or f'HTTP {answer.exit_code}'}")
    return json.loads(answer.out)


def refused_or_said(subject: Subject, name: str) -> Answer:
    """Return an answer, also one that refuses.

    Raises:
        CannotTellError: there is none.
    """
    try:
        return subject.answers[name].result()
    except SubmitError as error:
        raise CannotTellError(error.what) from error


def reachable(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the API server answers, and is as new as the config promises."""
    try:
        found = str(subject.answers["version"].result().out)
    except SubmitError as error:
        yield broken("KUB-12", error.what, error.where, fix=error.fix)
        return
    server = str((json.loads(found) if found.startswith("{") else {}).get("gitVersion", ""))
    promised = names.settings(subject.plan).version
    yield server
    if server and names.version_key(server) < names.version_key(promised):
        fix = f"set it to {'.'.join(map(str, names.version_key(server)))}"
        yield broken("KUB-16", f"the API server is {server}", f"{WHERE}.version={promised}", fix=fix)


def kinds(subject: Subject) -> Iterator[Finding | str]:
    """Yield which kinds of objects the cluster does not have."""
    for name in subject.answers:
        if not name.startswith("kind "):
            continue
        kind = name.removeprefix("kind ")
        is_known = refused_or_said(subject, name).exit_code != 404
        group = PATHS[kind][0].removeprefix("/apis/").removeprefix("/api/")
        there = [one["kind"] for one in said(subject, name)["resources"]] if is_known else []
        if kind not in there:
            fix = "have its operator installed, or choose object=job, which needs none"
            yield broken("KUB-06", f"this cluster has no {kind} of {group}", f"{WHERE}.object", fix=fix)
        else:
            yield f"{kind} {group}"


def rights(subject: Subject) -> Iterator[Finding | str]:
    """Yield what this user may not do."""
    asked = [name for name in subject.answers if name.startswith("may ")]
    missing = [name.removeprefix("may ") for name in asked if not said(subject, name)["status"].get("allowed")]
    if missing:
        namespace = names.settings(subject.plan).namespace
        yield broken("KUB-07", f"this user may not {', '.join(missing)}", f"namespace {namespace}")
    else:
        yield f"{len(asked)} rights"


def accepted(subject: Subject) -> Iterator[Finding | str]:
    """Yield what the API server has against an object of the very manifest, which it looks at and does not make."""
    count = 0
    for name in subject.answers:
        if not name.startswith("dry run of "):
            continue
        answer, count = refused_or_said(subject, name), count + 1
        if answer.exit_code in (200, 409):  # 409: somebody has applied this very manifest
            continue
        rule = "KUB-07" if answer.out in ("Forbidden", "Unauthorized") else "KUB-15"
        rule = "KUB-11" if "quota" in answer.err else rule
        if answer.exit_code != 404:  # a kind that is not there is another check's
            yield broken(rule, f"refused: {answer.err}", name)
    yield f"{count} objects"


def offered(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether enough nodes have what a pod asks for, as far as their totals tell."""
    plan, wanted = subject.plan, resources(subject.plan)
    nodes = [node for node in said(subject, "nodes")["items"] if _is_candidate(node, plan)]
    able = [node for node in nodes if _lacks(node, wanted) == []]
    yield f"{len(able)} of {len(nodes)} nodes"
    if len(able) < plan.world.num_nodes:
        lacking = sorted({one for node in nodes for one in _lacks(node, wanted)})
        nowhere = [one for one in lacking if all(one not in _allocatable(node) for node in nodes)]
        what = f"{len(able)} nodes have room for a pod, and the run wants {plan.world.num_nodes}"
        if nowhere:
            what = f"no node offers {', '.join(nowhere)}"
        elif lacking:
            what += f"; others lack {', '.join(lacking)}"
        yield broken("KUB-17" if nowhere else "KUB-02", what, f"{WHERE}.resources, gpu_resource, node_selector")


def _is_candidate(node: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether the settings let pods onto a node, its taints included."""
    k, labels = names.settings(plan), node["metadata"].get("labels") or {}
    if any(labels.get(name) != value for name, value in k.node_selector.items()):
        return False
    if node["metadata"]["name"] in k.exclude_nodes or (node.get("spec") or {}).get("unschedulable"):
        return False
    tolerated = {(one.taint, one.value) for one in k.tolerations}
    taints = [t for t in (node.get("spec") or {}).get("taints") or [] if t["effect"] != "PreferNoSchedule"]
    return all((t["key"], None) in tolerated or (t["key"], t.get("value")) in tolerated for t in taints)


def _lacks(node: Mapping[str, Any], wanted: Mapping[str, str]) -> list[str]:
    has = _allocatable(node)
    return [name for name, quantity in wanted.items() if amount(str(has.get(name, "0"))) < amount(quantity)]


def _allocatable(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what pods can have of a node; nothing of one whose kubelet has not reported yet."""
    return node["status"].get("allocatable") or {}


def amount(quantity: str) -> float:
    """Return a quantity of Kubernetes as a number: 500m is 0.5, 2Ki is 2048."""
    for unit in sorted(_UNITS, key=len, reverse=True):
        if quantity.endswith(unit):
            return float(quantity.removesuffix(unit)) * _UNITS[unit]
    return float(quantity)


def quota(subject: Subject) -> Iterator[Finding | str]:
    """Yield which quota of the namespace is too small for the pods of a run."""
    wanted = {name: amount(text) * subject.plan.world.num_nodes for name, text in resources(subject.plan).items()}
    pods = {"pods": float(subject.plan.world.num_nodes)}
    asked = pods | wanted | {f"requests.{name}": number for name, number in wanted.items()}
    asked |= {f"limits.{name}": number for name, number in wanted.items()}
    found = said(subject, "quota")["items"]
    yield f"{len(found)} quotas" if found else "none"
    for one in found:
        hard, used = one["status"].get("hard") or {}, one["status"].get("used") or {}
        for name, number in asked.items():
            if name in hard and number > (left := amount(hard[name]) - amount(used.get(name, "0"))):
                what = f"{name}: {left:g} left of {hard[name]}, and the run asks for {number:g}"
                yield broken("KUB-11", what, f"quota {one['metadata']['name']}")


def claims(plan: Plan) -> list[str]:
    """Return the names of the claims that a run mounts."""
    k = names.settings(plan)
    volumes: tuple[Volume | None, ...] = (k.results, k.data, k.model)
    return list(dict.fromkeys(volume.claim for volume in volumes if volume is not None and volume.claim))


def volumes(subject: Subject) -> Iterator[Finding | str]:
    """Yield which claims are missing, pending, or for one node only."""
    for claim in claims(subject.plan):
        answer = refused_or_said(subject, f"claim {claim}")
        if answer.exit_code == 404:
            yield broken("KUB-08", f"there is no claim {claim}", f"namespace {names.settings(subject.plan).namespace}")
            continue
        found = said(subject, f"claim {claim}")
        phase, modes = found["status"].get("phase"), found["spec"].get("accessModes") or []
        yield f"{claim} {phase} {','.join(modes)} ({found['spec'].get('storageClassName') or 'no storage class'})"
        if phase != "Bound":
            what = f"claim {claim} is {phase}: it is bound once a pod uses it, or never"
            yield broken("KUB-08", what, f"storage class {found['spec'].get('storageClassName')}", severity="warning")
        if subject.plan.world.num_nodes > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            what = f"claim {claim} can be mounted by one node only ({', '.join(modes)})"
            yield broken("KUB-08", what, f"{WHERE}: results, data, model")


CHECKS = (
    Check("API server", ("KUB-12", "KUB-16"), reachable),
    Check("kinds of objects", ("KUB-06",), kinds),
    Check("rights", ("KUB-07",), rights),
    Check("server-side dry run", ("KUB-15", "KUB-07", "KUB-11"), accepted),
    Check("nodes", ("KUB-02", "KUB-17"), offered),
    Check("quota", ("KUB-11",), quota),
    Check("claims", ("KUB-08",), volumes, lambda plan: bool(claims(plan))),
)
