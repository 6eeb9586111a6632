"""Compose a config from `conf/` and the overrides of a command line; the only module that uses Hydra."""

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

from bench.contract import cluster, codec, old_plans
from bench.contract.model import Weights
from bench.contract.plan import Plan
from bench.contract.schema import Config, DataSource, Device, EngineName
from bench.contract.training import StartsFrom
from bench.errors import ConfigError
from bench.planning import (
    avoided_nodes,
    deepspeed,
    described_models,
    gpu_detection,
    make_plan,
    model_folder,
    row_counts,
    to_prepare,
)
from bench.planning.compose_errors import RENAMED_OPTIONS, caused_by, explained
from bench.planning.conf_folder import CONF as CONF
from bench.texts import counted, hydra_value
from bench.user_folder import user_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

_log = logging.getLogger(__name__)

FOR_BASE_TOO = ("model", "cluster", "gpu@cluster", "container", "walltime", "hydra")
"""Overrides of these keys also apply to the task that trains the base checkpoint; hydra.searchpath is the site's
folder."""


READABLE = (
    *("DATADIR", "MODEL", "LOGDIR", "HOME", "SCRATCH", "USER"),
    *("NEMO_PYTHON", "RAY_API_SERVER_ADDRESS", "RUNSTOP_SWEEP_DIR"),
)
"""Environment variables that a config may read by ${oc.env:NAME}: their values become part of plan and script."""


def compose(
    overrides: Sequence[str], *, config_dir: Path | None = None, bad_nodes: avoided_nodes.BadNodes | None = None
) -> Plan:
    """Return the plan of a command line's overrides.

    bad_nodes: as for `plan_of`.

    Raises:
        ConfigError: an unknown key or choice, a value of the wrong type, or an impossible request.
    """
    from hydra import initialize_config_dir

    register()
    places = search_path(config_dir)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = _composed([*places, *overrides])
        return plan_of(config, [*places, *overrides], config_dir=config_dir, bad_nodes=bad_nodes)


def for_run(
    overrides: Sequence[str], *, config_dir: Path | None = None, bad_nodes: avoided_nodes.BadNodes | None = None
) -> tuple[Plan, str]:
    """Return the plan of a command line's overrides, and the text of config.yaml.

    Raises:
        ConfigError: as `compose`.
    """
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    register()
    words = [*search_path(config_dir), *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"), explained(words):
        config = _of_hydra(words)
        plan = plan_of(typed(config), words, config_dir=config_dir, bad_nodes=bad_nodes)
        return plan, OmegaConf.to_yaml(config)


def unplanned(overrides: Sequence[str], *, config_dir: Path | None = None) -> Config:
    """Return the config of a command line's overrides without checking that it can be planned."""
    from hydra import initialize_config_dir

    register()
    places = search_path(config_dir)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return _composed([*places, *overrides])


def plan_of(
    config: Config,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    bad_nodes: avoided_nodes.BadNodes | None = None,
) -> Plan:
    """Return the plan. Hydra must be initialized, because the base task is composed as well.

    config_dir: the site's own folder, for the commands in errors. bad_nodes: returns the nodes that cluster.avoid=auto
    leaves out; without it, none is left out.
    """
    config = avoided_nodes.resolved(config, bad_nodes)
    _check_num_hosts(config, overrides)
    config = row_counts.with_train_rows(as_planned(config), [*overrides, *to_prepare.site_words(config_dir)])
    base = None
    if config.task.training is not None and config.task.training.base is not None:
        shared = [override for override in overrides if override_key(override).split(".")[0] in FOR_BASE_TOO]
        base = _with_first_hosts(_composed([f"task={config.training.base}", *shared]))
        base.cluster.spare_nodes = 0  # launch.replace_slow is not shared
    plan = make_plan.make(config, base)
    model_folder.check(plan)
    return plan


def override_key(override: str) -> str:
    """Return the key, or the group, that an override sets, adds or removes."""
    return override.lstrip("+~").partition("=")[0]


NUM_NODES = "cluster.num_nodes"


def _check_num_hosts(config: Config, overrides: Sequence[str]) -> None:
    """Raise ConfigError if a list has more hosts than the run has nodes, unless an override sets this number.

    With such an override the run uses the first hosts. Without it the longer list is probably a mistake: the number is
    the default of the cluster's file. With cluster.avoid, the other hosts replace those that are left out.
    """
    hosts, num_nodes = config.cluster.hosts or [], config.cluster.num_nodes
    if config.cluster.avoid is None and len(hosts) > num_nodes and NUM_NODES not in map(override_key, overrides):
        raise ConfigError(
            f"cluster.hosts lists {len(hosts)} hosts, but the config has {NUM_NODES}={num_nodes}, and the command line "
            "does not confirm this number",
            where="cluster.hosts",
            fix=f"add {NUM_NODES}={len(hosts)} to the command line, or add {NUM_NODES}={num_nodes} to use only the "
            f"first {counted(num_nodes, 'host')}",
        )


def as_planned(config: Config) -> Config:
    """Return the config as it is stored in the plan: without settings that the run does not use."""
    config = _with_first_hosts(config)
    is_random = config.task.training is not None and config.model.weights is Weights.random
    return with_random_weights(config) if is_random else config


def _with_first_hosts(config: Config) -> Config:
    """Return the config with as many hosts as nodes: the first ones of the list."""
    hosts, num_nodes = config.cluster.hosts, config.cluster.num_nodes
    if hosts is None or not 1 <= num_nodes < len(hosts):
        return config
    cluster.require_distinct(hosts)
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hosts=hosts[:num_nodes]))


