"""Texts of the rules about pods and the cluster that runs them.

Each is ID -> (what is wrong, what to do). The reasons are Kubernetes' own words, as pods and events have them.
"""

from bench.rules.cluster import Texts

KUBERNETES: Texts = {
    "KUB-01": (
        "the image cannot be pulled onto the node",
        "check name, digest and registry in cluster.kubernetes.image, and image_pull_secrets: "
        "`kubectl describe pod` has the registry's answer",
    ),
    "KUB-02": (
        "no node can take a pod of the run",
        "compare what it asks for (GPUs, resources, node_selector, tolerations, one pod a node) with `kubectl describe "
        "node`: the evidence counts the nodes by what each of them lacks",
    ),
    "KUB-03": (
        "a container was killed for memory",
        "raise memory in cluster.kubernetes.resources, or lower shm_gib, which counts as the pod's memory; this is "
        "not the memory of a GPU",
    ),
    "KUB-04": (
        "a pod was evicted or preempted",
        "the next attempt goes on by itself; to keep others from taking the nodes ask for a cluster.kubernetes."
        "priority_class, and for as much memory as limit as is requested",
    ),
    "KUB-05": (
        "a container ends as soon as it has started",
        "`kubectl logs POD --previous` says why: mostly the image lacks runstop or its engine",
    ),
    "KUB-06": (
        "the cluster has no such kind of object",
        "have its operator installed (JobSet, Kubeflow), or set cluster.kubernetes.object=job, which needs none",
    ),
    "KUB-07": (
        "this user may not do that in the namespace",
        "ask for the role in docs/kubernetes.md; `kubectl auth can-i --list` shows what there is",
    ),
    "KUB-08": (
        "a volume is not there: its claim is pending, missing, or cannot be mounted by all nodes",
        "`kubectl describe pvc` says what it waits for; several pods need the access mode ReadWriteMany",
    ),
    "KUB-09": (
        "the deadline of a pod has passed",
        "raise walltime (minutes per trial; `python -m bench resume RUN --walltime MIN`)",
    ),
    "KUB-10": (
        "a container of the run cannot be made",
        "`kubectl describe pod` names what is missing: a Secret, a ConfigMap, a folder of the node, a user",
    ),
    "KUB-11": (
        "the namespace lets no more pods in: its quota, or a rule of the cluster",
        "`kubectl describe quota` and `kubectl get events` show which; ask for less, or for a larger quota",
    ),
    "KUB-12": (
        "no API server answers, or there is no client to ask it",
        "`kubectl cluster-info` must work here; pip install 'runstop[kubernetes]'; set KUBECONFIG or "
        "cluster.kubernetes.context",
    ),
    "KUB-13": (
        "the node of a pod is gone",
        "`kubectl get nodes` shows which one is not ready; leave it out (cluster.kubernetes.exclude_nodes) and tell "
        "the admins: its pods are replaced once the node is removed, or once they are deleted by force",
    ),
    "KUB-14": (
        "NCCL meets over an interface that is the node's own, such as a bridge of its containers",
        "set cluster.environment.NCCL_SOCKET_IFNAME=eth0, or to the interface of a network in cluster.kubernetes."
        "networks",
    ),
    "KUB-15": (
        "the config says something that cannot become a pod",
        "correct the key that is named, under cluster.kubernetes",
    ),
    "KUB-16": (
        "the API server is older than the config promises",
        "set cluster.kubernetes.version to what `kubectl version` says of the server",
    ),
    "KUB-17": (
        "the nodes do not offer what the pods ask for: the device plugin is missing, or the resource has another name",
        "`kubectl get nodes -o yaml` lists each node's allocatable resources; have the GPU or Network Operator "
        "installed, or correct cluster.kubernetes.gpu_resource and resources",
    ),
}
