"""Checks of a plan for Kubernetes: CONFIG_CHECKS read the config alone, SITE_CHECKS query the API server."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from bench.backends.kubernetes import client, manifest, names, pod_security, pod_template
from bench.backends.kubernetes.client import PATHS, ApiError
from bench.backends.kubernetes.pod_template import Object, resources
from bench.contract.cluster import ObjectKind, Volume
from bench.contract.plan import Plan
from bench.contract.schema import Device, GpuVendor, Runtime
from bench.errors import SubmitError
from bench.rules.check import Answer, CannotTellError, Check, Finding, Subject, broken
from bench.texts import quoted

WHERE = "cluster.kubernetes"
LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
QUALIFIED = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[kMGTPE]i?|m)?")
IMAGE = re.compile(r"[a-z0-9][\w./:-]{0,400}(?:@sha256:[0-9a-f]{64})?")
NETWORK = re.compile(rf"(?:{LABEL.pattern}/)?{SUBDOMAIN.pattern}(?:@[a-z][a-z0-9]{{0,14}})?")
CAPABILITY = re.compile(r"[A-Z][A-Z_]{1,30}")
VENDORS = {"nvidia.com": GpuVendor.nvidia, "amd.com": GpuVendor.amd}
"""The domains of the resources that the device plugins of NVIDIA and AMD provide."""
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
VERSION = re.compile(r"v?1\.\d{1,2}(?:\..*)?")


def texts(subject: Subject) -> Iterator[Finding]:
    """Yield each name or value that Kubernetes would refuse."""
    for key, text, pattern in _named(subject.plan):
        if not pattern.fullmatch(text):
            where = "cluster.avoid" if key == "avoid" else f"{WHERE}.{key}"
            fix = "correct this name in cluster.avoid" if key == "avoid" else None
            yield broken("KUB-15", f"{key} is {quoted(text)}, which Kubernetes does not accept", where, fix=fix)


def _named(plan: Plan) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """Yield every name in the settings: its key, its text and the pattern that it must match."""
    k = names.settings(plan)
    optional = {
        "priority_class": (k.priority_class, SUBDOMAIN),
        "queue": (k.queue, LABEL),
        "workload_priority_class": (k.workload_priority_class, SUBDOMAIN),
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
    for name, value in k.labels.items():
        yield "labels", name, QUALIFIED
        yield f"labels.{name}", value, VALUE
    yield from (("annotations", name, QUALIFIED) for name in k.annotations)
    yield from (("image_pull_secrets", one, SUBDOMAIN) for one in k.image_pull_secrets)
    yield from (("env_from_secrets", one, SUBDOMAIN) for one in k.env_from_secrets)
    yield from (("networks", one, NETWORK) for one in k.networks)
    yield from (("exclude_nodes", one, VALUE) for one in k.exclude_nodes)
    yield from (("avoid", one, VALUE) for one in plan.config.cluster.avoided)
    yield from (("capabilities", one, CAPABILITY) for one in k.capabilities)
    for one in k.tolerations:
        yield "tolerations: taint", one.taint, QUALIFIED
        yield "tolerations: value", one.value or "", VALUE
        yield "tolerations: effect", one.effect or EFFECTS[0], re.compile("|".join(EFFECTS))


def image(subject: Subject) -> Iterator[Finding]:
    """Yield a missing or malformed image, an image without a digest, and a container runtime other than none."""
    text, container = names.settings(subject.plan).image, subject.plan.config.container
    if container.runtime is not Runtime.none:
        fix = "set container=none and put the image into cluster.kubernetes.image"
        what = f"container={container.name} cannot be used, because a pod already runs in containers"
        yield broken("KUB-15", what, "container", fix=fix)
    if not text:
        fix = f"set {WHERE}.image to an image with runstop and the engine; docs/kubernetes.md explains the build"
        yield broken("KUB-15", "the container image of the pods is not set", f"{WHERE}.image", fix=fix)
    elif not IMAGE.fullmatch(text):
        yield broken("KUB-15", f"the image is {quoted(text)}, which is not a valid image name", f"{WHERE}.image")
    elif "@sha256:" not in text:
        what = f"the image {text} has a tag, which may refer to a different image later"
        fix = "write the image with a digest instead of the tag: name@sha256:…"
        yield broken("KUB-15", what, f"{WHERE}.image", fix=fix, severity="warning")


def volumes_of_config(subject: Subject) -> Iterator[Finding]:
    """Yield folders of the run without a volume, and volumes that are not valid."""
    plan, k = subject.plan, names.settings(subject.plan)
    paths = plan.config.cluster.paths
    wanted = (
        ("results", k.results, paths.logs, "logs"),
        ("data", k.data, paths.data if plan.inputs.rows else None, "data"),
        ("model", k.model, paths.model if plan.inputs.checkpoint else None, "model"),
    )
    mounted = {path for _, volume, path, _ in wanted if volume is not None and path}
    first: dict[str, tuple[str, Volume]] = {}
    for name, volume, path, key in wanted:
        if path is not None and (not path.startswith("/") or "$" in path or ":" in path):
            what = f"pods cannot use the path {path}: it must be absolute, without $ and without colons"
            fix = f"set cluster.paths.{key} to an absolute path without $ and colons: pods do not expand variables"
            yield broken("KUB-15", what, f"cluster.paths.{key}", fix=fix)
        if volume is not None and path is not None:
            holder, other = first.setdefault(path, (name, volume))
            if other != volume:
                what = f"the volumes {holder} and {name} are different, but have the same mount path {path}"
                fix = f"set cluster.paths.{key} to another path, or set {holder} and {name} to the same volume"
                yield broken("KUB-15", what, f"cluster.paths.{key}", fix=fix)
            if path in pod_template.OWN_PATHS:
                reason = "it would hide the image" if path == "/" else "runstop mounts another volume at this path"
                what = f"the volume {name} cannot be mounted at {path}, because {reason}"
                yield broken("KUB-15", what, f"cluster.paths.{key}", fix=f"set cluster.paths.{key} to another path")
        if (path or name == "results") and volume is None and path not in mounted:
            fix = f"set cluster.kubernetes.{name} to {{claim: NAME}} or {{host_path: FOLDER}}"
            yield broken("KUB-15", f"the pods have no volume for cluster.paths.{key}", f"{WHERE}.{name}", fix=fix)
        if volume is not None and (volume.claim is None) == (volume.host_path is None):
            yield broken(
                "KUB-15", f"the volume {name} must have exactly one of the keys claim and host_path", f"{WHERE}.{name}"
            )
        if volume is not None and volume.claim is not None and not SUBDOMAIN.fullmatch(volume.claim):
            yield broken(
                "KUB-15", f"the claim is {quoted(volume.claim)}, which is not a valid name", f"{WHERE}.{name}.claim"
            )
        if volume is not None and volume.host_path is not None and not volume.host_path.startswith("/"):
            yield broken(
                "KUB-15",
                f"host_path is {quoted(volume.host_path)}, but must be an absolute path",
                f"{WHERE}.{name}.host_path",
            )
        if volume is not None and volume.sub_path is not None and not _is_below(volume.sub_path):
            what, fix = (
                f"sub_path is {quoted(volume.sub_path)}, which is not a folder inside the volume",
                "set sub_path to a relative path without ..",
            )
            yield broken("KUB-15", what, f"{WHERE}.{name}.sub_path", fix=fix)


def _is_below(path: str) -> bool:
    return path != "" and not path.startswith("/") and ".." not in PurePosixPath(path).parts


def owner(subject: Subject) -> Iterator[Finding]:
    """Yield an error if pods run as a user who cannot write into run folders that this user creates."""
    plan, user = subject.plan, names.settings(subject.plan).run_as_user
    logs = plan.config.cluster.paths.logs
    if logs and Path(logs).is_dir() and user is not None and os.geteuid() != user:
        what = f"user {os.geteuid()} owns the run folders in {logs}, but pods run as user {user}"
        fix = "set run_as_user to your user id (`id -u`), and submit as this user, not as root"
        yield broken("CFG-11", what, f"{WHERE}.run_as_user", fix=fix)


def shape(subject: Subject) -> Iterator[Finding]:
    """Yield settings that this backend does not support, and numbers out of range."""
    plan, k = subject.plan, names.settings(subject.plan)
    if plan.config.launch.array:
        fix = "set launch.array=false"
        yield broken("KUB-15", "the Kubernetes backend does not support job arrays", "launch.array", fix=fix)
    if plan.config.cluster.slurm is not None:
        what = "cluster.slurm is set, but this cluster uses Kubernetes"
        yield broken("KUB-15", what, "cluster.slurm", fix="set cluster.slurm=null")
    if plan.config.cluster.device is Device.cuda and not k.gpu_resource:
        fix = f"set {WHERE}.gpu_resource to the name of the GPU resource, for example nvidia.com/gpu"
        yield broken("KUB-15", "the run needs GPUs, but gpu_resource is not set", f"{WHERE}.gpu_resource", fix=fix)
    gpu, is_cuda = plan.config.cluster.gpu, plan.config.cluster.device is Device.cuda
    vendor = VENDORS.get((k.gpu_resource or "").partition("/")[0])
    if is_cuda and gpu is not None and vendor not in (None, gpu.vendor):
        vendor_domain = next(name for name, vendor in VENDORS.items() if vendor is gpu.vendor)
        fix = f"set {WHERE}.gpu_resource to {vendor_domain}/gpu"
        yield broken(
            "KUB-15",
            f"gpu_resource is {k.gpu_resource}, but cluster.gpu is {gpu.name}, a GPU of another vendor",
            f"{WHERE}.gpu_resource",
            fix=fix,
        )
    if k.gpu_resource and k.gpu_resource in k.resources and plan.config.cluster.device is Device.cuda:
        what = f"resources contains {k.gpu_resource}, but cluster.ranks_per_node already sets the number of GPUs"
        yield broken(
            "KUB-15", what, f"{WHERE}.resources.{k.gpu_resource}", fix=f"remove {k.gpu_resource} from resources"
        )
    memory = k.resources.get("memory", "")
    if QUANTITY.fullmatch(memory) and 0 < amount(memory) <= k.shm_gib * 2**30:
        what = f"each pod requests {memory} of memory, but /dev/shm alone may use {k.shm_gib}Gi of this memory"
        fix = f"set resources.memory to more than {k.shm_gib}Gi, or lower shm_gib"
        yield broken("KUB-15", what, f"{WHERE}.resources.memory, shm_gib", fix=fix)
    for resource, quantity in k.resources.items():
        if QUANTITY.fullmatch(quantity) and amount(quantity) == 0:
            what = f"{resource} is {quantity}, but must be above 0"
            fix = f"set {resource} to more than 0, or remove {resource}"
            yield broken("KUB-15", what, f"{WHERE}.resources.{resource}", fix=fix)
    if k.workload_priority_class and not k.queue:
        what = "workload_priority_class is set without a queue, but only the queues of Kueue use this priority"
        yield broken(
            "KUB-15",
            what,
            f"{WHERE}.workload_priority_class",
            fix=f"set {WHERE}.queue, or remove workload_priority_class",
        )
    if k.run_as_user is not None and k.run_as_user < 1:
        fix = "set run_as_user to the id of a user who may write to the results volume"
        what = f"run_as_user is {k.run_as_user}, but must be 1 or more: pods may not run as root (user 0)"
        yield broken("KUB-15", what, f"{WHERE}.run_as_user", fix=fix)
    if not 1024 <= k.port <= 65535:
        fix = f"set {WHERE}.port to a number from 1024 to 65535"
        yield broken(
            "KUB-15",
            f"port is {k.port}, but must be from 1024 to 65535" + (": lower ports need root" if k.port < 1024 else ""),
            f"{WHERE}.port",
            fix=fix,
        )
    if k.shm_gib < 1 or k.grace_s < 1 or k.keep_h < 0:
        what = (
            f"shm_gib ({k.shm_gib}) and grace_s ({k.grace_s}) must be 1 or more, "
            f"and keep_h ({k.keep_h}) must be 0 or more"
        )
        fix = "set shm_gib and grace_s to 1 or more, and keep_h to 0 or more"
        yield broken("KUB-15", what, f"{WHERE}: shm_gib, grace_s, keep_h", fix=fix)
    is_version = bool(VERSION.fullmatch(k.version))  # `texts` reports an invalid version
    if k.queue and k.object is ObjectKind.job and is_version and not names.at_least(plan, "1.24"):
        what = (
            f"queue needs Kubernetes 1.24 or later, but version is {k.version}: Kueue would start each node separately"
        )
        yield broken("KUB-16", what, f"{WHERE}.queue", fix=f"set {WHERE}.queue=null")
    if k.object in (ObjectKind.jobset, ObjectKind.trainjob) and is_version and not names.at_least(plan, "1.27"):
        fix = f"set {WHERE}.version to the server version that `kubectl version` shows, or set {WHERE}.object=job"
        what = f"object={k.object.name} needs Kubernetes 1.27 or later, but version is {k.version}"
        yield broken("KUB-16", what, f"{WHERE}.version", fix=fix)


_ANY_PLACE = pod_template.Place(name="run", folder="/run", node="0", lead="run-0")
ONLY_OURS = ("containers", "hostname", "subdomain")
"""Fields of a pod that are set by the kind of object, so that a site cannot add to them."""


def further_fields(subject: Subject) -> Iterator[Finding]:
    """Yield the fields in `pod` and `container` that runstop sets itself."""
    plan, k, place = subject.plan, names.settings(subject.plan), _ANY_PLACE
    of_pod = [*sorted(pod_template.conflicts(pod_template.own_pod(plan, place), k.pod))]
    of_pod += [key for key in ONLY_OURS if key in k.pod]
    of_container = sorted(pod_template.conflicts(pod_template.own_container(plan, place), k.container))
    for key, paths in (("pod", of_pod), ("container", of_container)):
        for path in paths:
            what = f"{key} sets {path}, but runstop sets this field of a pod itself"
            fix = f"remove {path}, and use the keys of cluster.kubernetes in docs/kubernetes.md instead; "
            fix += "for a sidecar container, add an entry with restartPolicy: Always to initContainers"
            yield broken("KUB-15", what, f"{WHERE}.{key}", fix=fix)


def program_files(subject: Subject) -> Iterator[Finding]:
    """Yield files of the current folder that engine.command starts or passes on, and that no volume of the pods has."""
    program, k = subject.plan.config.program, names.settings(subject.plan)
    container = pod_template.merged(pod_template.own_container(subject.plan, _ANY_PLACE), k.container)
    paths = [one["mountPath"] for one in container["volumeMounts"]]
    mounted = [path for path in paths if path not in pod_template.OWN_PATHS]
    for place, text in enumerate(program.argv if program else []):
        is_here = Path(text).is_relative_to(Path.cwd()) and Path(text).is_file()
        if is_here and not any(Path(text).is_relative_to(path) for path in mounted):
            fix = (
                "put the file into the image or onto a volume of the pods, and change this argument to the path that "
                "the file has there (docs/your-program.md)"
            )
            what = f"the file {text} is on this machine, but no volume of the pods contains this file"
            yield broken("KUB-15", what, f"engine.command.argv[{place}]", fix=fix, severity="warning")


OLDEST_SCHEMA = "1.25"
"""The oldest version of Kubernetes whose schemas kubernetes-validate has."""


def pod_schema(subject: Subject) -> Iterator[Finding | str]:
    """Yield the first field of the pods that the schema of this version of Kubernetes does not have."""
    try:
        import kubernetes_validate
    except ImportError as error:
        raise CannotTellError(
            "kubernetes-validate is not installed; to install this package: pip install kubernetes-validate"
        ) from error
    plan = subject.plan
    pod = {"apiVersion": "v1", "kind": "Pod", **pod_template.template(plan, _ANY_PLACE)}
    version = names.settings(plan).version
    key = min(max(names.version_key(version), names.version_key(OLDEST_SCHEMA)), _newest_schema(kubernetes_validate))
    try:
        yield f"Kubernetes {kubernetes_validate.validate(pod, '.'.join(map(str, key)), strict=True)}"
    except kubernetes_validate.ValidationError as error:
        field = ".".join(map(str, error.absolute_path)) or "pod"
        what = f"the Kubernetes schema refuses the field {field}: {error.message:.300}"
        yield broken("KUB-15", what, f"{WHERE}.pod, container")


def _newest_schema(library: Any) -> tuple[int, ...]:
    return max(names.version_key(version) for version in library.utils.all_versions())


def _has_further_fields(plan: Plan) -> bool:
    return bool(names.settings(plan).pod or names.settings(plan).container)


CONFIG_CHECKS = (
    Check("Kubernetes names", ("KUB-15",), texts),
    Check("image", ("KUB-15",), image),
    Check("volumes", ("KUB-15",), volumes_of_config),
    Check("user", ("CFG-11",), owner),
    Check("job settings", ("KUB-15", "KUB-16"), shape),
    Check("further fields of pods", ("KUB-15",), further_fields, _has_further_fields),
    Check("schema of pods", ("KUB-15",), pod_schema, _has_further_fields),
    Check("files of the program", ("KUB-15",), program_files, lambda plan: plan.config.program is not None),
)


WHERE = "cluster.kubernetes"
VERBS = ("create", "delete", "list")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


def query_all(plan: Plan, script: str) -> Subject:
    """Return the subject with all answers of the API server; the requests run concurrently, each once."""
    k = names.settings(plan)
    objects = [one for one in manifest.load_all(script) if isinstance(one, dict)]
    kinds = list(dict.fromkeys(one["kind"] for one in objects))

    get = partial(partial, client.request, "GET", context=k.context)
    queries: dict[str, Callable[[], Any]] = {
        "version": get("/version"),
        "nodes": get("/api/v1/nodes"),
        "quota": get(client.path_of("ResourceQuota", k.namespace)),
        "namespace": get(f"/api/v1/namespaces/{k.namespace}"),
    }
    for claim in claims(plan):
        queries[f"claim {claim}"] = get(client.path_of("PersistentVolumeClaim", k.namespace, claim))
    for kind in kinds:
        queries[f"kind {kind}"] = get(PATHS[kind][0])
    for verb, kind in [*itertools.product(VERBS, kinds), ("list", "Pod")]:
        queries[f"may {verb} {kind}"] = partial(_may, k.context, k.namespace, verb, kind)
    for one in objects:
        queries[_dry_run_name(one)] = partial(client.create, one, context=k.context, dry_run=True)
    with ThreadPoolExecutor(4) as pool:
        answers = {name: pool.submit(_answer, query) for name, query in queries.items()}
    return Subject(plan, script, (), answers)


def _dry_run_name(item: Object) -> str:
    return f"dry run of {item['kind']} {item['metadata']['name']}"


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


def _answer(query: Callable[[], Any]) -> Answer:
    try:
        return Answer(200, json.dumps(query()), "")
    except ApiError as error:
        return Answer(error.status, error.reason, error.message)


def response(subject: Subject, name: str) -> Any:
    """Return the parsed answer of the API server to a query.

    Raises:
        CannotTellError: there is no answer, or the API server refused the query.
    """
    answer = raw_response(subject, name)
    if answer.exit_code != 200:
        raise CannotTellError(f"the API server refuses the query {name!r}: {answer.err or f'HTTP {answer.exit_code}'}")
    return json.loads(answer.out)


def raw_response(subject: Subject, name: str) -> Answer:
    """Return the answer to a query, also if it is a refusal.

    Raises:
        CannotTellError: there is no answer.
    """
    try:
        return subject.answers[name].result()
    except SubmitError as error:
        raise CannotTellError(error.what) from error


def reachable(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if the API server does not answer or is older than the config's version."""
    try:
        out = str(subject.answers["version"].result().out)
    except SubmitError as error:
        yield broken("KUB-12", error.what, error.where, fix=error.fix)
        return
    server = str((json.loads(out) if out.startswith("{") else {}).get("gitVersion", ""))
    configured = names.settings(subject.plan).version
    yield server
    if server and names.version_key(server) < names.version_key(configured):
        fix = f"set {WHERE}.version={'.'.join(map(str, names.version_key(server)))}"
        what = f"the API server has version {server}, which is older than {WHERE}.version={configured}"
        yield broken("KUB-16", what, f"{WHERE}.version={configured}", fix=fix)


