"""Judge the nodes' GPUs and networks, as nvidia-smi, amdsmi and the kernel report them."""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from bench.contract import transport
from bench.contract.node_facts import NOT_INSTALLED, GpuFacts, Machine
from bench.contract.plan import Plan
from bench.contract.schema import Device, Gpu
from bench.preflight.nodes.load import Facts, grouped, listed
from bench.preflight.nodes.ranks import ranks_of
from bench.rules.check import Finding, broken
from bench.texts import counted

MEMORY_TOLERANCE = 0.03
SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's reasons for lower clocks, without those of an idle or busy GPU.

Source: nvml.h, nvmlClocksEventReason*.
"""
_MODEL = re.compile(r"\b(?:[A-Z]+\d+[A-Z]*|RTX (?:PRO )?\d+)\b")
"""H100 in `NVIDIA H100 SXM 80GB`, RTX 4090 in `NVIDIA GeForce RTX 4090`."""


def gpus(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes with fewer GPUs than ranks, or with other GPUs than the plan's."""
    if plan.config.cluster.device is not Device.cuda:
        return
    for rank in facts.ranks:
        visible = rank.cuda_visible_devices
        if visible is not None and (count := _count(visible)) <= rank.local_rank:
            yield broken(
                "HW-03",
                f"rank {rank.rank} uses GPU {rank.local_rank}, but CUDA_VISIBLE_DEVICES of this rank has only "
                f"{counted(count, 'GPU')}",
                rank.node,
                fix="set cluster.slurm.gpu_request to a value that requests GPUs per node instead of per task",
            )
    for node, machine in facts.machines.items():
        ranks = len(ranks_of(facts, node))
        if machine.gpus is None:
            has_no_smi = (machine.gpus_refused or "").endswith(NOT_INSTALLED)  # an image may lack it
            yield broken(
                "HW-03",
                f"runstop cannot query the GPUs of this node: {machine.gpus_refused}",
                node,
                severity="warning" if has_no_smi else "error",
            )
        elif len(machine.gpus) < ranks:
            yield broken(
                "HW-03", f"the node has only {counted(len(machine.gpus), 'GPU')} for {counted(ranks, 'rank')}", node
            )
        elif plan.config.cluster.gpu and (different := _different_gpu(plan.config.cluster.gpu, machine.gpus)):
            yield broken(
                "HW-03",
                f"{different}, but the plan is for {plan.config.cluster.gpu.name}",
                node,
                fix="set cluster= to the config of these nodes, or run on other nodes",
            )


