"""Numbers as text, with as many digits as a measurement has."""

import math


def digits(number: float) -> int:
    """Return how many decimals show four significant digits, two decimals at most."""
    return max(0, min(2, 3 - math.floor(math.log10(abs(number))))) if 0 < abs(number) < math.inf else 0


def number_text(number: float) -> str:
    """Return a measured number with four significant digits, two decimals at most."""
    return f"{number:,.{digits(number)}f}"


def minutes_text(minutes: float) -> str:
    """Return minutes to the hundredth, and below one minute to the thousandth."""
    return f"{minutes:.{3 if minutes < 1 else 2}f}"
