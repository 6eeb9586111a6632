"""Look up a measured rate between the sizes that it was measured at."""

import math


def rate_at(size: float, sizes: list[float], rates: list[float]) -> float:
    """Return the rate at a size, interpolated linearly on two logarithmic axes.

    Below the smallest size the first segment is extrapolated; above the largest size its rate stays.
    """
    if size >= sizes[-1] or len(sizes) == 1:
        return rates[-1]
    right = next((i for i in range(1, len(sizes)) if size <= sizes[i]), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = math.log(size / low) / math.log(high / low)
    return rates[right - 1] * math.exp(share * math.log(rates[right] / rates[right - 1]))
