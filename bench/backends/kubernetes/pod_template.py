"""Build the pod template of one node of a run: container, resources, volumes, environment and scheduling rules.

Every value of the config is a separate YAML value: no text is concatenated and no shell reads it. Kubernetes itself
expands $(NAME) in arguments and variables; `literal` escapes the values of the config.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.backends.kubernetes import names
from bench.contract import plan as plans
from bench.contract.cluster import Discovery, Toleration, Volume
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.contract.schema import Device

Object = dict[str, Any]
PLAN_FOLDER = "/etc/runstop"
ENTRY = ("python", "-m", "bench.backends.kubernetes.entry")
HOME = "/tmp"
"""The home folder of a user id that the image does not define; caches and temporary files are written there."""
OWN_PATHS = (PLAN_FOLDER, "/dev/shm", HOME, "/")
"""Paths in pods that no folder of a run may have."""
DEADLINE_MARGIN_S = 120
"""The pod's deadline is this much later than the run's time limit, so that the runner can shut down by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits in minutes that replace the plan's when a run is resumed with other limits."""

    job_min: int | None = None
    trial_min: int | None = None


AS_PLANNED = TimeLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The job of a pod, and the pod's node number in the run."""

    name: str
    """The job's name."""
    folder: str
    """The path of the run folder in the pod."""
    node: str
    """The node number, or a $(VARIABLE) that the controller sets to it."""
    lead: str
    """The host name of the first pod."""
    container: str = "runstop"
    """Some controllers require a fixed container name."""
    limits: TimeLimits = AS_PLANNED
    is_alone: bool = True
    """Whether no other pod of the run may be on its node."""


def template(plan: Plan, place: Place, **spec: Any) -> Object:
    """Return a pod template; `spec` adds fields to the pod's spec, such as its host name."""
    cluster = names.settings(plan)
    more = {names.NODE: place.node} if place.node.isdecimal() else {}
    metadata: Object = {"labels": cluster.labels | names.labels(place.name, more)}
    networks = {"k8s.v1.cni.cncf.io/networks": ", ".join(cluster.networks)} if cluster.networks else {}
    if annotations := cluster.annotations | networks:
        metadata["annotations"] = annotations
    pod = merged(own_pod(plan, place) | spec, cluster.pod)
    pod["containers"] = [merged(own_container(plan, place), cluster.container)]
    if affinity := _affinity(plan, place, pod.pop("affinity", {})):
        pod["affinity"] = affinity
    return {"metadata": metadata, "spec": pod}


def merged(own: Any, further: Any) -> Any:
    """Return a value with a site's further fields: objects are merged, lists of objects appended; our values stay."""
    if isinstance(own, dict) and isinstance(further, dict):
        return own | {key: merged(own[key], value) if key in own else value for key, value in further.items()}
    return [*own, *further] if _is_of_objects(own) and _is_of_objects(further) else own


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def conflicts(own: Any, further: Any, path: str = "") -> Iterator[str]:
    """Yield the paths in a site's further fields that runstop sets itself, to another value."""
    if isinstance(own, dict) and isinstance(further, dict):
        for key in own.keys() & further.keys():
            yield from conflicts(own[key], further[key], f"{path}.{key}".lstrip("."))
    elif _is_of_objects(own) and _is_of_objects(further):
        known = {(key, one[key]) for one in own for key in _KEYS & one.keys()}
        for one in further:
            if any((key, one[key]) in known for key in _KEYS & one.keys()):
                yield f"{path}: {one.get('name') or one.get('mountPath')}"
    elif own != further:
        yield path


_KEYS = frozenset(("name", "mountPath"))
"""Fields that identify the item of a list."""


def literal(text: str) -> str:
    """Return a text with $ escaped, in which Kubernetes expands no variable."""
    return text.replace("$", "$$")


def own_pod(plan: Plan, place: Place) -> Object:
    """Return what runstop sets in a pod's spec, without its container and affinity."""
    cluster = names.settings(plan)
    pod: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _limit_s(plan, place.limits) + DEADLINE_MARGIN_S,
        "terminationGracePeriodSeconds": cluster.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _user(plan),
        "containers": [],
        "volumes": [*_volumes(plan, place)],
    }
    optional: Object = {
        "hostNetwork": cluster.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if cluster.host_network else None,
        "serviceAccountName": cluster.service_account,
        "priorityClassName": cluster.priority_class,
        "nodeSelector": cluster.node_selector,
        "tolerations": [_toleration(one) for one in cluster.tolerations],
        "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets],
    }
    return pod | {key: value for key, value in optional.items() if value}


def _limit_s(plan: Plan, limits: TimeLimits) -> int:
    """Return the time limit of a run. The deadline is set on pods, so the time in the queue does not count."""
    limit_min = plan.walltime_min if limits.job_min is None else limits.job_min
    assert limit_min is not None  # plan validation requires it for backends with a queue
    return 60 * limit_min


def _user(plan: Plan) -> Object:
    cluster = names.settings(plan)
    group = cluster.run_as_user if cluster.run_as_group is None else cluster.run_as_group
    user = {} if cluster.run_as_user is None else {"runAsUser": cluster.run_as_user}
    groups = {} if group is None else {"runAsGroup": group, "fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, **user, **groups, "seccompProfile": {"type": "RuntimeDefault"}}


def own_container(plan: Plan, place: Place) -> Object:
    """Return what runstop sets in a pod's container."""
    cluster = names.settings(plan)
    requests, from_secrets = resources(plan), cluster.env_from_secrets
    return {
        "name": place.container,
        "image": cluster.image or "",
        "imagePullPolicy": "IfNotPresent",
        "command": [*ENTRY],
        "args": _arguments(plan, place),
        "workingDir": HOME,
        "env": [*_environment(plan, place)],
        **({"envFrom": [{"secretRef": {"name": name}} for name in from_secrets]} if from_secrets else {}),
        "resources": {"requests": requests, "limits": requests} if requests else {},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], **({"add": cluster.capabilities} if cluster.capabilities else {})},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*_mounts(plan)],
    }


