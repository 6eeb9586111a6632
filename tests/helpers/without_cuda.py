"""Call cpu_patch.install in the process of the tests, also on a machine with CUDA, and restore what it replaces."""

import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from megatron.core.tensor_parallel import random

    from jobs.engines.megatron import cpu_patch

PATCHED: dict[Any, tuple[str, ...]] = {
    torch: ("compile", *cpu_patch._FACTORIES),
    torch.cuda: ("current_device", "synchronize", "manual_seed", "get_rng_state"),
    torch.Tensor: ("cuda",),
    random: ("_get_cuda_rng_state", "_set_cuda_rng_state"),
}
"""Attributes that cpu_patch.install replaces."""


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Let torch say that there is no CUDA. At its end, the patch restores all that cpu_patch.install replaces."""
    patch.setattr(torch.cuda, "is_available", lambda: False)
    for owner, names in PATCHED.items():
        for name in names:
            patch.setattr(owner, name, getattr(owner, name))
