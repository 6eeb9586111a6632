"""Numbers as text, with as many digits as a measurement has."""

import math

MOST_DECIMALS = 6


def digits(number: float) -> int:
    """Return how many decimals show four significant digits, two decimals at most; below 1 three digits."""
    if not 0 < abs(number) < math.inf:
        return 0
    magnitude = math.floor(math.log10(abs(number)))
    return min(MOST_DECIMALS, 2 - magnitude) if magnitude < 0 else max(0, min(2, 3 - magnitude))


def number_text(number: float) -> str:
    """Return a measured number with four significant digits, two decimals at most; below 1 with three digits."""
    return f"{number:,.{digits(number)}f}"


def minutes_text(minutes: float) -> str:
    """Return minutes to the hundredth, and below one minute to the thousandth."""
    return f"{minutes:.{3 if minutes < 1 else 2}f}"