def kinds(subject: Subject) -> Iterator[Finding | str]:
    """Yield the kinds of objects that the cluster does not support."""
    for name in subject.answers:
        if not name.startswith("kind "):
            continue
        kind = name.removeprefix("kind ")
        is_known = raw_response(subject, name).exit_code != 404
        group = PATHS[kind][0].removeprefix("/apis/").removeprefix("/api/")
        available = [one["kind"] for one in response(subject, name)["resources"]] if is_known else []
        if kind not in available:
            fix = f"ask the admins to install the operator that provides {kind}, or set {WHERE}.object=job"
            yield broken(
                "KUB-06",
                f"the Kubernetes cluster does not support the kind {kind} ({group})",
                f"{WHERE}.object",
                fix=fix,
            )
        else:
            yield f"{kind} {group}"


def permissions(subject: Subject) -> Iterator[Finding | str]:
    """Yield the permissions that this user lacks."""
    required = [name for name in subject.answers if name.startswith("may ")]
    missing = [name.removeprefix("may ") for name in required if not response(subject, name)["status"].get("allowed")]
    if missing:
        namespace = names.settings(subject.plan).namespace
        yield broken("KUB-07", f"this user has no permission to {', '.join(missing)}", f"namespace {namespace}")
    else:
        yield f"{len(required)} permissions"


