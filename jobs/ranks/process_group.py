"""Join all ranks of a plan, or of each of its groups, in one process group: gloo on CPUs, NCCL on GPUs."""

import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import SubmitError
from jobs.local_sgd import groups
from jobs.ranks.identity import Rank, node_name

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
SLOWER = 4
"""How many times the limits of the first steps a time-out outlasts: limits grow where the run becomes slower."""


def join(
    plan: Plan, who: Rank, *, timeout_s: float | None = None, also_on_cpu: bool = False, apart: bool = False
) -> "torch.device":
    """Return the device of this rank, after all ranks have joined.

    apart: where groups of the plan train apart, each of them joins for itself.

    also_on_cpu: collectives take tensors in host memory too, by gloo, beside those on GPUs. So they do in every plan
    whose replicas may share a GPU: its ranks meet there, since NCCL refuses a communicator whose ranks share one.

    NCCL's communicators are created when they are first used. A group that is bound to its device would split one for
    each of megatron-core's groups instead, which needs all of their ranks and took 6 GiB of an H200.

    Raises:
        SubmitError: not as many ranks as planned, no GPU for this one, or they cannot meet.
    """
    place = f"rank {who.rank} on {node_name()}"
    _require_all(plan, who, place)
    device = _device(plan, who, place)
    import torch
    import torch.distributed.nn  # imported once there is a group, its default arguments would hold that to the end

    also_on_cpu = also_on_cpu or not plan.replicas_reduce
    try:
        torch.distributed.init_process_group(
            _backend(device, also_on_cpu),
            **_meeting(plan, who, timeout_s, apart=apart),
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        )
    except torch.distributed.DistError as error:
        raise SubmitError(
            f"the ranks cannot meet at {who.master_addr}:{who.master_port}: {str(error).splitlines()[0]}",
            where=place,
            fix="see whether every rank has started and rank 0's node can be reached; "
            "choose another cluster.master_port, or null",
            rule="NCC-05",
        ) from error
    return device


def _require_all(plan: Plan, who: Rank, place: str) -> None:
    if who.world_size != plan.world.num_ranks:
        raise SubmitError(
            f"{who.world_size} ranks were started, and the plan is for {plan.world.num_ranks}",
            where=place,
            fix="start as many ranks as the plan's world.num_ranks: bench.launch does",
            rule="NCC-05",
        )


def _meeting(plan: Plan, who: Rank, timeout_s: float | None, *, apart: bool) -> dict[str, Any]:
    """Return where the ranks of the process group meet, and which of them this one is."""
    mine = groups.joined(plan, who, timeout_s=timeout_s) if apart else None
    if mine is None:
        place = f"tcp://{who.master_addr}:{who.master_port}"
        return {"init_method": place, "rank": who.rank, "world_size": who.world_size}
    from torch.distributed import PrefixStore

    store = PrefixStore(f"group {mine.number}, life {mine.life}", mine.store)
    return {"store": store, "rank": mine.position, "world_size": mine.size}


def _backend(device: "torch.device", also_on_cpu: bool) -> str:
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if also_on_cpu else "nccl"


def device() -> "torch.device":
    """Return what this rank computes on, after all ranks have joined."""
    import torch

    if "nccl" in torch.distributed.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def leave() -> None:
    """Leave the process group together: a rank that is still at work loses no connection.

    Drop the last reference to what has computed before the call: it holds groups, and its captured graphs keep NCCL
    from ending a communicator. It is collected here, although `timing.settle` kept it from that.

    gloo's threads end here, unless somebody still holds their group, and have let go of what was sent. One that did so
    once Python shuts down would end the process by SIGABRT: it needs Python's lock for that.

    Ranks meet in host memory where the group takes tensors there, as in plans that generate: see `join`.
    """
    import torch

    gc.unfreeze()
    gc.collect()
    torch.distributed.all_gather_object([None] * torch.distributed.get_world_size(), None)
    torch.distributed.destroy_process_group()


def node_names(who: Rank) -> list[str]:
    """Return the node of each rank; all ranks ask together, after they have joined."""
    return gathered(who, node_name())


def gathered(who: Rank, value: T) -> list[T]:
    """Return the value of each rank; all ranks call this together, after they have joined.

    Of groups that train apart, that of ranks which are gone is None.
    """
    if (mine := groups.mine()) is not None:
        return mine.gather(value)
    if who.world_size == 1:
        return [value]
    import torch

    values = [value] * who.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def outlast(limit_s: float) -> None:
    """Let no collective of any group time out before a rank's watchdog, whose longest limit is given, has ended it.

    torch's own limits stay where they are long enough: 10 min for NCCL, 30 min for gloo and for the groups of
    megatron-core, all of them counted from the start of a collective. Should NCCL's fire first all the same, its thread
    aborts the process (SIGABRT): no rank says why, no stack is written, the log stays open, and `why` finds NCC-06.
    Apart from that limit, NCCL's monitor ends a rank whose NCCL thread itself has hung for
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 8 min.

    Source: torch 2.13.0, distributed_c10d._set_pg_timeout and ProcessGroupNCCL.hpp (kProcessGroupNCCLDefaultTimeout,
    ErrorHandlingMode: SkipCleanUp is the default of TORCH_NCCL_ASYNC_ERROR_HANDLING); megatron-core 0.16.1,
    initialize_model_parallel(distributed_timeout_minutes=30).
    """
    import torch
    from torch.distributed import distributed_c10d

    if not torch.distributed.is_initialized():
        return
    needed = timedelta(seconds=SLOWER * limit_s)
    for group in list(distributed_c10d._world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.options._timeout < needed:
                backend._set_default_timeout(needed)


def gpu_of(plan: Plan, local_rank: int) -> int:
    """Return the number of a rank's GPU on its node; where replicas share GPUs, those of one replica have their own."""
    return local_rank % plan.config.cluster.ranks_per_node


def _device(plan: Plan, who: Rank, place: str) -> "torch.device":
    """Return the device of this rank, and make it torch's current one."""
    import torch

    if plan.config.cluster.device is not Device.cuda:
        return torch.device("cpu")
    number = gpu_of(plan, who.local_rank)
    if torch.cuda.device_count() <= number:
        raise SubmitError(
            f"this rank needs GPU {number}, and {torch.cuda.device_count()} can be seen",
            where=place,
            fix="ask for as many GPUs as ranks (cluster.slurm.gpu_request), lower cluster.ranks_per_node, "
            "or set cluster.device=cpu",
            rule="HW-03",
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
