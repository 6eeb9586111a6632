"""Texts of the rules about pods and the cluster that runs them.

Each is ID -> (what is wrong, how to fix it).
"""

from bench.rules.cluster import Texts

KUBERNETES: Texts = {
    "KUB-01": (
        "the node cannot pull the image",
        "check name, digest and registry in cluster.kubernetes.image, and image_pull_secrets: "
        "`kubectl describe pod` shows the registry's answer",
    ),
    "KUB-02": (
        "no node can run a pod of the run",
        "compare the requests of the pod (GPUs, resources, node_selector, tolerations, one pod per node) with "
        "`kubectl describe node`; the evidence shows which resources the nodes lack",
    ),
    "KUB-03": (
        "a container exceeded its memory limit and was killed (OOMKilled)",
        "raise memory in cluster.kubernetes.resources, or lower shm_gib, because shared memory counts as memory "
        "of the pod; this is host memory, not GPU memory",
    ),
    "KUB-04": (
        "a pod was evicted or preempted",
        "the run resumes by itself; to prevent it, set cluster.kubernetes.priority_class, and set the memory limit "
        "equal to the memory request",
    ),
    "KUB-05": (
        "a container exits right after it starts",
        "`kubectl logs POD --previous` shows the reason; often the image does not contain runstop or its engine",
    ),
    "KUB-06": (
        "this kind of object does not exist in the cluster",
        "ask the admins to install its operator (JobSet, Kubeflow), or set cluster.kubernetes.object=job, which needs "
        "no operator",
    ),
    "KUB-07": (
        "this user does not have the permission in the namespace",
        "request the role in docs/kubernetes.md; `kubectl auth can-i --list` lists your permissions",
    ),
    "KUB-08": (
        "a volume cannot be mounted: its claim is missing or pending, or not all nodes can mount it",
        "`kubectl describe pvc` shows the reason; a run of several pods needs the access mode ReadWriteMany",
    ),
    "KUB-09": (
        "a pod reached its deadline",
        "raise walltime (minutes per trial; `runstop resume RUN --walltime MIN`)",
    ),
    "KUB-10": (
        "a container of the run cannot be created",
        "`kubectl describe pod` shows what is missing: a Secret, a ConfigMap, a folder on the node, a user",
    ),
    "KUB-11": (
        "the namespace accepts no more pods: its quota is used up, or an admission rule rejects them",
        "`kubectl describe quota` and `kubectl get events` show the reason: request less, or ask the admins for a "
        "larger quota",
    ),
    "KUB-12": (
        "the API server does not answer, or the Kubernetes client is not installed",
        "`kubectl cluster-info` must work here; pip install 'runstop[kubernetes]'; set KUBECONFIG or "
        "cluster.kubernetes.context",
    ),
    "KUB-13": (
        "the node of a pod is lost",
        "`kubectl get nodes` shows which node is not ready. Exclude this node (cluster.kubernetes.exclude_nodes),"
        " and inform the admins. Its pods are replaced after the node is removed, or after the pods are deleted "
        "by force",
    ),
    "KUB-14": (
        "NCCL uses an interface inside of the node, such as a container bridge, that other nodes cannot reach",
        "set cluster.environment.NCCL_SOCKET_IFNAME to eth0, or to the interface of a network in "
        "cluster.kubernetes.networks",
    ),
    "KUB-15": (
        "a setting of cluster.kubernetes is not valid for a pod",
        "correct the key that the message names, under cluster.kubernetes",
    ),
    "KUB-16": (
        "the API server is older than cluster.kubernetes.version",
        "set cluster.kubernetes.version to the server version that `kubectl version` prints",
    ),
    "KUB-17": (
        "the nodes do not offer a resource that the pods request: the device plugin is missing, or its name differs",
        "`kubectl get nodes -o yaml` lists the allocatable resources of each node; ask the admins to install the "
        "GPU or Network Operator, or correct cluster.kubernetes.gpu_resource and resources",
    ),
    "KUB-18": (
        "the first pod of the run was deleted, evicted or preempted, but the run was not cancelled",
        "`kubectl get events --sort-by=.lastTimestamp` shows who stopped the pod, or why. While the run's Job "
        "exists, another pod continues the run. Otherwise, run `runstop resume RUN`",
    ),
}
