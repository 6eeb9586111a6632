"""Collectives of the first ranks of the job, over NCCL or gloo."""

import os

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from bench.contract.kernels import Collective, Point
from jobs.kernels.timing import Prepared

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SETTINGS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
"""What decides, or may forbid, an algorithm."""
FACTORS = {
    Collective.all_reduce: "2 (n - 1) / n",
    Collective.all_gather: "(n - 1) / n",
    Collective.reduce_scatter: "(n - 1) / n",
    Collective.all_to_all: "(n - 1) / n",
    Collective.reduce: "1",
}
"""Of the bytes over the time is the bus bandwidth, by nccl-tests, for n ranks."""
_ALL_GATHER = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
"""By their names in torch 2.13, which deprecates the others, and before."""


def prepare(point: Point, device: torch.device, group: ProcessGroup | None) -> Prepared:
    """Return the collective of a point. Sums that are added up again and again overflow, which takes no other time."""
    (size,), dtype, operation = point.sizes, DTYPES[point.variant], Collective[point.operation]
    count = size // dtype.itemsize
    whole = torch.randn(count, dtype=dtype, device=device)
    other = torch.empty(count, dtype=dtype, device=device)
    share = torch.randn(count // point.ranks, dtype=dtype, device=device)
    calls = {
        Collective.all_reduce: lambda: distributed.all_reduce(whole, group=group),
        Collective.all_gather: lambda: _ALL_GATHER(whole, share, group=group),
        Collective.reduce_scatter: lambda: _REDUCE_SCATTER(share, whole, group=group),
        Collective.reduce: lambda: distributed.reduce(whole, dst=0, group=group),
        Collective.all_to_all: lambda: distributed.all_to_all_single(other, whole, group=group),
    }
    factor = f"bus bandwidth = {FACTORS[operation]} x size / time"
    return Prepared(calls[operation], ran=f"{algorithm(device)}; {factor}")


def algorithm(device: torch.device) -> str:
    """Return who runs a collective and what it was told; NCCL does not say which algorithm it chooses."""
    if device.type == "cpu":
        return "gloo"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    told = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return f"NCCL {version}, {', '.join(told) or 'its own choice'}"
