"""The first weights of adapters, which depend on the seed alone: every layout and every engine draws the same."""

import hashlib
import math

import torch
from torch import Tensor


def drawn(shape: tuple[int, ...], letter: str, *, seed: int, name: str) -> Tensor:
    """Return the first weights of an adapter: A by seed and name (Kaiming uniform, as LoRA's authors do), B zero."""
    if letter == "B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:12], 16))
    whole = torch.empty(shape)
    torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole
