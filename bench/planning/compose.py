"""Compose a config from `conf/` and a command line's overrides; the only module that knows Hydra."""

import dataclasses
import difflib
import logging
import os
import re
import shlex
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import old_plans
from bench.contract.plan import Plan
from bench.contract.schema import Config, DataSource
from bench.contract.task import Kind, StartsFrom, Weights
from bench.errors import ConfigError
from bench.planning import make_plan

if TYPE_CHECKING:
    from omegaconf import DictConfig

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
CONF = next(d for d in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if d.is_dir())
"""Inside the package once installed, beside it in a checkout."""

FOR_BASE_TOO = ("model", "cluster", "gpu@cluster", "container", "walltime", "hydra")
"""Overrides of these also apply to the task that makes the base checkpoint; hydra.searchpath is the site's folder."""


MOVED = {
    "cluster.scheduler": "cluster.backend",
    "recipe.max_steps": "task.training.max_steps",
    "task.lora": "task.training.lora",
    "task.base": "task.training.base",
    "task.target_eval_loss": "task.training.target_eval_loss",
}
"""Keys of earlier versions, and what they are called now."""


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


class UnknownChoiceError(ConfigError):
    """A group of the config has no such choice, such as an engine of a later version."""

    def __init__(self, name: str, known: list[str], *, group: str) -> None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        super().__init__(f"no choice {name!r}", where=group, fix=_offer(near, ", ".join(sorted(known))))
        self.group, self.name, self.known = group, name, known


