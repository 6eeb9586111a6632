"""Patterns of what Kubernetes says about pods: output of `kubectl get` and `kubectl describe`, and events.

Some problems end by themselves, such as a pod that waits for a node: their patterns weigh less than a cause.

Sources: the code of Kubernetes: pkg/kubelet/events/event.go, pkg/kubelet/images/types.go,
pkg/kubelet/container/sync_result.go, pkg/kubelet/kuberuntime/kuberuntime_container.go,
pkg/kubelet/eviction/helpers.go, pkg/kubelet/active_deadline.go, pkg/scheduler/framework/types.go,
pkg/controller/tainteviction. OOMKilling is an event of node-problem-detector.
"""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "KUB-03": (rb"\bOOMKilled\b|\bOOMKilling\b",),
    "KUB-04": (
        rb"The node was low on resource: |[Rr]eason: {1,20}(?:Evicted|Preempted)\b|\b\d+/\d+ {1,20}Evicted\b",
        rb"TaintManagerEviction|\bPreempted by |DisruptionTarget",
    ),
    "KUB-09": (rb"\bDeadlineExceeded\b|active on the node longer than the specified deadline",),
    "KUB-11": (rb"forbidden: exceeded quota|exceeded quota: |admission webhook .{1,200} denied the request",),
    "KUB-07": (rb"is forbidden: User .{1,200} cannot ",),
    "KUB-10": (
        rb"\bCreateContainer(?:Config)?Error\b|\bRunContainerError\b|FailedCreatePodSandBox",
        rb"Error: (?:secret|configmap) \".{1,200}\" not found",
    ),
    "KUB-06": (rb"no matches for kind \"",),
}

CRASHES: dict[str, tuple[bytes, ...]] = {
    "KUB-13": (rb"\bNodeNotReady\b|\bNodeLost\b|node\.kubernetes\.io/(?:unreachable|not-ready):NoExecute",),
}

DEATHS: dict[str, tuple[bytes, ...]] = {
    "KUB-01": (
        rb"\bImagePullBackOff\b|\bErrImage(?:Pull|NeverPull)\b|\bInvalidImageName\b",
        rb"Failed to pull image \"|Back-off pulling image \"",
    ),
    "KUB-08": (
        rb"FailedMount\b|FailedAttachVolume|Unable to attach or mount volumes|MountVolume\.SetUp failed",
        rb"unbound immediate PersistentVolumeClaims|persistentvolumeclaim \".{1,200}\" not found",
    ),
    "KUB-02": (rb"\bFailedScheduling\b|\b\d+/\d+ nodes are available: |Insufficient nvidia\.com/gpu",),
    "KUB-05": (rb"\bCrashLoopBackOff\b|Back-off restarting failed container",),
}
