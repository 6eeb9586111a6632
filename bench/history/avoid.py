"""The nodes that cluster.avoid=auto leaves out; the history is imported and read only if a config asks for it."""

from bench.contract.schema import Cluster


def bad_nodes(cluster: Cluster) -> dict[str, str]:
    """Return the nodes of a cluster's backend that runs found bad within cluster.avoid_within, each with the reason."""
    from bench.history import nodes

    return nodes.bad(cluster)