def for_run(overrides: Sequence[str], *, config_dir: Path | None = None) -> tuple[Plan, str]:
    """Return the plan of a command line's overrides, and what config.yaml holds of it.

    Raises:
        ConfigError: as `compose`.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    register()
    words = [*([_search_path(config_dir)] if config_dir else []), *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"), explained():
        config = hydra_compose("launch", overrides=words)
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
    if config.task.kind is Kind.kernels:  # of the rows only their length counts
        return dataclasses.replace(config, data=dataclasses.replace(config.data, source=DataSource.random))
    return with_random_weights(config) if config.model.weights is Weights.random else config


def with_random_weights(config: Config) -> Config:
    """Return the config of the same work with random weights and random rows: no target, checkpoint or data files."""
    training = dataclasses.replace(config.training, starts_from=StartsFrom.random, base=None, target_eval_loss=None)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, training=training, submittable=False),
        data=dataclasses.replace(config.data, source=DataSource.random),
    )


def _composed(overrides: list[str]) -> Config:
    from hydra import compose as hydra_compose

    _log.info("composing conf/launch.yaml in %s with %s", CONF, " ".join(overrides) or "no overrides")
    with explained():
        return typed(hydra_compose("launch", overrides=overrides))


def typed(config: "DictConfig") -> Config:
    """Return the config as its dataclasses, with the paths made absolute."""
    from omegaconf import OmegaConf

    typed_config = typing.cast(Config, OmegaConf.to_object(config))
    paths = typed_config.cluster.paths
    for name in ("data", "model", "logs"):
        setattr(paths, name, _absolute(getattr(paths, name)))
    typed_config.data.tokenizer = _absolute(typed_config.data.tokenizer)
    typed_config.launch.folder = _absolute(typed_config.launch.folder)
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
        raw = old_plans.with_named_profile(OmegaConf.to_container(OmegaConf.create(config_yaml)))
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


def register() -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="config_schema", node=Config)


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a ConfigError with where and fix."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, AttributeError, ValueError, TypeError) as error:
        known = _explain(error)
        if known is None:
            raise
        raise known from error


def _explain(error: Exception) -> ConfigError | None:
    """Return the error in our words, or None for one that is no fault of the command line."""
    from omegaconf.errors import OmegaConfBaseException

    text = "\n".join(str(e) for e in (error, error.__cause__) if e)
    if known := _wrong_choice(text) or _wrong_key(error, text) or _wrong_value(error, text):
        return known
    if isinstance(error, ValueError | TypeError | AttributeError) and not isinstance(error, OmegaConfBaseException):
        return None
    return ConfigError(text.splitlines()[0], where="command line", fix="see python -m bench.launch --help")


def _wrong_choice(text: str) -> ConfigError | None:
    """Return what is wrong with the choice of a group, or with a key that was removed or renamed."""
    if (missing := re.search(r"Could not find '([^']+)'", text)) and "Available options" in text:
        options = re.findall(r"^\t(\S+)$", text, re.M)
        return UnknownChoiceError(missing[1].split("/")[-1], options, group=missing[1].rsplit("/", 1)[0])
    if "Config group override must be" in text:
        return ConfigError("a group needs one choice", where="command line", fix="name one; --help lists them")
    if gone := re.search(r"missing \d+ required keyword-only argument.*?: '(\w+)'", text):
        return ConfigError(f"{gone[1]} is missing", where=gone[1], fix="do not delete it with ~; set it to a value")
    for old, new in MOVED.items():
        group, _, name = old.rpartition(".")
        if old in text or (f"'{name}'" in text and f"'{group.title()}'" in text):
            return ConfigError(f"{old} is now {new}", where=group, fix=f"write {new} in its place")
    return None


def _wrong_key(error: Exception, text: str) -> ConfigError | None:
    """Return which key of an override does not exist."""
    if isinstance(error, AttributeError):  # a schema class has slots, and no place for what `+key` added
        stray = re.fullmatch(r"'(\w+)' object has no attribute '(\w+)'", str(error))
        known = _keys().get(stray[1]) if stray else None
        if stray and known:
            return _unknown_key(stray[2], known)
    if "'cluster.environment" in text:
        return ConfigError(
            "cluster.environment holds the names that a site adds",
            where="cluster.environment",
            fix="put a + before each: +cluster.environment.NCCL_SOCKET_IFNAME=ib0",
        )
    if existing := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        what = f"a + adds a key, and there is one named {existing[1]} already"
        return ConfigError(what, where="command line", fix=f"leave out the +: {existing[1]}=…")
    if override := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text):
        return _unknown_key(override[1], _keys()["Config"])
    return None


def _wrong_value(error: Exception, text: str) -> ConfigError | None:
    """Return what is wrong with a value: its type, or how it is written."""
    if bad := re.search(r"full_key: (\S+)", text):
        what = str(error.__cause__ or error).splitlines()[0]
        return ConfigError(what, where=bad[1], fix="give a value of the type that --cfg job shows")
    if "LexerNoViableAltException: " in text:
        return _unquoted(text.partition("LexerNoViableAltException: ")[2].splitlines()[0])
    if "no viable alternative" in text or "mismatched input" in text or "Error parsing override" in text:
        return ConfigError(
            text.splitlines()[0],
            where="command line",
            fix="put quotes around words with = , or : in a list, and around the whole: "
            """'cluster.slurm.arguments=["--exclude=n1"]'""",
        )
    return None


def _unquoted(override: str) -> ConfigError:
    """Return what is wrong with an override whose value Hydra's grammar has no letters for, and how to quote it."""
    key, _, value = override.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{escaped}"')
    unknown = (letter for letter in value if not letter.isascii() or letter in "'\"`!#&;<>|^")
    letter = next(unknown, "a character")
    return ConfigError(
        f"{override}: {letter} must stand in quotes",
        where="command line",
        fix=f"put the value in double quotes, and the whole in the shell's: {quoted}",
    )


def _unknown_key(name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = _offer(near, "all keys: python -m bench.launch --cfg job")
    return ConfigError(f"no key {name!r}", where="command line", fix=fix)


def _offer(near: list[str], others: str) -> str:
    return f"did you mean {near[0]}? {others}" if near else others


def _keys() -> dict[str, list[str]]:
    """Return the dotted keys below each class of the schema, by its name."""
    found: dict[str, list[str]] = {}

    def walk(kind: Any) -> list[str]:
        keys = found.setdefault(kind.__name__, [])
        for name, hint in typing.get_type_hints(kind).items():
            keys.append(name)
            for inner in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(inner):
                    keys += [f"{name}.{key}" for key in walk(inner)]
        return keys

    walk(Config)
    return found
