"""Counter-based random bits, for dropout masks and stochastic rounding that can be recomputed without a generator.

Source: Wellons, "Prospecting for Hash Functions", lowbias32. `hash_kernel` is the same function in Triton.
"""

from torch import Tensor


def hash32(x: Tensor) -> Tensor:
    """Return 32 well-mixed bits of each number (int64, below 2^32)."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16
