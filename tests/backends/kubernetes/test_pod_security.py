"""The Pod Security Standards: the restricted and allowed values of each control, as Kubernetes documents them."""

import copy
from typing import Any

import pytest

from bench.backends.kubernetes.pod_security import violations

SAFE: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "a", "emptyDir": {}}],
    "containers": [
        {
            "name": "c",
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
    ],
}
BOTH, RESTRICTED = ("baseline", "restricted"), ("restricted",)
CONTAINER, CONTEXT = ("containers", 0), ("containers", 0, "securityContext")
CASES: list[tuple[tuple[Any, ...], Any, tuple[str, ...]]] = [
    (("hostNetwork",), True, BOTH),
    (("hostPID",), True, BOTH),
    (("hostIPC",), True, BOTH),
    (("hostNetwork",), False, ()),
    ((*CONTEXT, "privileged"), True, BOTH),
    ((*CONTEXT, "windowsOptions"), {"hostProcess": True}, BOTH),
    ((*CONTEXT, "capabilities", "add"), ["IPC_LOCK"], BOTH),
    ((*CONTEXT, "capabilities", "add"), ["SYS_ADMIN"], BOTH),
    ((*CONTEXT, "capabilities", "add"), ["CHOWN"], RESTRICTED),
    ((*CONTEXT, "capabilities", "add"), ["NET_BIND_SERVICE"], ()),
    ((*CONTEXT, "capabilities", "drop"), ["KILL"], RESTRICTED),
    ((*CONTAINER, "ports"), [{"containerPort": 1, "hostPort": 1}], BOTH),
    ((*CONTAINER, "ports"), [{"containerPort": 1}], ()),
    ((*CONTEXT, "procMount"), "Unmasked", BOTH),
    ((*CONTEXT, "allowPrivilegeEscalation"), True, RESTRICTED),
    ((*CONTEXT, "seccompProfile"), {"type": "Unconfined"}, BOTH),
    ((*CONTEXT, "seccompProfile"), {"type": "Localhost", "localhostProfile": "a"}, ()),
    (("securityContext", "seccompProfile"), None, RESTRICTED),
    (("securityContext", "appArmorProfile"), {"type": "Unconfined"}, BOTH),
    (("securityContext", "seLinuxOptions"), {"type": "container_t"}, ()),
    (("securityContext", "seLinuxOptions"), {"type": "spc_t"}, BOTH),
    (("securityContext", "seLinuxOptions"), {"user": "root"}, BOTH),
    (("securityContext", "sysctls"), [{"name": "kernel.msgmax", "value": "1"}], BOTH),
    (("securityContext", "sysctls"), [{"name": "net.ipv4.tcp_syncookies", "value": "1"}], ()),
    (("securityContext", "runAsNonRoot"), None, RESTRICTED),
    (("securityContext", "runAsUser"), 0, RESTRICTED),
    (("securityContext", "runAsUser"), 1000, ()),
    (("volumes", 0), {"name": "a", "hostPath": {"path": "/"}}, BOTH),
    (("volumes", 0), {"name": "a", "nfs": {"server": "b", "path": "/"}}, RESTRICTED),
    (("volumes", 0), {"name": "a", "ephemeral": {}}, ()),
    (("initContainers",), [{"name": "i"}], RESTRICTED),
]


@pytest.mark.parametrize(("path", "value", "levels"), CASES, ids=lambda value: str(value)[:40])
def test_each_level_refuses_the_values_that_its_controls_restrict(
    path: tuple[Any, ...], value: Any, levels: tuple[str, ...]
) -> None:
    assert [level for level in ("privileged", *BOTH) if violations(SAFE, level)] == []
    pod = copy.deepcopy(SAFE)
    holder = pod
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert tuple(level for level in ("privileged", *BOTH) if violations(pod, level)) == levels
