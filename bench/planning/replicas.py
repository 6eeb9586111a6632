"""Split the GPUs of a generation task into replicas of the model: parallel.groups of parallel.tp ranks each."""

from bench.contract.cluster import Host, parsed
from bench.contract.plan import World
from bench.contract.schema import Config, Device
from bench.contract.task import Kind
from bench.errors import ConfigError
from bench.planning.parallelism import check_tensor_parallel
from bench.texts import counted

WHERE = "parallel.groups, parallel.tp"


def split(config: Config) -> World:
    """Return the ranks of a generation task: world.dp replicas of world.tp consecutive ranks, each within one node.

    Without parallel.groups there are as many replicas as parallel.tp allows; without either, one per node.

    Raises:
        ConfigError: they do not use exactly the GPUs of the cluster, or the model cannot be split like this.
    """
    groups, tp = _chosen(config)
    c, unit = config.cluster, "GPU" if config.cluster.device is Device.cuda else "rank"
    num_gpus, num_ranks, shares = c.num_nodes * c.ranks_per_node, groups * tp, bool(config.parallel.share_gpu)
    if num_ranks != num_gpus and not (shares and num_ranks > num_gpus):
        raise ConfigError(
            f"{counted(groups, 'replica')} of {counted(tp, unit)} need{'s' if groups == 1 else ''} "
            f"{counted(num_ranks, unit)}, but the cluster has {counted(num_gpus, unit)}",
            where=WHERE,
            fix=_replicas_fix(config, num_ranks=num_ranks, num_gpus=num_gpus),
        )
    if groups % c.num_nodes:
        raise ConfigError(
            f"{counted(groups, 'replica')} cannot be divided evenly over {c.num_nodes} nodes, and a replica cannot "
            "span two nodes",
            where=f"{WHERE}, cluster.num_nodes",
            fix=f"set parallel.groups to a multiple of {c.num_nodes}",
        )
    per_node = num_ranks // c.num_nodes
    world = World(
        num_nodes=c.num_nodes,
        ranks_per_node=per_node,
        num_ranks=num_ranks,
        dp=groups,
        tp=tp,
        pp=1,
        cp=1,
        vpp=1,
        sp=False,
    )
    check_tensor_parallel(config, world)
    return world


def per_gpu(config: Config, world: World) -> int:
    """Return how many replicas share the fullest GPU."""
    return -(-world.ranks_per_node // config.cluster.ranks_per_node)


def shards(config: Config, world: World) -> int:
    """Return over how many GPUs the weights of a replica are split."""
    return config.huggingface.num_gpus if config.huggingface else world.tp


def _chosen(config: Config) -> tuple[int, int]:
    """Return the number of replicas, and the ranks per replica."""
    c, hosts = config.cluster, _of_hosts(config)
    groups, tp = hosts or (config.parallel.groups, config.parallel.tp)
    num_ranks = c.num_nodes * c.ranks_per_node
    if config.huggingface is not None:
        tp = tp or 1
    if groups is None and tp is None:
        return c.num_nodes, c.ranks_per_node
    if groups is None:
        assert tp is not None
        if num_ranks % tp:
            divisors = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
            raise ConfigError(
                f"{counted(num_ranks, 'rank')} cannot be split into replicas of {tp} ranks",
                where="parallel.tp",
                fix=f"set parallel.tp to one of {divisors}",
            )
        return num_ranks // tp, tp
    return groups, tp if tp is not None else max(1, num_ranks // groups)


def _of_hosts(config: Config) -> tuple[int, int] | None:
    """Return the replicas given in cluster.hosts, as in rig0:4x2; None if hosts give none.

    Raises:
        ConfigError: the hosts differ, or the config contradicts them.
    """
    hosts = [parsed(text) for text in config.cluster.hosts or []]
    named = {(host.groups, host.group_size) for host in hosts if host.groups and host.group_size}
    if not named:
        return None
    if len(named) > 1 or not all(host.groups for host in hosts):
        raise ConfigError(
            f"all hosts must have the same groups of GPUs, but these hosts differ: {', '.join(map(_shown, hosts))}",
            where="cluster.hosts",
            fix="give every host the same groups, such as rig0:4x2 and rig1:4x2 (four groups of two GPUs on each host)",
        )
    ((groups, size),) = named
    assert groups is not None and size is not None
    replicas, p = (groups * len(hosts), size), config.parallel
    if (p.groups or replicas[0], p.tp or replicas[1]) != replicas:
        raise ConfigError(
            f"cluster.hosts sets {counted(replicas[0], 'group')} of {counted(replicas[1], 'GPU')}, but parallel.groups "
            f"and parallel.tp set {counted(p.groups or replicas[0], 'group')} of "
            f"{counted(p.tp or replicas[1], 'GPU')}",
            where=f"cluster.hosts, {WHERE}",
            fix="remove the groups from cluster.hosts, or remove parallel.groups and parallel.tp",
        )
    return replicas


def _shown(host: Host) -> str:
    return f"{host.name}:{host.groups}x{host.group_size}" if host.groups else host.name


def _replicas_fix(config: Config, *, num_ranks: int, num_gpus: int) -> str:
    if num_ranks < num_gpus:
        c = config.cluster
        fewer = f", or set cluster.ranks_per_node={num_ranks // c.num_nodes}" if num_ranks % c.num_nodes == 0 else ""
        return f"set parallel.groups and parallel.tp so that their product is {num_gpus}{fewer}"
    if config.cluster.device is not Device.cuda:
        return (
            f"set parallel.groups and parallel.tp so that their product is {num_gpus}, or raise cluster.ranks_per_node"
        )
    return (
        f"set parallel.groups and parallel.tp so that their product is {num_gpus}; or set parallel.share_gpu=true, so "
        "that several replicas share a GPU, each with its own copy of the weights"
    )


def ranks_per_node(config: Config) -> int:
    """Return the ranks per node: one per GPU, or more if replicas share GPUs."""
    if config.task.kind is not Kind.generate or not config.parallel.share_gpu:
        return config.cluster.ranks_per_node
    groups, tp = _chosen(config)
    return groups * tp // config.cluster.num_nodes
