"""Compose a config from `conf/` and a command line's overrides; the only module that knows Hydra."""

import dataclasses
import logging
import os
import pickle
import re
import typing
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import old_plans
from bench.contract.model import Weights
from bench.contract.plan import Plan
from bench.contract.schema import Config, DataSource
from bench.contract.training import StartsFrom
from bench.errors import ConfigError
from bench.planning import deepspeed, make_plan
from bench.planning.compose_errors import explained
from bench.planning.conf_folder import CONF as CONF

if TYPE_CHECKING:
    from omegaconf import DictConfig

_log = logging.getLogger(__name__)

FOR_BASE_TOO = ("model", "cluster", "gpu@cluster", "container", "walltime", "hydra")
"""Overrides of these also apply to the task that makes the base checkpoint; hydra.searchpath is the site's folder."""


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> Plan:
    """Return the plan of a command line's overrides.

    Raises:
        ConfigError: an unknown key or choice, a value of the wrong type, or an impossible request.
    """
    from hydra import initialize_config_dir

    register()
    search_path = [_search_path(config_dir)] if config_dir else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = _composed([*search_path, *overrides])
        return plan_of(config, [*search_path, *overrides])


def for_run(overrides: Sequence[str], *, config_dir: Path | None = None) -> tuple[Plan, str]:
    """Return the plan of a command line's overrides, and what config.yaml holds of it.

    Raises:
        ConfigError: as `compose`.
    """
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    register()
    words = [*([_search_path(config_dir)] if config_dir else []), *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"), explained():
        config = _of_hydra(words)
        return plan_of(typed(config), words), OmegaConf.to_yaml(config)


def unplanned(overrides: Sequence[str], *, config_dir: Path | None = None) -> Config:
    """Return the config of a command line's overrides, of which nothing says that it can be planned."""
    from hydra import initialize_config_dir

    register()
    search_path = [_search_path(config_dir)] if config_dir else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return _composed([*search_path, *overrides])


def plan_of(config: Config, overrides: Sequence[str]) -> Plan:
    """Return the plan; Hydra must be initialized, since the base task is composed beside the task."""
    config = as_planned(config)
    if config.task.training is None or config.task.training.base is None:
        return make_plan.make(config)
    shared = [word for word in overrides if word.lstrip("+~").split("=")[0].split(".")[0] in FOR_BASE_TOO]
    return make_plan.make(config, _composed([f"task={config.training.base}", *shared]))


def as_planned(config: Config) -> Config:
    """Return the config as its plan has it: what a run does not read is not in it."""
    is_random = config.task.training is not None and config.model.weights is Weights.random
    return with_random_weights(config) if is_random else config


def with_random_weights(config: Config) -> Config:
    """Return the config of the same work with random weights and random rows: no target, checkpoint or data files."""
    training = dataclasses.replace(config.training, starts_from=StartsFrom.random, base=None, target_eval_loss=None)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, training=training, submittable=False),
        data=dataclasses.replace(config.training_data, source=DataSource.random),
    )


def _composed(overrides: list[str]) -> Config:
    _log.info("composing conf/launch.yaml in %s with %s", CONF, " ".join(overrides) or "no overrides")
    with explained():
        return typed(_of_hydra(overrides))


def _of_hydra(words: Sequence[str]) -> "DictConfig":
    """Return what Hydra composes from conf/launch.yaml and the words.

    Hydra needs 0.1 s. The same choices of groups are composed once in a process; values are put in as Hydra does it.
    It has the last word on every other kind of override, on a site's own folder and on whatever is wrong.
    """
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    choices = tuple(word for word in words if _is_choice(word))
    values = [word for word in words if not _is_choice(word)]
    if all(_VALUE.match(word) for word in values):
        with suppress(HydraException, OmegaConfBaseException):
            return _with_values(pickle.loads(_of_choices(choices, _sources())), values)
    return hydra_compose("launch", overrides=list(words))


_VALUE = re.compile(r"(?!\+?hydra\.)(?:[\w.]+|\+\w+\.[\w.]+)=")
"""A value for a key that exists or, with a + in front, for one that is added below another; none of Hydra's own."""


def _is_choice(word: str) -> bool:
    group, equals, _ = word.partition("=")
    return bool(equals) and ("@" in group or "/" in group or (CONF / group).is_dir())


