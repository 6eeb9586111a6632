"""Activation offloading: saved activations of some layers are in host memory between forward and backward pass.

After the forward pass of such a layer, a separate stream copies its saved activations to pinned memory. The next such
layer waits for this copy and then frees the device memory. In the backward pass activations are prefetched one layer
ahead, while the layers above are computed, so that the device holds the activations of two layers at a time. Results
are bitwise the same. On a CPU the same copies are made, without overlap.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


class Offloaded:
    """The saved activations of one layer and pass: in host memory, on the device, or in both during a copy."""

    def __init__(self, on_host: Any, copied_out: Any) -> None:
        self.on_host, self.copied_out = on_host, copied_out
        self.on_device: Any = None
        self.copied_in: Any = None


class HostActivations:
    """The offloaded activations of a rank's layers; all layers of a chunk share one instance."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.library: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self.to_host, self.to_device = self.library.Stream(), self.library.Stream()
        self.latest: Offloaded | None = None
        """The activations that were offloaded last in the current forward pass."""
        self._pending_copy: tuple[Any, Any] | None = None
        """The event of the last copy to the host, and the device tensors that it reads."""

    def offload(self, saved: Any) -> Offloaded:
        """Start to copy a layer's saved activations to the host; the caller must keep no reference to them."""
        self._free_copied()
        copied_out = self.library.Event()
        self.to_host.wait_stream(self.library.current_stream())
        with self.library.stream(self.to_host):
            on_host = map_tensors(saved, self._copy_to_host)
            copied_out.record()
        self._pending_copy = copied_out, saved
        self.latest = Offloaded(on_host, copied_out)
        return self.latest

    def prefetch(self, item: Offloaded | None) -> None:
        """Start to copy activations back to the device, unless the copy was started before."""
        if item is None or item.on_host is None or item.on_device is not None:
            return
        self._free_copied()
        copies: list[tuple[Tensor, Tensor]] = []

        def allocate(x: Tensor) -> Tensor:
            copies.append((torch.empty_like(x, device=self.device), x))
            return copies[-1][0]

        item.on_device = map_tensors(item.on_host, allocate)
        item.copied_in = self.library.Event()
        self.to_device.wait_stream(self.library.current_stream())  # its kernels may still use this memory
        with self.library.stream(self.to_device):
            item.copied_out.wait()
            for on_device, on_host in copies:
                on_device.copy_(on_host, non_blocking=True)
            item.copied_in.record()

    def pop(self, item: Offloaded) -> Any:
        """Return the activations on the device, and drop the references of `item`."""
        self.prefetch(item)
        item.copied_in.wait()
        saved, item.on_device, item.on_host = item.on_device, None, None
        return saved

    def _free_copied(self) -> None:
        """Wait for the last copy to the host, and free the device memory that it read."""
        if self._pending_copy is not None:
            self._pending_copy[0].wait()
            self._pending_copy = None

    def _copy_to_host(self, x: Tensor) -> Tensor:
        """Return a copy with the same strides: kernels and cuDNN's plans depend on them."""
        copy = torch.empty_like(x, device="cpu", pin_memory=self.device.type == "cuda")
        return copy.copy_(x, non_blocking=True)


def map_tensors(saved: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the same dataclass or tuple with `function` applied to each tensor."""
    if isinstance(saved, Tensor):
        return function(saved)
    if isinstance(saved, tuple):
        parts = [map_tensors(part, function) for part in saved]
        return type(saved)(*parts) if hasattr(saved, "_fields") else tuple(parts)
    if is_dataclass(saved) and not isinstance(saved, type):
        return type(saved)(*(map_tensors(getattr(saved, field.name), function) for field in fields(saved)))
    return saved


def is_offloaded(index: int, num_offloaded: int, num_layers: int) -> bool:
    """Return whether a layer is offloaded: offloaded layers are evenly spaced, so that copies do not queue up."""
    return index * num_offloaded % num_layers < num_offloaded
