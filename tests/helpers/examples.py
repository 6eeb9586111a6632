"""How many examples a property is tried with: 100 by default, half of it in the gate, a fifth in `make fast`."""

from hypothesis import HealthCheck, settings

UNTIMED, HALF, FEW = "untimed", "half", "few"
settings.register_profile(UNTIMED, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy is no bug
settings.register_profile(HALF, settings.get_profile(UNTIMED), max_examples=50)
settings.register_profile(FEW, settings.get_profile(UNTIMED), max_examples=20)


def in_proportion(of_hundred: int) -> int:
    """Return how many examples a test takes that has so many where others have 100."""
    return max(1, of_hundred * settings.default.max_examples // 100)
