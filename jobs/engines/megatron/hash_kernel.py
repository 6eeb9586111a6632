"""`hashing.hash32` in Triton, for uint32."""

import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter needs it in every module with a kernel


@triton.jit
def hash32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
