"""Texts of the rules about Ray: the cluster, its nodes, their memory, and the runtime environment of a job.

Sources: Ray 2.60, KubeRay 1.7.
"""

from bench.rules.cluster import Texts

RAY: Texts = {
    "RAY-01": (
        "the Ray cluster cannot be reached",
        "`curl ADDRESS/api/version` must answer. Set cluster.ray.address to http://HEAD:8265, make the head node "
        "listen (ray start --head --dashboard-host=0.0.0.0), or forward its port (kubectl port-forward svc/HEAD "
        "8265)",
    ),
    "RAY-02": (
        "the versions of Ray or Python differ",
        "install the cluster's version of Ray on this machine, and use the same Ray and the same minor version of"
        " Python (3.11) on all nodes of the cluster; `runstop doctor` prints both versions",
    ),
    "RAY-03": (
        "the placement group is not ready: nodes are busy or missing",
        "`ray status` shows used and requested resources: lower cluster.num_nodes, cluster.ranks_per_node or "
        "cluster.ray.cpus_per_node, end other jobs, add nodes, or raise cluster.ray.placement_timeout_min",
    ),
    "RAY-04": (
        "a node of the Ray cluster, or the actor on it, has died",
        "`ray list nodes` shows the reason, and raylet.out in the node's Ray logs shows earlier events; `runstop "
        "resume RUN` resumes the run when the nodes are back",
    ),
    "RAY-05": (
        "Ray's memory monitor killed the process, because the node was running out of memory",
        "use nodes with more memory, fewer ranks per node or smaller batches; RAY_memory_usage_threshold in the "
        "environment of `ray start` on the node sets the limit (0.95)",
    ),
    "RAY-06": (
        "a Ray worker was killed",
        "find out what killed the worker on this node: the OOM killer (`dmesg -T | grep -i -e oom -e killed`), a user "
        "or a crash (worker-*.err and python-core-worker-*.log in the node's Ray logs)",
    ),
    "RAY-07": (
        "a node could not set up the runtime environment of the job (runtime_env)",
        "read runtime_env_setup-*.log on the node: a package may be missing or too large; if runstop is installed on "
        "the nodes, set cluster.ray.code=installed to send no code",
    ),
    "RAY-08": (
        "the driver of the job was killed, or its head node died",
        "check memory and disk of the head node, which also runs Ray's own processes; let no ranks run on the "
        "head node (num-gpus=0); `runstop resume RUN` resumes the run",
    ),
    "RAY-09": (
        "the run folder is not visible on a node",
        "put LOGDIR on a file system that is mounted at the same path here and on every node of the cluster",
    ),
    "RAY-10": (
        "the Ray cluster of this run must be created from its manifest",
        "run `runstop render … > run.yaml` and `kubectl apply -f run.yaml`; for an existing cluster choose cluster=ray",
    ),
}
