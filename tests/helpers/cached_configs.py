"""Compose each config once: Hydra takes 0.1 s of CPU time for one, and tests ask for a thousand."""

import hashlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps

import hydra
import omegaconf

from bench.contract.schema import Config
from helpers.paths import ROOT

PATHS = ("DATADIR", "MODEL", "LOGDIR", "NEMO_PYTHON")
"""The environment that conf/ reads."""
SHARED = ROOT / ".pytest_cache" / "composed"
"""What Hydra composes, for all processes and for later runs: in a folder for each state of the code that fills it."""
FILLED_BY = ("bench/contract/**/*.py", "bench/planning/compose.py", "bench/planning/conf_folder.py", "conf/**/*.yaml")
"""The files that a composed config depends on."""

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
        gpus = sys.modules.get(
            "pynvml"
        )  # the GPUs of a test; kept alive by the key, or another module could get its id
        key = (os.getcwd(), gpus, *map(os.environ.get, PATHS), *overrides)
        if key not in configs:
            configs[key] = pickle.dumps(compose(overrides))
        return pickle.loads(configs[key])

    return composed


def remembered(of_choices: OfChoices) -> OfChoices:
    """Return `of_choices` with a memory, files for other processes, and one request to Hydra for each part."""
    return cache(shared(in_parts(shared(of_choices))))


def in_parts(of_choices: OfChoices) -> OfChoices:
    """Return `of_choices`, which asks Hydra once for each place and once for each work, not for each pair of them."""

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
    """Return `of_choices` with files that other processes and later runs read and write too."""
    folder = SHARED / _state()
    for old in set(SHARED.glob("*")) - {folder}:
        shutil.rmtree(old, ignore_errors=True)

    def read_or_composed(choices: tuple[str, ...], sources: tuple[str, int]) -> bytes:
        path = folder / hashlib.sha256(repr((choices, sources)).encode()).hexdigest()
        with suppress(FileNotFoundError):
            return path.read_bytes()
        composed = of_choices(choices, sources)
        with suppress(OSError):  # a newer state of the code has removed the folder, or it cannot be written
            folder.mkdir(parents=True, exist_ok=True)
            begun = path.with_suffix(f".{os.getpid()}")
            begun.write_bytes(composed)
            begun.replace(path)
        return composed

    return read_or_composed


def _state() -> str:
    """Return the checksum of the code and the files of which configs are composed, and of the packages that do it."""
    versions = (sys.version, hydra.__version__, omegaconf.__version__)
    state = hashlib.sha256(repr(versions).encode())
    for path in sorted(path for glob in FILLED_BY for path in ROOT.glob(glob)):
        state.update(b"%s\0%s\0" % (bytes(path.relative_to(ROOT)), path.read_bytes()))
    return state.hexdigest()
