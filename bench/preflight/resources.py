"""Checks of what a run on this machine needs of it: its memory, its CPU cores, and a GPU whose memory is known."""

import os
from collections.abc import Iterator

from bench.contract import host_memory
from bench.contract.plan import Plan
from bench.contract.plan_kinds import ServingPlan, training_plan
from bench.contract.schema import BackendName, Device
from bench.rules.check import Finding, Subject, broken
from bench.texts import counted

GIB = 2**30
FEW_RANKS = 2
"""So many ranks are fine on any number of cores: clusters without GPUs start them by default."""


def runs_on_this_cpu(plan: Plan) -> bool:
    """Return whether the ranks run on the CPU of this machine."""
    cluster = plan.config.cluster
    return cluster.backend is BackendName.local and cluster.device is Device.cpu


def estimates_host_memory(plan: Plan) -> bool:
    """Return whether the ranks run on the CPU of this machine, and the plan estimates their memory."""
    return runs_on_this_cpu(plan) and plan.estimated_memory_gib[0] is not None


def memory(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if the ranks need more memory than this machine has, or than its control groups let them use."""
    plan, has_gib = subject.plan, (host_memory.limit_bytes() or host_memory.total_bytes()) / GIB
    needed = {"": _needed_gib(plan)}
    if (trained := training_plan(plan)) is not None and trained.base is not None:
        needed[" of the base task"] = _needed_gib(trained.base)
    for of_task, gib in needed.items():
        if gib > has_gib:
            yield broken(
                "RUN-03",
                f"the ranks{of_task} need an estimated {gib:,.1f} GiB of memory, but this machine has "
                f"{has_gib:,.1f} GiB",
                "model, cluster",
                fix=_smaller(plan, has_gib),
            )
            return
    yield f"{max(needed.values()):,.1f} of {has_gib:,.1f} GiB"


def _smaller(plan: Plan, has_gib: float) -> str:
    """Return how to need less memory: settings of the recipe are named only where they can suffice."""
    trained = training_plan(plan)
    if trained is not None and (memory := trained.memory) is not None:
        states = memory.total_gib - memory.activations_gib - memory.workspace_gib
        if states * plan.config.cluster.ranks_per_node < has_gib:
            return "set recipe.micro_batch_size=1 or recipe.recompute=full, or choose a cluster with GPUs (cluster=)"
    return "choose a smaller model, or a cluster with GPUs (cluster=)"


def _needed_gib(plan: Plan) -> float:
    """Return the estimated memory of all ranks on this machine; of a server, that of its own ranks."""
    each, _ = plan.estimated_memory_gib
    ranks = plan.world.tp if isinstance(plan, ServingPlan) else plan.config.cluster.ranks_per_node
    return (each or 0.0) * ranks


def cores(subject: Subject) -> Iterator[Finding | str]:
    """Yield a warning if there are more ranks than CPU cores."""
    ranks, num = subject.plan.config.cluster.ranks_per_node, len(os.sched_getaffinity(0))
    if ranks > max(num, FEW_RANKS):
        yield broken(
            "HW-09",
            f"{ranks:,} ranks share {counted(num, 'CPU core')}, which makes each step much slower",
            "cluster.ranks_per_node",
            fix=f"set cluster.ranks_per_node={max(num, FEW_RANKS)} or less",
            severity="warning",
        )
    yield f"{num} cores"


def needs_known_gpu(plan: Plan) -> bool:
    """Return whether the plan estimates the memory of GPUs."""
    needed_gib, _ = plan.estimated_memory_gib
    return plan.config.cluster.device is Device.cuda and needed_gib is not None


def gpu_memory(subject: Subject) -> Iterator[Finding | str]:
    """Yield a warning if the memory of the GPU is unknown, so that nothing compares it with the plan's."""
    needed_gib, capacity_gib = subject.plan.estimated_memory_gib
    assert needed_gib is not None
    if capacity_gib is None:
        yield broken(
            "HW-08",
            f"the run needs {needed_gib:,.1f} GiB per GPU, but runstop does not know the memory of the GPU",
            "cluster.gpu",
            fix="set gpu@cluster.gpu to the kind of GPU, such as gpu@cluster.gpu=h200",
            severity="warning",
        )
    else:
        yield f"{needed_gib:,.1f} of {capacity_gib:,.1f} GiB"


def has_unused_gpu(plan: Plan) -> bool:
    """Return whether the config describes a GPU, but the ranks run on the CPU of this machine."""
    return runs_on_this_cpu(plan) and plan.config.cluster.gpu is not None


def unused_gpu(subject: Subject) -> Iterator[Finding]:
    """Yield a warning that the GPU of the config is not used."""
    gpu = subject.plan.config.cluster.gpu
    assert gpu is not None
    yield broken(
        "HW-03",
        f"cluster.gpu is {gpu.name}, but the ranks use no GPU, because cluster.device is cpu",
        "cluster.gpu, cluster.device",
        fix="set cluster.device=cuda, or remove the override gpu@cluster.gpu=…",
        severity="warning",
    )
