"""Texts of the rules about Ray: the cluster, its nodes, their memory, and what a job brings with it.

Sources: Ray 2.60, KubeRay 1.7.
"""

from bench.rules.cluster import Texts

RAY: Texts = {
    "RAY-01": (
        "the Ray cluster cannot be reached",
        "`curl ADDRESS/api/version` must answer: set cluster.ray.address to http://HEAD:8265, let the head listen "
        "(ray start --head --dashboard-host=0.0.0.0), or forward its port (kubectl port-forward svc/HEAD 8265)",
    ),
    "RAY-02": (
        "versions of Ray or Python differ",
        "install the cluster's version of Ray here, and take the same Ray and the same minor version of Python "
        "(3.11) on all of its nodes: `python -m bench doctor` names both sides",
    ),
    "RAY-03": (
        "the nodes are not free, or not there: the placement group is never ready",
        "`ray status` shows what is used and what is asked for: lower cluster.num_nodes, cluster.ranks_per_node or "
        "cluster.ray.cpus_per_node, end what holds the nodes, add nodes, or raise cluster.ray.placement_timeout_min",
    ),
    "RAY-04": (
        "a node of the Ray cluster is gone, or the actor on it",
        "`ray list nodes` gives the reason, and raylet.out in the node's Ray logs what came before; "
        "`python -m bench resume RUN` goes on where the nodes are there again",
    ),
    "RAY-05": (
        "Ray's memory monitor killed the process, because the node was running out of memory",
        "give the node more memory or the run less to hold (fewer ranks a node, smaller batches); "
        "RAY_memory_usage_threshold, set where the node is started, says how full it may get (0.95)",
    ),
    "RAY-06": (
        "a Ray worker was killed",
        "look for what ends processes on that node: `dmesg -T | grep -i -e oom -e killed`, a person, a crash "
        "(worker-*.err and python-core-worker-*.log in the node's Ray logs)",
    ),
    "RAY-07": (
        "a node could not set up what the job brings with it (runtime_env)",
        "read runtime_env_setup-*.log on the node: a package may be too large or not there; "
        "cluster.ray.code=installed sends nothing, where the nodes have runstop themselves",
    ),
    "RAY-08": (
        "the job's driver was killed, or the head on which it ran",
        "look at the head's memory and disk: Ray's own processes live there too; keep work off it (num-gpus=0); "
        "`python -m bench resume RUN` goes on",
    ),
    "RAY-09": (
        "a node does not see the run folder",
        "put LOGDIR on a file system that is mounted at the same path here and on every node of the cluster",
    ),
    "RAY-10": (
        "the Ray cluster of this run is made from a manifest, which somebody applies",
        "`python -m bench render … > run.yaml` and `kubectl apply -f run.yaml`; for a cluster that is there choose "
        "cluster=ray",
    ),
}