def gpu_faults(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the GPUs with memory errors since the driver was loaded, rows to be remapped, or throttled clocks."""
    if plan.config.cluster.device is not Device.cuda:
        return
    for node, machine in facts.machines.items():
        for gpu in machine.gpus or ():
            where = f"{node}, GPU {gpu.index}"
            if gpu.ecc_uncorrected:
                yield broken("HW-01", f"the GPU has {gpu.ecc_uncorrected} uncorrected ECC errors", where)
            if _is_set(gpu.rows_failed):
                yield broken("HW-01", "the GPU could not remap a damaged row of its memory", where)
            if _is_set(gpu.rows_pending):
                yield broken(
                    "HW-01",
                    "a row of the GPU memory is damaged, and only a reset of the GPU remaps this row",
                    where,
                    fix="ask the admins to reset the GPU",
                )
            if reasons := [name for bit, name in SLOWED.items() if _bits(gpu.throttle) & bit]:
                yield broken(
                    "HW-01", f"the clocks of the GPU are throttled: {', '.join(reasons)}", where, severity="warning"
                )


def drivers(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield a warning if nodes have different GPU drivers."""
    seen = grouped(
        (gpu.driver, node) for node, machine in facts.machines.items() for gpu in machine.gpus or () if gpu.driver
    )
    if len(seen) > 1:
        drivers_of_nodes = ", ".join(f"{driver} on {listed(nodes)}" for driver, nodes in seen.items())
        odd = [node for nodes in list(seen.values())[1:] for node in nodes]
        yield broken(
            "HW-03", f"the nodes have different GPU drivers: {drivers_of_nodes}", listed(odd), severity="warning"
        )


def interfaces(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes without the network interface that is configured for NCCL or Gloo."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        configured = plan.environment.get(name)
        if not configured:
            continue
        for node, machine in facts.machines.items():
            up = [link.name for link in machine.interfaces if link.state != "down"]
            exact = name.startswith("GLOO")  # Gloo accepts full names only
            chosen = set(configured.split(",")) & set(up) if exact else transport.selected(configured, up)
            if not chosen:
                yield broken(
                    "NCC-01",
                    f"{name}={configured} selects no active interface of this node; the active interfaces are "
                    f"{', '.join(up)}",
                    node,
                )
            elif set(chosen) == {"lo"} and len(facts.machines) > 1:
                yield broken(
                    "NCC-01",
                    f"{name}={configured} is the loopback interface, which other nodes cannot reach",
                    node,
                    severity="warning",
                )


def infiniband(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes with fewer active InfiniBand ports than others, and an error or warning if no node has any.

    A run with the socket transport needs none. If NCCL_NET requests InfiniBand, NCCL fails on a node without it.
    """
    requested = transport.requested(plan.environment).net
    is_needed = len(facts.machines) > 1 or requested == transport.IB
    if plan.config.cluster.device is not Device.cuda or not is_needed or requested == transport.SOCKET:
        return
    active = {node: _active(plan, machine) for node, machine in facts.machines.items()}
    anywhere = set().union(*active.values())
    if not anywhere and requested == transport.IB:
        what = f"{transport.NET}={requested} is set, but no InfiniBand or RoCE port is up on any node"
        fix = f"remove {transport.NET}, or use nodes with InfiniBand or RoCE"
        yield broken("NCC-02", what, listed(active), fix=fix)
    elif not anywhere:
        yield broken("NCC-02", "no InfiniBand port is up on any node", listed(active), severity="warning")
    for node, ports in active.items():
        if anywhere and not ports:
            what = f"no InfiniBand port is up on this node, but {len(anywhere)} ports are up on other nodes"
            yield broken("NCC-03", what, node)
        elif lacking := sorted(anywhere - ports):
            what = f"the InfiniBand port {', '.join(lacking)} is down on this node, but up on other nodes"
            yield broken("NCC-03", what, node, severity="warning")
        if ports and not facts.machines[node].infiniband_devices:
            what = "InfiniBand ports are up, but the ranks cannot access the devices in /dev/infiniband"
            yield broken("NCC-02", what, node, severity="warning")


def memlock(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield the nodes with InfiniBand whose ranks have a limit on locked memory."""
    for node, machine in facts.machines.items():
        limits = [rank.memlock_bytes for rank in ranks_of(facts, node) if rank.memlock_bytes != -1]
        if limits and _active(plan, machine):
            what = (
                f"ranks may lock only {min(limits) // 1024} KiB of memory (ulimit -l), but InfiniBand locks its buffers"
            )
            fix = "ask the admins to set `ulimit -l` to unlimited for slurmd or containerd, which starts the ranks"
            yield broken("NCC-03", what, node, fix=fix, severity="warning")


def _active(plan: Plan, machine: Machine) -> set[str]:
    """Return the active ports that NCCL may use."""
    up = [port.port for port in machine.infiniband if "ACTIVE" in (port.state or "")]
    configured = plan.environment.get("NCCL_IB_HCA")
    return transport.selected(configured, up) if configured else set(up)


def _count(visible: str) -> int:
    return len([name for name in visible.split(",") if name and name not in ("-1", "NoDevFiles")])


def _different_gpu(planned: Gpu, installed: Collection[GpuFacts]) -> str | None:
    """Return the first GPU of another type: its model differs, or its memory by more than MEMORY_TOLERANCE."""
    for gpu in installed:
        models = set(_MODEL.findall(planned.name)) <= set(_MODEL.findall(gpu.name or ""))
        memory_gib = planned.memory_gib if gpu.memory_mib is None else gpu.memory_mib / 1024
        if not models or abs(memory_gib - planned.memory_gib) > MEMORY_TOLERANCE * planned.memory_gib:
            return f"GPU {gpu.index} is {gpu.name} with {memory_gib:.1f} GiB"
    return None


def _bits(throttle: str | None) -> int:
    """Return nvidia-smi's hexadecimal number; 0 for None and for text."""
    with suppress(ValueError):
        return int(throttle or "0", 16)
    return 0


def _is_set(flag: str | None) -> bool:
    return flag not in (None, "", "0", "No", "N/A")
