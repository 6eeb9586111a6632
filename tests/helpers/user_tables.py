"""Published results that a user added: they are read once for each process."""

import pytest

from bench.mlperf import published
from bench.mlperf.forecast import prior as priors
from bench.mlperf.forecast.curve import reference
from helpers.cached_configs import PATHS


def forget() -> None:
    """Read the tables again when they are needed next."""
    for cached in (published.systems, published.samples_to_target, priors.counted_systems, reference):
        cached.cache_clear()


def leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the user's config folder and variables of paths, until the end of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/no/such/folder")
    for name in PATHS:
        monkeypatch.delenv(name, raising=False)
    forget()
