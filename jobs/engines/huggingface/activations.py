"""Keep what is stored for the backward pass in host memory, but for weights and what is small."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter

LEAST_BYTES = 2**20
"""Smaller tensors stay: copying one costs more than its memory is worth. Source: TRL, OffloadActivations."""
Packed = Tensor | tuple[torch.device, Tensor]


def in_host_memory(model: Module, *, least_bytes: int = LEAST_BYTES) -> AbstractContextManager[Any]:
    """Return a context in which stored activations go to page-locked host memory until they are needed."""
    weights = {_memory(p) for p in model.parameters()}

    def pack(tensor: Tensor) -> Packed:
        is_weight = isinstance(tensor, Parameter) or _memory(tensor) in weights
        if is_weight or tensor.nbytes < least_bytes:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 for one that has none of its own, as a shard's wrapper."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
