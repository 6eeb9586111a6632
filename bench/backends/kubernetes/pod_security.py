"""The Pod Security Standards: what the levels `baseline` and `restricted` of a namespace refuse in a pod.

Source: Kubernetes 1.31, concepts/security/pod-security-standards and k8s.io/pod-security-admission/policy.
"""

from collections.abc import Iterator, Mapping
from typing import Any

ENFORCE = "pod-security.kubernetes.io/enforce"
"""The label of a namespace with the level that its pods must fit."""
PRIVILEGED, BASELINE, RESTRICTED = LEVELS = ("privileged", "baseline", "restricted")
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_CAPABILITIES = frozenset(
    ("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE")
    + ("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT")
)
_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
_SELINUX = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SYSCTLS = frozenset(
    ("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start")
    + ("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports")
    + ("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl")
    + ("net.ipv4.tcp_keepalive_probes",)
)
Fields = Mapping[str, Any]


def violations(pod: Fields, level: str) -> list[str]:
    """Return the fields of a pod's spec that a level refuses; none for `privileged` and unknown levels."""
    if level not in (BASELINE, RESTRICTED):
        return []
    restricted = [*_restricted(pod)] if level == RESTRICTED else []
    return list(dict.fromkeys([*_baseline(pod), *restricted]))


def _containers(pod: Fields) -> Iterator[tuple[str, Fields, Fields]]:
    """Yield the name, the container and the security context of each container."""
    for kind in ("initContainers", "containers"):
        for one in pod.get(kind) or []:
            yield str(one.get("name")), one, one.get("securityContext") or {}


def _contexts(pod: Fields) -> Iterator[tuple[str, Fields]]:
    yield "securityContext", pod.get("securityContext") or {}
    yield from ((f"{name}: securityContext", context) for name, _, context in _containers(pod))


def _baseline(pod: Fields) -> Iterator[str]:
    yield from (key for key in _HOST if pod.get(key))
    yield from (f"volumes: {one.get('name')} is a hostPath" for one in pod.get("volumes") or [] if "hostPath" in one)
    for path, context in _contexts(pod):
        if (context.get("windowsOptions") or {}).get("hostProcess"):
            yield f"{path}.windowsOptions.hostProcess"
        for key in ("seccompProfile", "appArmorProfile"):
            if (context.get(key) or {}).get("type") == "Unconfined":
                yield f"{path}.{key} is Unconfined"
        selinux = context.get("seLinuxOptions") or {}
        if selinux.get("type", "") not in _SELINUX or selinux.get("user") or selinux.get("role"):
            yield f"{path}.seLinuxOptions"
    for one in (pod.get("securityContext") or {}).get("sysctls") or []:
        if one.get("name") not in _SYSCTLS:
            yield f"securityContext.sysctls: {one.get('name')}"
    for name, container, context in _containers(pod):
        if context.get("privileged"):
            yield f"{name}: privileged"
        if context.get("procMount", "Default") != "Default":
            yield f"{name}: procMount"
        yield from (f"{name}: hostPort" for port in container.get("ports") or [] if port.get("hostPort"))
        yield from (f"{name}: capability {one}" for one in _added(context) if one not in _CAPABILITIES)


def _restricted(pod: Fields) -> Iterator[str]:
    of_pod = pod.get("securityContext") or {}
    for volume in pod.get("volumes") or []:
        if not _VOLUMES & volume.keys() and "hostPath" not in volume:
            yield f"volumes: {volume.get('name')} has no permitted type"
    for name, _, context in _containers(pod):
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation must be false"
        if not context.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
            yield f"{name}: runAsNonRoot must be true"
        if context.get("runAsUser", of_pod.get("runAsUser")) == 0:
            yield f"{name}: runAsUser is 0"
        profile = context.get("seccompProfile") or of_pod.get("seccompProfile") or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: seccompProfile must be RuntimeDefault or Localhost"
        if "ALL" not in ((context.get("capabilities") or {}).get("drop") or []):
            yield f"{name}: capabilities.drop must contain ALL"
        yield from (f"{name}: capability {one}" for one in _added(context) if one != "NET_BIND_SERVICE")


def _added(context: Fields) -> list[str]:
    return list((context.get("capabilities") or {}).get("add") or [])
