"""Activation offloading: store activations in host memory until the backward pass, except weights and small tensors."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

MIN_OFFLOAD_BYTES = 2**20
"""Smaller tensors stay on the device: copying them saves little memory. Source: TRL, OffloadActivations."""
Packed = Tensor | tuple[torch.device, Tensor]
Holders = dict[tuple[int, ...], list[tuple[Module, str]]]


def save_activations_on_cpu(model: Module, *, min_bytes: int = MIN_OFFLOAD_BYTES) -> AbstractContextManager[Any]:
    """Return a context that keeps saved activations in page-locked host memory until the backward pass."""
    holders = _matrices(model)

    def pack(tensor: Tensor) -> Packed:
        if tensor.nbytes < min_bytes or _is_weight(tensor, holders):
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
    """Return the module and key of each weight, by its full shape and by the shape of its transpose."""
    holders: Holders = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                for seen_as in {shape, shape[::-1]}:
                    holders.setdefault(seen_as, []).append((module, key))
    return holders


def _is_weight(tensor: Tensor, holders: Holders) -> bool:
    """Return whether a tensor is a current weight. A sharded weight has other memory each time it is gathered."""
    begins = _memory(tensor)
    held = (module._parameters[key] for module, key in holders.get(tuple(tensor.shape), ()))
    return any(weight is not None and _memory(weight) == begins for weight in held)


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own, such as the wrapper of a shard."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
