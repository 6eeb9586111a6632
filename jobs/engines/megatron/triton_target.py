"""Triton's target: a GPU, or the interpreter on a CPU."""

import os
from functools import cache

import torch
import triton.language as tl

HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Whether inline PTX is available: not in Triton's interpreter."""


FACTOR = tl.constexpr(tl.bfloat16 if HAS_PTX.value else tl.float32)
"""The data type of a GEMM's operands: BF16 for tensor cores; the interpreter cannot multiply BF16."""


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
