"""Memory copies of one rank: between host and device, inside the device, and to the next GPU of the node."""

import torch

from bench.contract.kernels import Copy, Point
from bench.errors import SubmitError
from jobs.kernels.timing import Prepared

BLOCK = 2**20
"""Size of the random block that fills host memory repeatedly; generating 1 GiB of random bytes would take seconds."""


def prepare(point: Point, device: torch.device) -> Prepared:
    """Return the copy of a point, from a buffer of random bytes."""
    (size,) = point.sizes
    way = Copy[point.operation]
    if way is Copy.host_to_device:
        source, target = _on_host(size, point), _empty(size, device)
    elif way is Copy.device_to_host:
        source, target = _random(size, device), _on_host(size, point)
    else:
        source, target = _random(size, device), _empty(size, _next_gpu(device) if way is Copy.peer else device)
    return Prepared(lambda: target.copy_(source, non_blocking=True), implementation="torch.Tensor.copy_")


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _random(size: int, device: torch.device) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, device=device)


def _on_host(size: int, point: Point) -> torch.Tensor:
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=point.variant == "pinned")
    block = torch.randint(256, (min(size, BLOCK),), dtype=torch.uint8)
    for start in range(0, size, BLOCK):
        part = buffer[start : start + BLOCK]
        part.copy_(block[: len(part)])
    return buffer


def _next_gpu(device: torch.device) -> torch.device:
    """Return the next GPU. All ranks copy to their next GPU at the same time, so each link is used in one direction."""
    count = torch.cuda.device_count()
    assert device.index is not None
    other = (device.index + 1) % count
    if count < 2 or not torch.cuda.can_device_access_peer(device.index, other):
        raise SubmitError(
            f"GPU {device.index} has no peer access to another GPU ({count} GPUs are visible to this process)",
            where="cluster.slurm.gpu_request",
            fix="request GPUs per node, so that a rank sees all GPUs of its node, or set task.kernels.memcpy=null",
            rule="HW-03",
        )
    return torch.device("cuda", other)
