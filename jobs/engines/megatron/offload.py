"""Saved activations of some layers in the host's memory, between their forward and their backward pass.

After the forward pass of such a layer a stream of its own copies what the layer saved to pinned memory. The memory on
the device is free when the next such layer has been computed, which waits for the copy. In the backward pass the
activations come back while the layers above are computed: of one layer ahead, so that the device holds those of two at
a time. No bit changes. On a CPU the same copies are made, one after the other.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


class Offloaded:
    """What one layer saved in one pass; it lies in the host's memory, or on the device, or both while it is copied."""

    def __init__(self, on_host: Any, copied_out: Any) -> None:
        self.on_host, self.copied_out = on_host, copied_out
        self.on_device: Any = None
        self.copied_in: Any = None


class HostActivations:
    """The activations of a rank's layers that are in the host's memory; all layers of a chunk share one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.library: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self.to_host, self.to_device = self.library.Stream(), self.library.Stream()
        self.latest: Offloaded | None = None
        """What the highest layer so far has put here in the current forward pass."""
        self._leaving: tuple[Any, Any] | None = None
        """The last copy to the host, and the tensors on the device that it reads."""

    def put(self, saved: Any) -> Offloaded:
        """Start to copy what a layer saved to the host; the caller keeps no tensor of it."""
        self._let_go()
        copied_out = self.library.Event()
        self.to_host.wait_stream(self.library.current_stream())
        with self.library.stream(self.to_host):
            on_host = mapped(saved, self._copied_to_host)
            copied_out.record()
        self._leaving = copied_out, saved
        self.latest = Offloaded(on_host, copied_out)
        return self.latest

    def fetch(self, item: Offloaded | None) -> None:
        """Start to copy activations back to the device, unless that was done."""
        if item is None or item.on_host is None or item.on_device is not None:
            return
        self._let_go()
        copies: list[tuple[Tensor, Tensor]] = []

        def place_of(x: Tensor) -> Tensor:
            copies.append((torch.empty_like(x, device=self.device), x))
            return copies[-1][0]

        item.on_device = mapped(item.on_host, place_of)
        item.copied_in = self.library.Event()
        self.to_device.wait_stream(self.library.current_stream())  # whose kernels may still use this memory
        with self.library.stream(self.to_device):
            item.copied_out.wait()
            for on_device, on_host in copies:
                on_device.copy_(on_host, non_blocking=True)
            item.copied_in.record()

    def take(self, item: Offloaded) -> Any:
        """Return the activations on the device; the item no longer holds them."""
        self.fetch(item)
        item.copied_in.wait()
        saved, item.on_device, item.on_host = item.on_device, None, None
        return saved

    def _let_go(self) -> None:
        """Free the memory on the device whose copy was started last, once it is complete."""
        if self._leaving is not None:
            self._leaving[0].wait()
            self._leaving = None

    def _copied_to_host(self, x: Tensor) -> Tensor:
        """Return a copy with the same strides, which kernels and cuDNN's plans depend on."""
        copy = torch.empty_like(x, device="cpu", pin_memory=self.device.type == "cuda")
        return copy.copy_(x, non_blocking=True)


def mapped(saved: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the same dataclass or tuple, with the function of each tensor in the place of the tensor."""
    if isinstance(saved, Tensor):
        return function(saved)
    if isinstance(saved, tuple):
        parts = [mapped(part, function) for part in saved]
        return type(saved)(*parts) if hasattr(saved, "_fields") else tuple(parts)
    if is_dataclass(saved) and not isinstance(saved, type):
        return type(saved)(*(mapped(getattr(saved, field.name), function) for field in fields(saved)))
    return saved


def is_offloaded(index: int, num_offloaded: int, num_layers: int) -> bool:
    """Return whether a layer's activations go to the host: they are spread evenly, so that copies do not pile up."""
    return index * num_offloaded % num_layers < num_offloaded
