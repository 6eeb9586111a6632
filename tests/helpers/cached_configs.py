"""Compose each config once in a process: Hydra takes 0.1 s of CPU time for one, and tests ask for a thousand."""

import os
import pickle
from collections.abc import Callable
from functools import wraps

from bench.contract.schema import Config

PATHS = ("DATADIR", "MODEL", "LOGDIR", "NEMO_PYTHON")
"""The environment that conf/ reads."""


def cached(compose: Callable[[list[str]], Config]) -> Callable[[list[str]], Config]:
    """Return `compose` with a memory. Each caller gets a config of its own, since configs can be changed."""
    configs: dict[tuple[str | None, ...], bytes] = {}

    @wraps(compose)
    def composed(overrides: list[str]) -> Config:
        if any("searchpath" in word for word in overrides):  # a folder of the test, which may change
            return compose(overrides)
        key = (os.getcwd(), *map(os.environ.get, PATHS), *overrides)
        if key not in configs:
            configs[key] = pickle.dumps(compose(overrides))
        return pickle.loads(configs[key])

    return composed