def _sources() -> tuple[str, int]:
    """Return where Hydra looks for files, and a number that changes with any of ours."""
    from hydra.core.global_hydra import GlobalHydra

    folders = (os.scandir(folder) for folder, _, _ in os.walk(CONF))
    times_ns = sum(file.stat().st_mtime_ns for files in folders for file in files if file.name.endswith(".yaml"))
    return str(GlobalHydra.instance().config_loader().get_search_path()), times_ns


@lru_cache(maxsize=256)
def _of_choices(choices: tuple[str, ...], sources: tuple[str, int]) -> bytes:
    """Return what Hydra composes of groups alone, pickled; `sources` makes what has changed since another question."""
    from hydra import compose as hydra_compose

    return pickle.dumps(hydra_compose("launch", overrides=list(choices)))


def _with_values(config: "DictConfig", words: Sequence[str]) -> "DictConfig":
    """Return the config, changed by KEY=VALUE in Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    overrides = OverridesParser.create().parse_overrides(list(words))
    if any(override.is_sweep_override() for override in overrides):
        raise HydraException("several values are for --multirun")
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if override.is_add() and not isinstance(value, dict | list) and OmegaConf.select(config, key) is not None:
            raise HydraException(f"{key} exists")
        OmegaConf.update(config, key, value, merge=True, force_add=override.is_add())
    return config


def typed(config: "DictConfig") -> Config:
    """Return the config as its dataclasses, with the paths made absolute."""
    from omegaconf import OmegaConf

    typed_config = typing.cast(Config, OmegaConf.to_object(config))
    paths = typed_config.cluster.paths
    for name in ("data", "model", "logs"):
        setattr(paths, name, _absolute(getattr(paths, name)))
    if typed_config.data is not None:
        typed_config.data.tokenizer = _absolute(typed_config.data.tokenizer)
    if typed_config.task.generation is not None:
        typed_config.task.generation.prompts = _absolute(typed_config.task.generation.prompts)
    typed_config.launch.folder = _absolute(typed_config.launch.folder)
    huggingface = typed_config.engine.huggingface
    if huggingface is not None and deepspeed.is_path(huggingface.deepspeed_json):
        huggingface.deepspeed_json = _absolute(huggingface.deepspeed_json)
    return typed_config


def read(config_yaml: str) -> Config:
    """Return the config of a run folder's config.yaml.

    Raises:
        ConfigError: it is not one, or one of another version.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        raw = old_plans.upgraded_config(OmegaConf.to_container(OmegaConf.create(config_yaml)))
        return typed(typing.cast("DictConfig", OmegaConf.merge(OmegaConf.structured(Config), raw)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError) as error:
        what = f"not a config of this version: {str(error).partition(chr(10))[0]}"
        raise ConfigError(what, where="config.yaml", fix="read it with the version that wrote it") from error


def _absolute(path: str | None) -> str | None:
    """Return the absolute path; one that begins with a variable ($DATADIR) is left to the job's shell."""
    return path if not path or path.startswith("$") else os.path.abspath(path)


def _search_path(config_dir: Path) -> str:
    """Return the override that adds a site's folder, quoted for Hydra's grammar."""
    if not config_dir.is_dir():
        raise ConfigError(
            "no such folder", where=f"--config-dir {config_dir}", fix="name the folder that holds cluster/"
        )
    quoted = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.searchpath=['file://{quoted}']"


def completions(word: str, others: Sequence[str], *, config_dir: Path | None = None) -> list[str]:
    """Return how an override that has been begun may go on: groups, their choices, keys and their present values.

    The other overrides decide what the keys are. What cannot be composed has no completions.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import CompletionPlugin

    class Words(CompletionPlugin):
        """Hydra's answer, without the shell around it."""

        def install(self) -> None: ...
        def uninstall(self) -> None: ...
        def query(self, config_name: str | None) -> None: ...
        def found(self, line: str) -> list[str]:
            return self._query("launch", line)

        @staticmethod
        def provides() -> str:
            return "runstop"

        @staticmethod
        def help(command: str) -> str:
            return command

    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            search_path = [_search_path(config_dir)] if config_dir else []
            return Words(GlobalHydra.instance().config_loader()).found(" ".join([*search_path, *others, word]))
        except (HydraException, ConfigError):
            return []


@cache
def register() -> None:
    """Tell Hydra of the schema, once; the dataclasses are read anew each time that they are given to it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="config_schema", node=Config)
