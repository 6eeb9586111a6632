"""Initial weights of adapters. They depend on the seed only, so every layout and every engine has the same."""

import hashlib
import math

import torch
from torch import Tensor


def init_adapter(shape: tuple[int, ...], letter: str, *, seed: int, name: str) -> Tensor:
    """Return the initial weight of an adapter: A Kaiming uniform, by seed and name (as in the LoRA paper); B zero."""
    if letter == "B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:12], 16))
    a = torch.empty(shape)
    torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    return a