def with_random_weights(config: Config) -> Config:
    """Return the config of the same work with random weights and random rows: no target, checkpoint or data files."""
    training = dataclasses.replace(config.training, starts_from=StartsFrom.random, base=None, target_eval_loss=None)
    data = dataclasses.replace(config.training_data, source=DataSource.random)
    if config.training_data.source is DataSource.megatron:
        data.files, data.eval_files = None, None
        data.train_rows = min(data.train_rows or RANDOM_ROWS, RANDOM_ROWS)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, training=training, submittable=False, division=None),
        data=data,
    )


RANDOM_ROWS = 65_536
"""Random rows that replace those of Megatron's files: every rank has all of them in memory, 2.1 GB of 8,192 tokens."""


def _composed(overrides: list[str]) -> Config:
    _log.info("composing conf/launch.yaml in %s with %s", CONF, " ".join(overrides) or "no overrides")
    with explained(overrides):
        return typed(_of_hydra(overrides))


def with_new_options(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the current names of renamed keys and options; log a warning for each old name."""
    return [_with_new_key(_with_new_option(override)) for override in overrides]


def _with_new_key(override: str) -> str:
    key, equals, value = override.lstrip("+~").partition("=")
    new = old_plans.CONFIG_KEYS.get(key)
    if new is None:
        return override
    _log.warning("%s was renamed: use %s", key, new)
    return f"{override[: len(override) - len(override.lstrip('+~'))]}{new}{equals}{value}"


def _with_new_option(override: str) -> str:
    group, _, options = override.partition("=")
    new_names = RENAMED_OPTIONS.get(group, {})
    for old in new_names.keys() & set(options.split(",")):
        _log.warning("%s=%s was renamed: use %s=%s", group, old, group, new_names[old])
    return (
        f"{group}={','.join(new_names.get(option, option) for option in options.split(','))}" if new_names else override
    )


def _of_hydra(words: Sequence[str]) -> "DictConfig":
    """Return what Hydra composes from conf/launch.yaml and the overrides.

    If the cluster's device is `auto`, the GPUs of this machine are found and composed as overrides. With model=hf, the
    sizes of the model are read from its folder.
    """
    words = with_new_options(words)
    return completed(_composed_by_hydra(words), words)


def completed(config: "DictConfig", words: Sequence[str]) -> "DictConfig":
    """Return the config that Hydra composed from the overrides, with the values that depend on other values."""
    return with_model_read(with_reference_point(with_gpus_and_preset(config, words)), words)


def with_reference_point(config: "DictConfig") -> "DictConfig":
    """Return the config with the missing learning rate and warm-up of recipe.reference_points, by the batch size.

    The warm-up has the whole steps of the point's samples, as in MLPerf's reference.

    Raises:
        ConfigError: one is missing, and there is no point for recipe.global_batch_size.
    """
    from omegaconf import OmegaConf

    recipe = config.get("recipe")  # absent after `~recipe`, which is refused later
    if recipe is None or recipe.reference_points is None or OmegaConf.is_missing(recipe, "global_batch_size"):
        return config
    missing = [key for key in ("lr", "lr_warmup_steps") if OmegaConf.is_missing(recipe, key)]
    size, points = recipe.global_batch_size, {point.global_batch_size: point for point in recipe.reference_points}
    if missing and size not in points:
        known_sizes = ", ".join(map(str, sorted(points)))
        raise ConfigError(
            f"recipe.{missing[0]} is not set, and recipe.reference_points of {config.task.name} has no entry for "
            f"recipe.global_batch_size={size}",
            where=", ".join(f"recipe.{key}" for key in ("global_batch_size", *missing)),
            fix=f"set recipe.global_batch_size to one of {known_sizes}, or set "
            f"{' and '.join(f'recipe.{key}' for key in missing)}",
        )
    if "lr" in missing:
        recipe.lr = points[size].lr
    if "lr_warmup_steps" in missing:
        recipe.lr_warmup_steps = points[size].lr_warmup_samples // size
    recipe.reference_points = None
    return config


def with_gpus_and_preset(config: "DictConfig", words: Sequence[str]) -> "DictConfig":
    """Return the config that Hydra composed from the overrides; for device=auto, with the GPUs of this machine.

    With engine.preset, the values of its file for these GPUs are added; the overrides come after them.

    Raises:
        ConfigError: the preset is unknown, or has no values for this system.
    """
    is_open = config.cluster.device == Device.auto
    if gpus := gpu_detection.overrides(has_gpu_file=config.cluster.gpu is not None) if is_open else []:
        words = [*gpus, *words]
        config = _composed_by_hydra(words)
    if config.engine.preset is not None:
        config = _composed_by_hydra([_preset(config), *words])
    if is_open and not gpus:
        config.cluster.device = Device.cpu
    return config


PRESETS, FOR_ALL = "preset", "all"
"""The group of folders with presets, and the file in each that the others include."""


def _preset(config: "DictConfig") -> str:
    """Return the override that chooses the file of engine.preset for the GPU and the number of nodes."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType

    loader, name = GlobalHydra.instance().config_loader(), config.engine.preset
    if config.engine.name != EngineName.command:
        raise ConfigError(
            f"engine.preset={name} needs engine=command, but the engine is {config.engine.name.name}",
            where="engine, engine.preset",
            fix="choose engine=command, or remove engine.preset",
        )
    presets = loader.get_group_options(PRESETS, ObjectType.GROUP)
    if name not in presets:
        raise ConfigError(
            f"there is no preset {name}",
            where="engine.preset",
            fix=f"set engine.preset to one of {', '.join(presets)}",
        )
    gpu, nodes = config.cluster.gpu, config.cluster.num_nodes
    wanted = f"{nodes}x{_short(gpu.name) if gpu else 'unknown'}"
    systems = [option for option in loader.get_group_options(f"{PRESETS}/{name}") if option != FOR_ALL]
    if wanted not in systems:
        raise ConfigError(
            f"preset {name} has no values for {counted(nodes, 'node')} with {gpu.name if gpu else 'an unknown GPU'}",
            where="engine.preset, cluster",
            fix=f"choose a cluster of one of these sizes (nodes x GPU): {', '.join(systems)}; or write "
            f"preset/{name}/{wanted}.yaml in a folder of your own, and pass this folder with --config-dir",
        )
    return f"+{PRESETS}/{name}={wanted}"


def _short(gpu: str) -> str:
    """Return a GPU's name as part of a preset's file name: h100 for NVIDIA H100 SXM 80GB."""
    return re.sub(r" sxm.*", "", gpu.lower().removeprefix("nvidia ")).replace(" ", "_")


def with_model_read(config: "DictConfig", overrides: Sequence[str]) -> "DictConfig":
    """Return the config with the sizes of model=hf from the folder's config.json, but for those that overrides set.

    A size in a task's file is meant for the task's own model. A model that transformers describes is also probed here,
    so that config.yaml is complete.

    Raises:
        ConfigError: as `model_folder.read`.
    """
    from omegaconf import OmegaConf

    if not OmegaConf.is_missing(config.model, "source"):
        return config
    serving = OmegaConf.select(config, "task.serving.server.model")
    where = "cluster.paths.model" if serving is None else "task.serving.server.model"
    read = model_folder.read(serving or config.cluster.paths.model, where=where, engine=config.engine.name)
    overridden = {override_key(override) for override in overrides}
    for name, value in model_folder.values(read).items():
        if f"model.{name}" not in overridden:
            # A block that is null, such as experts, takes its type from the block above.
            OmegaConf.update(config, "model", {name: value}, merge=True, force_add=True)
    if read.described is not None:
        config.model.described = read.described
        completed = described_models.completed(typed(config))
        config.model.described = completed.model.described
        if completed.task.training is not None and completed.task.training.lora is not None:
            OmegaConf.update(config, "task.training.lora", codec.plain(completed.task.training.lora))
    return config


def _composed_by_hydra(words: Sequence[str]) -> "DictConfig":
    """Return what Hydra composes from the overrides.

    Hydra needs 0.1 s. This process caches each combination of group choices and then sets the values as Hydra would.
    Hydra itself composes every other kind of override, a site's own folder, and everything that raises an error.
    """
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    choices = tuple(override for override in words if _is_choice(override))
    values = [override for override in words if not _is_choice(override)]
    if all(_VALUE.match(override) for override in values):
        with suppress(HydraException, OmegaConfBaseException):
            return _with_values(pickle.loads(_of_choices(choices, _sources())), values)
    return hydra_compose("launch", overrides=list(words))


_VALUE = re.compile(r"(?!\+?hydra\.)(?:[\w.]+|\+\w+\.[\w.]+)=")
"""Sets an existing key or, with a leading +, adds one below another key. Hydra's own keys do not match."""


def _is_choice(override: str) -> bool:
    group, equals, _ = override.partition("=")
    return bool(equals) and ("@" in group or "/" in group or (CONF / group).is_dir())


def _sources() -> tuple[str, int]:
    """Return Hydra's search path, and a number that changes when any file in conf/ changes."""
    from hydra.core.global_hydra import GlobalHydra

    folders = (os.scandir(folder) for folder, _, _ in os.walk(CONF))
    times_ns = sum(file.stat().st_mtime_ns for files in folders for file in files if file.name.endswith(".yaml"))
    return str(GlobalHydra.instance().config_loader().get_search_path()), times_ns


@lru_cache(maxsize=256)
def _of_choices(choices: tuple[str, ...], sources: tuple[str, int]) -> bytes:
    """Return what Hydra composes from group choices, pickled; `sources` invalidates the cache when files change."""
    from hydra import compose as hydra_compose

    return pickle.dumps(hydra_compose("launch", overrides=list(choices)))


def _with_values(config: "DictConfig", words: Sequence[str]) -> "DictConfig":
    """Return the config after applying KEY=VALUE overrides in Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    overrides = OverridesParser.create().parse_overrides(list(words))
    if any(override.is_sweep_override() for override in overrides):
        raise HydraException("several values need --multirun")
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if override.is_add() and not isinstance(value, dict | list) and OmegaConf.select(config, key) is not None:
            raise HydraException(f"{key} exists")
        OmegaConf.update(config, key, value, merge=True, force_add=override.is_add())
    return config


def typed(config: "DictConfig") -> Config:
    """Return the config as dataclasses, with absolute paths."""
    from omegaconf import OmegaConf

    typed_config = typing.cast(Config, OmegaConf.to_object(config))
    paths = typed_config.cluster.paths
    for name in ("data", "model", "logs"):
        setattr(paths, name, _absolute(getattr(paths, name)))
    if typed_config.data is not None:
        typed_config.data.tokenizer = _absolute(typed_config.data.tokenizer)
        typed_config.data.chat_template = _absolute(typed_config.data.chat_template)
    if typed_config.task.generation is not None:
        typed_config.task.generation.prompts = _absolute(typed_config.task.generation.prompts)
    if typed_config.task.serving is not None:
        typed_config.task.serving.lengths.file = _absolute(typed_config.task.serving.lengths.file)
    typed_config.launch.folder = _absolute(typed_config.launch.folder)
    if (program := typed_config.engine.command) is not None:
        program.argv = [_absolute_file(text) for text in program.argv]
        program.folder = program.folder and (program.folder if "{" in program.folder else _absolute(program.folder))
    huggingface = typed_config.engine.huggingface
    if huggingface is not None and deepspeed.is_path(huggingface.deepspeed_json):
        huggingface.deepspeed_json = _absolute(huggingface.deepspeed_json)
    return typed_config


def read(config_yaml: str) -> Config:
    """Return the config of a run folder's config.yaml.

    Raises:
        ConfigError: it is not a config of this version.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    register()
    try:
        raw = old_plans.upgraded_config(OmegaConf.to_container(OmegaConf.create(config_yaml)))
        return typed(typing.cast("DictConfig", OmegaConf.merge(OmegaConf.structured(Config), raw)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError) as error:
        if own := caused_by(error):
            raise own from error
        raise ConfigError(
            f"this version of runstop cannot read the config: {str(error).partition(chr(10))[0]}",
            where="config.yaml",
            fix="read this run with the version of runstop that wrote the run folder",
        ) from error


def _absolute(path: str | None) -> str | None:
    """Return the absolute path; the job's shell expands a path that begins with a variable ($DATADIR)."""
    return path if not path or path.startswith("$") else os.path.abspath(path)


def _absolute_file(text: str) -> str:
    """Return the absolute path of a word that names a file here, such as train.py: the program starts elsewhere."""
    is_file = ("." in text or "/" in text) and Path(text).is_file()
    return os.path.abspath(text) if is_file else text


def search_path(config_dir: Path | None = None) -> list[str]:
    """Return the override that adds a site's folder and the user's own, quoted for Hydra's grammar; [] for neither."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(
            "this path is a file, not a folder" if config_dir.exists() else "this folder does not exist",
            where=f"--config-dir {config_dir}",
            fix="give a folder with config files, such as cluster/mine.yaml",
        )
    folders = [folder for folder in (config_dir, user_folder()) if folder is not None and folder.is_dir()]
    places = ",".join(hydra_value(f"file://{folder.resolve()}") for folder in folders)
    return [f"hydra.searchpath=[{places}]"] if folders else []


def completions(override: str, others: Sequence[str], *, config_dir: Path | None = None) -> list[str]:
    """Return the completions of a partial override: groups, their choices, keys and their current values.

    The other overrides decide which keys exist. A config that cannot be composed has no completions.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import CompletionPlugin

    class Words(CompletionPlugin):
        """Hydra's completion without a shell."""

        def install(self) -> None: ...
        def uninstall(self) -> None: ...
        def query(self, config_name: str | None) -> None: ...
        def completions(self, line: str) -> list[str]:
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
            places = search_path(config_dir)
            return Words(GlobalHydra.instance().config_loader()).completions(" ".join([*places, *others, override]))
        except (HydraException, ConfigError):
            return []


@cache
def register() -> None:
    """Register the schema with Hydra, once per process: each registration parses the dataclasses again.

    The resolver of environment variables is replaced by one that reads only READABLE.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def variable(name: str, *default: str | None) -> str | None:
        if name not in READABLE:
            raise ConfigError(
                f"${{oc.env:{name}}} is not allowed, because it would copy an environment variable into the plan",
                where="a value of the config",
                fix="write the value itself into the config; for a secret, write only the name of an environment "
                f"variable or file; the config may read only the variables {', '.join(READABLE)}",
                rule="CFG-07",
            )
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", variable, replace=True)
    ConfigStore.instance().store(name="config_schema", node=Config)
