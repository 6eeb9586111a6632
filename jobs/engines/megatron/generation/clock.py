"""When tokens arrive in the host's memory, without waiting for them."""

import time

import torch
from torch import Tensor


class Arrival:
    """A copy of a tensor in the host's memory, which may still be under way, and when it was complete."""

    def __init__(self, x: Tensor) -> None:
        if not x.is_cuda:
            self.copy, self.event, self.time_s = x.clone(), None, time.perf_counter()
            return
        self.copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.copy.copy_(x, non_blocking=True)
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_after(self, start: "Start") -> float:
        """Return how long after the start it was complete; the device has finished all of its work."""
        if self.event is None:
            return self.time_s - start.time_s
        return start.event.elapsed_time(self.event) / 1000


class Start:
    """Now; the device has nothing to do."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.time_s = time.perf_counter()
