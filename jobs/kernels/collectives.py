"""Collectives of the first ranks of the job, over NCCL or gloo."""

import os

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from bench.contract.kernels import Collective, Point
from jobs.kernels.timing import Prepared

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SETTINGS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
"""Environment variables that select or exclude an algorithm of NCCL."""
FACTORS = {
    Collective.all_reduce: "2 (n - 1) / n",
    Collective.all_gather: "(n - 1) / n",
    Collective.reduce_scatter: "(n - 1) / n",
    Collective.all_to_all: "(n - 1) / n",
    Collective.reduce: "1",
}
"""Bus bandwidth = factor x bytes / time for n ranks, as nccl-tests defines it."""
_ALL_GATHER = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
"""The names in torch 2.13, which deprecates the former names; else the former names."""


def prepare(point: Point, device: torch.device, group: ProcessGroup | None) -> Prepared:
    """Return the collective of a point. Repeated sums overflow, which does not change their time."""
    (size,), dtype, operation = point.sizes, DTYPES[point.variant], Collective[point.operation]
    count = size // dtype.itemsize
    full = torch.randn(count, dtype=dtype, device=device)
    other = torch.empty(count, dtype=dtype, device=device)
    share = torch.randn(count // point.ranks, dtype=dtype, device=device)
    calls = {
        Collective.all_reduce: lambda: distributed.all_reduce(full, group=group),
        Collective.all_gather: lambda: _ALL_GATHER(full, share, group=group),
        Collective.reduce_scatter: lambda: _REDUCE_SCATTER(share, full, group=group),
        Collective.reduce: lambda: distributed.reduce(full, dst=0, group=group),
        Collective.all_to_all: lambda: distributed.all_to_all_single(other, full, group=group),
    }
    factor = f"bus bandwidth = {FACTORS[operation]} x size / time"
    return Prepared(calls[operation], implementation=f"{algorithm(device)}; {factor}")


def algorithm(device: torch.device) -> str:
    """Return the library of a collective and its settings; NCCL does not report which algorithm it chooses."""
    if device.type == "cpu":
        return "gloo"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return f"NCCL {version}, {', '.join(settings) or 'default algorithm'}"
