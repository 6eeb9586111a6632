"""Compose each config once: Hydra takes 0.1 s of CPU time for one, and tests ask for a thousand."""

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path

from bench.contract.schema import Config

PATHS = ("DATADIR", "MODEL", "LOGDIR", "NEMO_PYTHON")
"""The environment that conf/ reads."""
SHARED = "COMPOSED_CONFIGS"
"""A folder for what Hydra composes; tests/all.sh makes one for all of its processes and removes it."""

PLACE = ("cluster", "gpu@cluster.gpu", "+failures@cluster.failures", "container")
"""Groups that say where a run goes. Their files fill `cluster` and `container`, and those of other groups do not."""

OfChoices = Callable[[tuple[str, ...], tuple[str, int]], bytes]
"""What compose._of_choices is: choices of groups, where Hydra looks for files and when they changed."""


def cached(compose: Callable[[list[str]], Config]) -> Callable[[list[str]], Config]:
    """Return `compose` with a memory. Each caller gets a config of its own, since configs can be changed."""
    configs: dict[tuple[object, ...], bytes] = {}

    @wraps(compose)
    def composed(overrides: list[str]) -> Config:
        if any(
            "searchpath" in override or override == "model=hf" for override in overrides
        ):  # a folder that may change
            return compose(overrides)
        gpus = sys.modules.get("pynvml")  # the GPUs of a test: a plan depends on those of its machine
        key = (os.getcwd(), id(gpus), *map(os.environ.get, PATHS), *overrides)
        if key not in configs:
            configs[key] = pickle.dumps(compose(overrides))
        return pickle.loads(configs[key])

    return composed


def in_parts(of_choices: OfChoices) -> OfChoices:
    """Return `of_choices`, which asks Hydra once for each place and once for each work, not for each pair of them."""

    @cache
    def composed(choices: tuple[str, ...], sources: tuple[str, int]) -> bytes:
        place = tuple(override for override in choices if override.partition("=")[0] in PLACE)
        work = tuple(override for override in choices if override not in place)
        has_preset = any(override.startswith("+preset/") for override in choices)  # its files fill all of the config
        if not place or not work or has_preset:
            return of_choices(choices, sources)
        config, there = (pickle.loads(of_choices(part, sources)) for part in (work, place))
        config.cluster, config.container = there.cluster, there.container
        return pickle.dumps(config)

    return composed


def shared(of_choices: OfChoices) -> OfChoices:
    """Return `of_choices` with files that other processes read and write too, where there is a folder for them."""
    folder = os.environ.get(SHARED)
    if folder is None:
        return of_choices

    def read_or_composed(choices: tuple[str, ...], sources: tuple[str, int]) -> bytes:
        path = Path(folder, hashlib.sha256(repr((choices, sources)).encode()).hexdigest())
        if not path.exists():
            begun = path.with_suffix(f".{os.getpid()}")
            begun.write_bytes(of_choices(choices, sources))
            begun.replace(path)
        return path.read_bytes()

    return read_or_composed
