"""Keep what is stored for the backward pass in host memory, but for weights and what is small."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

LEAST_BYTES = 2**20
"""Smaller tensors stay: copying one costs more than its memory is worth. Source: TRL, OffloadActivations."""
Packed = Tensor | tuple[torch.device, Tensor]
Holders = dict[tuple[int, ...], list[tuple[Module, str]]]


def in_host_memory(model: Module, *, least_bytes: int = LEAST_BYTES) -> AbstractContextManager[Any]:
    """Return a context in which stored activations go to page-locked host memory until they are needed."""
    holders = _matrices(model)

    def pack(tensor: Tensor) -> Packed:
        if tensor.nbytes < least_bytes or _is_weight(tensor, holders):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def _matrices(model: Module) -> Holders:
    """Return where the matrices of a model are, by their whole shapes and those of their transposes."""
    found: Holders = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                for seen_as in {shape, shape[::-1]}:
                    found.setdefault(seen_as, []).append((module, key))
    return found


def _is_weight(tensor: Tensor, holders: Holders) -> bool:
    """Return whether a tensor is a weight as its module has it now: a sharded one has other memory at every use."""
    begins = _memory(tensor)
    held = (module._parameters[key] for module, key in holders.get(tuple(tensor.shape), ()))
    return any(weight is not None and _memory(weight) == begins for weight in held)


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 for one that has none of its own, as a shard's wrapper."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