def _arguments(plan: Plan, place: Place) -> list[str]:
    words = ["--node", place.node, "--lead", _lead(plan, place), "--limit-s", f"{_limit_s(plan, place.limits):d}"]
    trial_min = place.limits.trial_min
    return [literal(place.folder), *words, *([] if trial_min is None else ["--trial-min", f"{trial_min:d}"])]


def _lead(plan: Plan, place: Place) -> str:
    cluster = names.settings(plan)
    return f"{place.lead if cluster.discovery is Discovery.service else Discovery.file.name}:{cluster.port}"


def _environment(plan: Plan, place: Place) -> Iterator[Object]:
    """Yield the runner's environment variables; those of the ranks are in the plan."""
    values = {"RUNSTOP_JOB": literal(str(names.job_id(plan, place.name))), "HOME": HOME, "USER": names.OURS}
    yield from ({"name": name, "value": value} for name, value in values.items())
    for name, field in (
        ("RUNSTOP_NODE_NAME", "spec.nodeName"),
        ("RUNSTOP_POD_IP", "status.podIP"),
        ("RUNSTOP_POD_UID", "metadata.uid"),
    ):
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def resources(plan: Plan) -> dict[str, str]:
    """Return the resource requests of a pod, which are also its limits: GPUs and the cluster's `resources`."""
    cluster, is_cuda = names.settings(plan), plan.config.cluster.device is Device.cuda
    gpus = {cluster.gpu_resource: str(plans.gpus_per_node(plan))} if is_cuda and cluster.gpu_resource else {}
    return gpus | cluster.resources


def _toleration(one: Toleration) -> Object:
    toleration = {"key": one.taint, "operator": "Exists" if one.value is None else "Equal"}
    return toleration | {key: text for key, text in (("value", one.value), ("effect", one.effect)) if text is not None}


def _affinity(plan: Plan, place: Place, further: Mapping[str, Any]) -> Object:
    """Return the site's affinity rules with ours: one pod of the run per node, and no pod on excluded nodes."""
    affinity, rule = dict(further), "requiredDuringSchedulingIgnoredDuringExecution"
    if plan.world.num_nodes > 1 and place.is_alone:
        others = {"labelSelector": {"matchLabels": {names.RUN: place.name}}, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = merged({rule: [others]}, affinity.get("podAntiAffinity", {}))
    if left_out := names.excluded(plan):
        expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": left_out}
        node = dict(affinity.get("nodeAffinity", {}))
        terms = node.get(rule, {}).get("nodeSelectorTerms", [{}])  # a node needs to match one of them
        node[rule] = {"nodeSelectorTerms": [merged({"matchExpressions": [expression]}, term) for term in terms]}
        affinity["nodeAffinity"] = node
    return affinity


@dataclass(frozen=True, slots=True)
class _Mounted:
    name: str
    volume: Volume
    path: str
    is_read_only: bool


def _mounted(plan: Plan) -> list[_Mounted]:
    """Return the run's folders, each path once; a path that any of them writes to is writable."""
    cluster, paths = names.settings(plan), plan.config.cluster.paths
    inputs = plan.inputs
    makes_rows = inputs.rows is not None and inputs.rows_are_prepared
    wanted = (
        ("results", cluster.results, paths.logs, False),
        ("model", cluster.model, paths.model if inputs.checkpoint else None, not inputs.checkpoint_is_created),
        ("data", cluster.data, paths.data if inputs.rows else None, not makes_rows),
    )
    mounts: dict[str, _Mounted] = {}
    for name, volume, path, is_read_only in wanted:
        if volume is not None and path:
            earlier = mounts.get(path)
            is_read_only = is_read_only and (earlier is None or earlier.is_read_only)
            mounts[path] = _Mounted(earlier.name if earlier else name, volume, path, is_read_only)
    return sorted(mounts.values(), key=lambda one: one.path)


def _volumes(plan: Plan, place: Place) -> Iterator[Object]:
    shm: Mapping[str, str] = {"medium": "Memory", "sizeLimit": f"{names.settings(plan).shm_gib:d}Gi"}
    yield {"name": "plan", "configMap": {"name": place.name}}
    yield {"name": "shm", "emptyDir": dict(shm)}
    yield {"name": "tmp", "emptyDir": {}}
    for one in _mounted(plan):
        if one.volume.claim is not None:
            yield {
                "name": one.name,
                "persistentVolumeClaim": {"claimName": one.volume.claim, "readOnly": one.is_read_only},
            }
        else:
            yield {"name": one.name, "hostPath": {"path": one.volume.host_path or "", "type": "Directory"}}


def _mounts(plan: Plan) -> Iterator[Object]:
    yield {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True}
    yield {"name": "shm", "mountPath": "/dev/shm"}
    yield {"name": "tmp", "mountPath": HOME}
    for one in _mounted(plan):
        mount: Object = {"name": one.name, "mountPath": one.path, "readOnly": one.is_read_only}
        yield mount | ({"subPath": one.volume.sub_path} if one.volume.sub_path else {})


def plan_file() -> str:
    """Return the path of the plan in a pod."""
    return f"{PLAN_FOLDER}/{PLAN}"
