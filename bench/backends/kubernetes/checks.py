"""Whether what a config says of a Kubernetes cluster can become pods, as far as the config alone tells."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.backends.kubernetes import client, manifest, names
from bench.backends.kubernetes.client import PATHS, ApiError
from bench.backends.kubernetes.pod_template import Object, resources
from bench.contract.cluster import ObjectKind, Volume
from bench.contract.plan import Plan
from bench.contract.schema import Device, Runtime
from bench.errors import SubmitError
from bench.rules.check import Answer, CannotTellError, Check, Finding, Subject, broken

WHERE = "cluster.kubernetes"
LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
QUALIFIED = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[kMGTPE]i?|m)?")
IMAGE = re.compile(r"[a-z0-9][\w./:-]{0,400}(?:@sha256:[0-9a-f]{64})?")
NETWORK = re.compile(rf"(?:{LABEL.pattern}/)?{SUBDOMAIN.pattern}(?:@[a-z][a-z0-9]{{0,14}})?")
CAPABILITY = re.compile(r"[A-Z][A-Z_]{1,30}")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
VERSION = re.compile(r"v?1\.\d{1,2}(?:\..*)?")


def texts(subject: Subject) -> Iterator[Finding]:
    """Yield each name that Kubernetes would refuse."""
    for key, text, pattern in _named(subject.plan):
        if not pattern.fullmatch(text):
            yield broken("KUB-15", f"{text!r:.80} is not one that Kubernetes takes", f"{WHERE}.{key}")


def _named(plan: Plan) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """Yield every name of the settings: its key, itself, and what such names look like."""
    k = names.settings(plan)
    optional = {
        "priority_class": (k.priority_class, SUBDOMAIN),
        "queue": (k.queue, LABEL),
        "service_account": (k.service_account, SUBDOMAIN),
        "gpu_resource": (k.gpu_resource, QUALIFIED),
    }
    yield "namespace", k.namespace, LABEL
    yield "version", k.version, VERSION
    yield from ((key, text, pattern) for key, (text, pattern) in optional.items() if text is not None)
    for name, quantity in k.resources.items():
        yield "resources", name, QUALIFIED
        yield f"resources.{name}", quantity, QUANTITY
    for name, value in k.node_selector.items():
        yield "node_selector", name, QUALIFIED
        yield f"node_selector.{name}", value, VALUE
    yield from (("image_pull_secrets", one, SUBDOMAIN) for one in k.image_pull_secrets)
    yield from (("env_from_secrets", one, SUBDOMAIN) for one in k.env_from_secrets)
    yield from (("networks", one, NETWORK) for one in k.networks)
    yield from (("exclude_nodes", one, VALUE) for one in k.exclude_nodes)
    yield from (("capabilities", one, CAPABILITY) for one in k.capabilities)
    for one in k.tolerations:
        yield "tolerations: taint", one.taint, QUALIFIED
        yield "tolerations: value", one.value or "", VALUE
        yield "tolerations: effect", one.effect or EFFECTS[0], re.compile("|".join(EFFECTS))


def image(subject: Subject) -> Iterator[Finding]:
    """Yield whether there is no image, none by its digest, or a container of another kind."""
    text, container = names.settings(subject.plan).image, subject.plan.config.container
    if container.runtime is not Runtime.none:
        fix = "choose container=none, and name the image in cluster.kubernetes.image"
        yield broken("KUB-15", f"pods are containers already, and container is {container.name}", "container", fix=fix)
    if not text:
        fix = "set it to an image that holds runstop and its engine (docs/kubernetes.md builds one)"
        yield broken("KUB-15", "pods need an image", f"{WHERE}.image", fix=fix)
    elif not IMAGE.fullmatch(text):
        yield broken("KUB-15", f"{text!r:.80} is not the name of an image", f"{WHERE}.image")
    elif "@sha256:" not in text:
        what = f"{text} is named by a tag, which may be another image tomorrow"
        fix = "name it by its digest: name@sha256:…"
        yield broken("KUB-15", what, f"{WHERE}.image", fix=fix, severity="warning")


def volumes_of_config(subject: Subject) -> Iterator[Finding]:
    """Yield which folders of the run no volume stands behind, and volumes that are none."""
    plan, k = subject.plan, names.settings(subject.plan)
    paths = plan.config.cluster.paths
    wanted = (
        ("results", k.results, paths.logs, "logs"),
        ("data", k.data, paths.data if plan.inputs.rows else None, "data"),
        ("model", k.model, paths.model if plan.inputs.checkpoint else None, "model"),
    )
    mounted = {path for _, volume, path, _ in wanted if volume is not None and path}
    for name, volume, path, key in wanted:
        if path is not None and (not path.startswith("/") or "$" in path or ":" in path):
            what = f"{path} is not a path in pods"
            fix = "write it in full, without variables and colons: no shell fills it in"
            yield broken("KUB-15", what, f"cluster.paths.{key}", fix=fix)
        if (path or name == "results") and volume is None and path not in mounted:
            fix = f"set cluster.kubernetes.{name} to {{claim: NAME}} or {{host_path: FOLDER}}"
            yield broken("KUB-15", f"no volume holds cluster.paths.{key}", f"{WHERE}.{name}", fix=fix)
        if volume is not None and (volume.claim is None) == (volume.host_path is None):
            yield broken("KUB-15", "a volume is a claim or a host_path, one of the two", f"{WHERE}.{name}")
        if volume is not None and volume.claim is not None and not SUBDOMAIN.fullmatch(volume.claim):
            yield broken("KUB-15", f"{volume.claim!r:.80} is not the name of a claim", f"{WHERE}.{name}.claim")
        if volume is not None and volume.host_path is not None and not volume.host_path.startswith("/"):
            yield broken("KUB-15", f"{volume.host_path!r:.80} is not a full path", f"{WHERE}.{name}.host_path")


def owner(subject: Subject) -> Iterator[Finding]:
    """Yield whether pods could not write what this user makes, where both see the same results."""
    plan, user = subject.plan, names.settings(subject.plan).run_as_user
    logs = plan.config.cluster.paths.logs
    if logs and Path(logs).is_dir() and os.geteuid() != user:
        what = f"run folders in {logs} belong to user {os.geteuid()}, and pods run as user {user}"
        fix = "set it to your own number (id -u), and submit as that user, who is not root"
        yield broken("KUB-15", what, f"{WHERE}.run_as_user", fix=fix)


def shape(subject: Subject) -> Iterator[Finding]:
    """Yield what this backend does not do, and numbers out of range."""
    plan, k = subject.plan, names.settings(subject.plan)
    if plan.config.launch.array:
        yield broken("KUB-15", "there are no arrays of jobs here", "launch.array", fix="set launch.array=false")
    if plan.config.cluster.slurm is not None:
        yield broken("KUB-15", "this cluster has settings of Slurm", "cluster.slurm", fix="set cluster.slurm=null")
    if plan.config.cluster.device is Device.cuda and not k.gpu_resource:
        yield broken("KUB-15", "ranks on GPUs need a resource to ask for", f"{WHERE}.gpu_resource")
    if k.run_as_user < 1:
        fix = "choose another user, who may write the results"
        yield broken("KUB-15", "pods do not run as root", f"{WHERE}.run_as_user", fix=fix)
    if not 1024 <= k.port <= 65535:
        yield broken("KUB-15", f"{k.port} is no port for a user", f"{WHERE}.port", fix="choose one from 1024 to 65535")
    if k.shm_gib < 1 or k.grace_s < 1 or k.keep_h < 0:
        yield broken(
            "KUB-15", "a number is out of range", f"{WHERE}: shm_gib, grace_s, keep_h", fix="set it to 1 or more"
        )
    if k.queue and k.object is ObjectKind.job and not names.at_least(plan, "1.24"):
        what = "before Kubernetes 1.24 a run is one Job a node, and Kueue would admit them one by one"
        yield broken("KUB-16", what, f"{WHERE}.queue", fix="set it to null")
    if k.object in (ObjectKind.jobset, ObjectKind.trainjob) and not names.at_least(plan, "1.27"):
        fix = "set it to what `kubectl version` says, or choose object=job"
        yield broken("KUB-16", f"{k.object.name} needs Kubernetes 1.27", f"{WHERE}.version", fix=fix)


CONFIG_CHECKS = (
    Check("names for Kubernetes", ("KUB-15",), texts),
    Check("image", ("KUB-15",), image),
    Check("volumes", ("KUB-15",), volumes_of_config),
    Check("user", ("KUB-15",), owner),
    Check("shape of the job", ("KUB-15", "KUB-16"), shape),
)


WHERE = "cluster.kubernetes"
VERBS = ("create", "delete", "list")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


def ask_all(plan: Plan, script: str) -> Subject:
    """Return the subject with every answer of this cluster; all questions are asked at the same time, each once."""
    k = names.settings(plan)
    made = [one for one in manifest.load_all(script) if isinstance(one, dict)]
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


def claims_exist(subject: Subject) -> Iterator[Finding | str]:
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


SITE_CHECKS = (
    Check("API server", ("KUB-12", "KUB-16"), reachable),
    Check("kinds of objects", ("KUB-06",), kinds),
    Check("rights", ("KUB-07",), rights),
    Check("server-side dry run", ("KUB-15", "KUB-07", "KUB-11"), accepted),
    Check("nodes", ("KUB-02", "KUB-17"), offered),
    Check("quota", ("KUB-11",), quota),
    Check("claims", ("KUB-08",), claims_exist, lambda plan: bool(claims(plan))),
)
