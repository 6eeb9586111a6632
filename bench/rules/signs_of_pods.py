"""Patterns of what Kubernetes says about pods: output of `kubectl get` and `kubectl describe`, and events.

Some problems end by themselves, such as a pod that waits for a node: their patterns weigh less than a cause.

Sources: the code of Kubernetes: pkg/kubelet/events/event.go, pkg/kubelet/images/types.go,
pkg/kubelet/container/sync_result.go, pkg/kubelet/kuberuntime/kuberuntime_container.go,
pkg/kubelet/eviction/helpers.go, pkg/kubelet/active_deadline.go, pkg/scheduler/framework/types.go.

- Preempted: the scheduler's event (pkg/scheduler/framework/preemption/preemption.go, "Preempted by pod UID on node
  NAME"). The kubelet's reason for its own victims is Preempting (pkg/kubelet/preemption/preemption.go).
- NodeNotReady: an event of the pods of a lost node (pkg/controller/util/node/controller_utils.go). NodeLost is the
  reason of their status in older versions (pkg/util/node/node.go).
- TaintManagerEviction: also the event of a deletion that is cancelled (pkg/controller/tainteviction).
- OOMKilling: an event about the node from node-problem-detector (config/kernel-monitor.json).
- DeadlineExceeded: also a code of gRPC, which the kubelet prints for other problems (`code = DeadlineExceeded`).
"""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "KUB-03": (rb"\bOOMKilled\b|\bOOMKilling\b",),
    "KUB-04": (
        rb"The node was low on resource: |[Rr]eason: {1,20}(?:Evicted|Preempting)\b|\b\d+/\d+ {1,20}Evicted\b",
        rb"\bPreempted by .{1,300} on node |Preempted in order to admit critical pod|DisruptionTarget",
    ),
    "KUB-09": (rb"(?<!code = )\bDeadlineExceeded\b|active on the node longer than the specified deadline",),
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
    "KUB-04": (rb"TaintManagerEviction\b.{1,100}Marking for deletion",),
    "KUB-05": (rb"\bCrashLoopBackOff\b|Back-off restarting failed container",),
}
