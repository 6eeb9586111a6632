"""Whether what a config says of a Kubernetes cluster can become pods, as far as the config alone tells."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from bench.backends.kubernetes import names
from bench.contract.kubernetes import ObjectKind
from bench.contract.plan import Plan
from bench.contract.schema import Device, Runtime
from bench.rules.check import Check, Finding, Subject, broken

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


def volumes(subject: Subject) -> Iterator[Finding]:
    """Yield which folders of the run no volume stands behind, and volumes that are none."""
    plan, k = subject.plan, names.settings(subject.plan)
    paths = plan.config.cluster.paths
    wanted = (
        ("results", k.results, paths.logs, "logs"),
        ("data", k.data, paths.data if plan.data_dir else None, "data"),
        ("model", k.model, paths.model if plan.base_dir else None, "model"),
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


CHECKS = (
    Check("names for Kubernetes", ("KUB-15",), texts),
    Check("image", ("KUB-15",), image),
    Check("volumes", ("KUB-15",), volumes),
    Check("user", ("KUB-15",), owner),
    Check("shape of the job", ("KUB-15", "KUB-16"), shape),
)
