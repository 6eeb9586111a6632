"""Triton's target: a GPU, or the interpreter on a CPU."""

import os

import triton.language as tl

HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Whether inline PTX is available: not in Triton's interpreter."""


FACTOR = tl.constexpr(tl.bfloat16 if HAS_PTX.value else tl.float32)
"""The data type of a GEMM's operands: BF16 for tensor cores; the interpreter cannot multiply BF16."""
