"""Join all ranks of a plan, or of one local SGD group, in a process group: gloo on CPUs, NCCL on GPUs."""

import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from bench.contract.plan import Plan
from bench.contract.run_files import PORT_IN_USE
from bench.contract.schema import Device
from bench.errors import SubmitError
from jobs.local_sgd import groups
from jobs.ranks.identity import Rank, node_name

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
SLOWER = 4
"""Time-outs are this many times the limits of the first steps: limits grow if the run becomes slower."""


def join(
    plan: Plan, who: Rank, *, timeout_s: float | None = None, also_on_cpu: bool = False, local_sgd: bool = False
) -> "torch.device":
    """Return the device of this rank, after all ranks have joined.

    local_sgd: each local SGD group of the plan gets a process group of its own.

    also_on_cpu: collectives also accept tensors in host memory, over gloo. This is always so in a plan whose replicas
    may share a GPU, since NCCL refuses a communicator whose ranks share a GPU.

    NCCL's communicators are created at their first use. A group that is bound to its device would instead split one
    for each of megatron-core's groups, which needs all of their ranks and took 6 GiB of an H200.

    Raises:
        SubmitError: the number of ranks differs from the plan's, this rank has no GPU, or the ranks cannot connect.
    """
    place = f"rank {who.rank} on {node_name()}"
    _require_all(plan, who, place)
    device = _device(plan, who, place)
    import torch
    import torch.distributed.nn  # imported after the group exists, its default arguments would keep the group alive

    also_on_cpu = also_on_cpu or not plan.replicas_reduce
    try:
        torch.distributed.init_process_group(
            _backend(device, also_on_cpu),
            **_rendezvous(plan, who, timeout_s, local_sgd=local_sgd),
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        )
    except torch.distributed.DistError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise SubmitError(
                f"port {who.master_port} {PORT_IN_USE} on {node_name()}",
                where=place,
                fix="start the run again: it uses a new port; if you set cluster.master_port, change this port",
                rule="NCC-05",
            ) from error
        raise SubmitError(
            f"rendezvous at {who.master_addr}:{who.master_port} failed: {str(error).splitlines()[0]}",
            where=place,
            fix="check that every rank has started and can connect to the node of rank 0; "
            "or set cluster.master_port to another port, or to null",
            rule="NCC-05",
        ) from error
    return device


def _require_all(plan: Plan, who: Rank, place: str) -> None:
    if who.world_size != plan.world.num_ranks:
        raise SubmitError(
            f"{who.world_size} ranks were started, but the plan needs {plan.world.num_ranks}",
            where=place,
            fix=f"start {plan.world.num_ranks} ranks, as `runstop launch` does",
            rule="NCC-05",
        )


def _rendezvous(plan: Plan, who: Rank, timeout_s: float | None, *, local_sgd: bool) -> dict[str, Any]:
    """Return the arguments of init_process_group for the rendezvous, with the rank and size of the process group."""
    group = groups.join(plan, who, timeout_s=timeout_s) if local_sgd else None
    if group is None:
        place = f"tcp://{who.master_addr}:{who.master_port}"
        return {"init_method": place, "rank": who.rank, "world_size": who.world_size}
    from torch.distributed import PrefixStore

    store = PrefixStore(f"group {group.number}, restart {group.restart_count}", group.store)
    return {"store": store, "rank": group.position, "world_size": group.size}


def _backend(device: "torch.device", also_on_cpu: bool) -> str:
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if also_on_cpu else "nccl"


def device() -> "torch.device":
    """Return this rank's device; call it after `join`."""
    import torch

    if "nccl" in torch.distributed.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shut_down() -> None:
    """Destroy the process group; all ranks call this together, so that no rank loses a connection that it still uses.

    Delete the last reference to the engine before this call: it holds groups, and its captured CUDA graphs keep NCCL
    from destroying a communicator. It is garbage-collected here, since `timing.settle` has disabled that.

    gloo's threads end here, unless their group is still referenced, and free the tensors that were sent. A thread that
    freed them during Python's shutdown would end the process with SIGABRT, since it needs the GIL for that.

    The barrier uses host memory if the group accepts tensors there, as in generation plans: see `join`.
    """
    import torch

    gc.unfreeze()
    gc.collect()
    torch.distributed.all_gather_object([None] * torch.distributed.get_world_size(), None)
    torch.distributed.destroy_process_group()


def node_names(who: Rank) -> list[str]:
    """Return the node of each rank; all ranks call this together, after `join`."""
    return gathered(who, node_name())


def gathered(who: Rank, value: T) -> list[T]:
    """Return the value of each rank; all ranks call this together, after `join`.

    With local SGD, the value of a failed rank is None.
    """
    if (group := groups.current()) is not None:
        return group.gather(value)
    if who.world_size == 1:
        return [value]
    import torch

    values = [value] * who.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def outlast(limit_s: float) -> None:
    """Raise the time-outs of collectives above the limit of the watchdog, so that a stalled rank is ended by it first.

    limit_s: the longest limit of the watchdog.

    torch's own time-outs are kept if they are long enough: 10 min for NCCL, 30 min for gloo and for the groups of
    megatron-core, all counted from the start of a collective. If NCCL's time-out fires first anyway, its thread aborts
    the process (SIGABRT): no rank prints the reason, no stack is written, the log stays open, and `why` reports NCC-06.
    Independently, NCCL's monitor ends a rank whose NCCL thread itself has hung for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC,
    8 min.

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
    """Return the number of a rank's GPU on its node. Replicas may share GPUs; the ranks of one replica do not."""
    return local_rank % plan.config.cluster.ranks_per_node


def _device(plan: Plan, who: Rank, place: str) -> "torch.device":
    """Return the device of this rank, and make it torch's current device."""
    import torch

    if plan.config.cluster.device is not Device.cuda:
        return torch.device("cpu")
    number = gpu_of(plan, who.local_rank)
    if torch.cuda.device_count() <= number:
        raise SubmitError(
            f"this rank needs GPU {number}, but only {torch.cuda.device_count()} GPUs are visible",
            where=place,
            fix="request one GPU per rank (cluster.slurm.gpu_request), lower cluster.ranks_per_node, "
            "or set cluster.device=cpu",
            rule="HW-03",
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