def accepted(subject: Subject) -> Iterator[Finding | str]:
    """Yield the API server's errors from a dry run, which validates each object of the manifest without creating it."""
    count = 0
    for name in subject.answers:
        if not name.startswith("dry run of "):
            continue
        answer, count = raw_response(subject, name), count + 1
        if answer.exit_code in (200, 409):  # 409: this manifest is already applied
            continue
        rule = client.rule_of(answer.out, answer.err) or "KUB-15"
        if answer.exit_code != 404:  # 404: the check of kinds reports it
            yield broken(rule, f"the API server refuses the object: {answer.err}", name)
    yield f"{count} objects"


def offered(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if too few nodes have the resources that a pod requests; other pods are not considered."""
    plan, required = subject.plan, resources(subject.plan)
    nodes = [node for node in response(subject, "nodes")["items"] if _is_candidate(node, plan)]
    able = [node for node in nodes if _lacks(node, required) == []]
    yield f"{len(able)} of {len(nodes)} nodes"
    if len(able) < plan.world.num_nodes:
        lacking = sorted({one for node in nodes for one in _lacks(node, required)})
        nowhere = [one for one in lacking if all(one not in _allocatable(node) for node in nodes)]
        what = f"only {len(able)} nodes are large enough for a pod, but the run needs {plan.world.num_nodes} nodes"
        if nowhere:
            what = f"no node has the resource {', '.join(nowhere)}, which the pods request"
        elif lacking:
            what += f"; the other nodes have too little {', '.join(lacking)}"
        if not nowhere and (avoided := plan.config.cluster.avoided):
            what += f"; left out: {', '.join(f'{name} ({why})' for name, why in avoided.items())}"
        where = f"{WHERE}.resources, gpu_resource, node_selector"
        where += ", cluster.avoid" if plan.config.cluster.avoided else ""
        yield broken("KUB-17" if nowhere else "KUB-02", what, where)


def _is_candidate(node: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether pods of the run may be scheduled onto a node: selector, excluded nodes, cordon and taints."""
    k, labels = names.settings(plan), node["metadata"].get("labels") or {}
    if any(labels.get(name) != value for name, value in k.node_selector.items()):
        return False
    if node["metadata"]["name"] in names.excluded(plan) or (node.get("spec") or {}).get("unschedulable"):
        return False
    tolerated = {(one.taint, one.value) for one in k.tolerations}
    taints = [t for t in (node.get("spec") or {}).get("taints") or [] if t["effect"] != "PreferNoSchedule"]
    return all((t["key"], None) in tolerated or (t["key"], t.get("value")) in tolerated for t in taints)


def _lacks(node: Mapping[str, Any], required: Mapping[str, str]) -> list[str]:
    allocatable = _allocatable(node)
    return [name for name, quantity in required.items() if amount(str(allocatable.get(name, "0"))) < amount(quantity)]


def _allocatable(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node's allocatable resources; empty if its kubelet has not reported yet."""
    return node["status"].get("allocatable") or {}


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity as a number: 500m is 0.5, 2Ki is 2048."""
    for unit in sorted(_UNITS, key=len, reverse=True):
        if quantity.endswith(unit):
            return float(quantity.removesuffix(unit)) * _UNITS[unit]
    return float(quantity)


def quota(subject: Subject) -> Iterator[Finding | str]:
    """Yield the quotas of the namespace that are too small for the pods of a run."""
    totals = {name: amount(text) * subject.plan.world.num_nodes for name, text in resources(subject.plan).items()}
    pods = {"pods": float(subject.plan.world.num_nodes)}
    requested = pods | totals | {f"requests.{name}": number for name, number in totals.items()}
    requested |= {f"limits.{name}": number for name, number in totals.items()}
    requested |= _object_counts(subject.script)
    quotas = response(subject, "quota")["items"]
    yield f"{len(quotas)} quotas" if quotas else "none"
    for one in quotas:
        hard, used = one["status"].get("hard") or {}, one["status"].get("used") or {}
        for resource, number in requested.items():
            if resource in hard and number > (left := amount(hard[resource]) - amount(used.get(resource, "0"))):
                limit = hard[resource]
                what = f"the run requests {number:g} {resource}, but the quota has only {left:g} left (limit: {limit})"
                yield broken("KUB-11", what, f"quota {one['metadata']['name']}")
        for resource in sorted(_LIMITED & hard.keys() - requested.keys()):
            key = resource.rpartition(".")[2]
            what = f"the pods do not set {key}: without a LimitRange, the quota of {resource} refuses such pods"
            fix = f"set {WHERE}.resources.{key}"
            yield broken("KUB-11", what, f"quota {one['metadata']['name']}", fix=fix, severity="warning")


_LIMITED = frozenset(f"{kind}{name}" for kind in ("", "requests.", "limits.") for name in ("cpu", "memory"))
"""Quotas of these need every pod of the namespace to request the resource."""


def _object_counts(script: str) -> dict[str, float]:
    """Return how many objects of each kind a run creates, by the names that quotas have for them."""
    counts: Counter[str] = Counter()
    for item in manifest.load_all(script):
        group, plural = PATHS[item["kind"]]
        is_core = group.startswith("/api/")
        counts[f"count/{plural}" + ("" if is_core else f".{group.split('/')[2]}")] += 1
        counts[plural] += is_core
    return {name: float(count) for name, count in counts.items() if count}


def claims(plan: Plan) -> list[str]:
    """Return the names of the PersistentVolumeClaims that a run mounts."""
    k = names.settings(plan)
    volumes: tuple[Volume | None, ...] = (k.results, k.data, k.model)
    return list(dict.fromkeys(volume.claim for volume in volumes if volume is not None and volume.claim))


def claims_exist(subject: Subject) -> Iterator[Finding | str]:
    """Yield claims that are missing, not bound, or mountable on one node only."""
    for claim in claims(subject.plan):
        answer = raw_response(subject, f"claim {claim}")
        if answer.exit_code == 404:
            where = f"namespace {names.settings(subject.plan).namespace}"
            yield broken("KUB-08", f"PersistentVolumeClaim {claim} does not exist", where)
            continue
        item = response(subject, f"claim {claim}")
        phase, modes = item["status"].get("phase"), item["spec"].get("accessModes") or []
        yield f"{claim} {phase} {','.join(modes)} ({item['spec'].get('storageClassName') or 'no storage class'})"
        if phase != "Bound":
            what = (
                f"the claim {claim} has the phase {phase}, not Bound; some storage classes bind only when a pod starts"
            )
            yield broken("KUB-08", what, f"storage class {item['spec'].get('storageClassName')}", severity="warning")
        if subject.plan.world.num_nodes > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            what = f"the run has several nodes, but only one node can mount the claim {claim} ({', '.join(modes)})"
            yield broken("KUB-08", what, f"{WHERE}: results, data, model")


def security_level(subject: Subject) -> Iterator[Finding | str]:
    """Yield what the Pod Security level of the namespace refuses in the pods."""
    labels = response(subject, "namespace")["metadata"].get("labels") or {}
    level = str(labels.get(pod_security.ENFORCE, pod_security.PRIVILEGED))
    yield level
    pod = pod_template.template(subject.plan, _ANY_PLACE)["spec"]
    if refused := pod_security.violations(pod, level):
        what = f"the namespace's Pod Security level {level} refuses {'; '.join(refused)}"
        fix = "remove these settings, or use a namespace with another Pod Security level"
        yield broken("KUB-11", what, f"namespace {names.settings(subject.plan).namespace}", fix=fix)


SITE_CHECKS = (
    Check("API server", ("KUB-12", "KUB-16"), reachable),
    Check("object kinds", ("KUB-06",), kinds),
    Check("permissions", ("KUB-07",), permissions),
    Check("server-side dry run", ("KUB-15", "KUB-07", "KUB-11"), accepted),
    Check("nodes", ("KUB-02", "KUB-17"), offered),
    Check("quota", ("KUB-11",), quota),
    Check("Pod Security level", ("KUB-11",), security_level),
    Check("claims", ("KUB-08",), claims_exist, lambda plan: bool(claims(plan))),
)
