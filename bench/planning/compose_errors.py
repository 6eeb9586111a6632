"""Errors of Hydra and OmegaConf as ConfigErrors: what is wrong, where, and the fix."""

import dataclasses
import difflib
import re
import shlex
import traceback
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.contract import old_plans
from bench.contract.schema import Config
from bench.errors import ConfigError

MOVED = {
    "cluster.scheduler": "cluster.backend",
    "recipe.max_steps": "task.training.max_steps",
    "task.lora": "task.training.lora",
    "task.base": "task.training.base",
    "task.target_eval_loss": "task.training.target_eval_loss",
    **old_plans.CONFIG_KEYS,
}
"""Keys of earlier versions, and their current names."""


class UnknownChoiceError(ConfigError):
    """A config group has no such choice, for example an engine of a later version."""

    def __init__(self, name: str, known: list[str], *, group: str) -> None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        super().__init__(
            f"{group}={name} does not exist", where=group, fix=_offer(near, f"choose from {', '.join(sorted(known))}")
        )
        self.group, self.name, self.known = group, name, known


class InvalidValueError(ConfigError):
    """A key has an invalid value, for example an engine of a later version."""

    def __init__(self, what: str, *, key: str, value: str | None) -> None:
        super().__init__(
            what, where=key, fix="write a value of the type that `runstop launch --cfg job` shows for this key"
        )
        self.key, self.value = key, value


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a ConfigError with where and fix."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError

    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a file of the config"
        fix = "write plain YAML: texts, numbers, lists and mappings, without tags such as !!python"
        raise ConfigError(
            f"the file is not valid YAML: {error.problem}", where=where, fix=fix, rule="CFG-09"
        ) from error
    except AssertionError as error:
        if "Unexpected type for root: NoneType" not in str(error):
            raise
        raise _below_null(error) from error
    except (HydraException, OmegaConfBaseException, AttributeError, ValueError, TypeError) as error:
        known = caused_by(error) or _explain(error)
        if known is None:
            raise
        raise known from error


def caused_by(error: BaseException | None) -> ConfigError | None:
    """Return the ConfigError that caused an error, such as one of a resolver."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def _below_null(error: AssertionError) -> ConfigError:
    """Return the error of a key below a null block. OmegaConf's message lacks the key; Hydra's stack frame has it."""
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    key = next((str(names["override"].key_or_group) for names in frames if "override" in names), "a key")
    block = key.rpartition(".")[0]
    group, _, name = block.partition(".")
    choose = f"engine={name}" if group == "engine" else f"{group}= to a file that has the block {block}"
    return ConfigError(f"{key} cannot be set, because the block {block} is null", where=key, fix=f"set {choose}")


def _explain(error: Exception) -> ConfigError | None:
    """Return the error as a ConfigError; None for one that the command line did not cause."""
    from omegaconf.errors import OmegaConfBaseException

    text = "\n".join(str(e) for e in (error, error.__cause__) if e)
    if known := _wrong_choice(text) or _wrong_key(error, text) or _wrong_value(error, text):
        return known
    if isinstance(error, ValueError | TypeError | AttributeError) and not isinstance(error, OmegaConfBaseException):
        return None
    return ConfigError(text.splitlines()[0], where="command line", fix="see `runstop launch --help`")


def _wrong_choice(text: str) -> ConfigError | None:
    """Return the error of a group without such a choice, or of a key that was removed or renamed."""
    if (missing := re.search(r"Could not find '([^']+)'", text)) and "Available options" in text:
        options = re.findall(r"^\t(\S+)$", text, re.M)
        return UnknownChoiceError(missing[1].split("/")[-1], options, group=missing[1].rsplit("/", 1)[0])
    if "Config group override must be" in text:
        return ConfigError(
            "a config group accepts only one choice", where="command line", fix="give one choice; --help lists all"
        )
    if gone := re.search(r"missing \d+ required keyword-only argument.*?: '(\w+)'", text):
        return ConfigError(
            f"the required key {gone[1]} was deleted",
            where=gone[1],
            fix=f"remove ~ from the override, and set {gone[1]}",
        )
    for old, new in MOVED.items():
        group, _, name = old.rpartition(".")
        is_in_class = f"'{group.title()}'" in text or old in old_plans.CONFIG_KEYS
        if old in text or (f"'{name}'" in text and is_in_class):
            return ConfigError(f"{old} was renamed to {new}", where=group, fix=f"write {new} instead")
    return None


def _wrong_key(error: Exception, text: str) -> ConfigError | None:
    """Return the error of an override whose key does not exist."""
    if isinstance(error, AttributeError):  # schema classes have slots: `+key` cannot add an attribute
        stray = re.fullmatch(r"'(\w+)' object has no attribute '(\w+)'", str(error))
        known = _keys().get(stray[1]) if stray else None
        if stray and known:
            return _unknown_key(stray[2], known)
    stray = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if stray and f".{stray[1]}'" not in text:  # inside the braces of key={…}: the override does not name it
        return _unknown_key(stray[1], _keys().get(stray[2], []))
    if "'cluster.environment" in text:
        return ConfigError(
            "cluster.environment does not contain this variable, so an override cannot change it",
            where="cluster.environment",
            fix="write a leading + to add the variable: +cluster.environment.NCCL_SOCKET_IFNAME=ib0",
        )
    if existing := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        what = f"a leading + adds a new key, but {existing[1]} already exists"
        return ConfigError(what, where="command line", fix=f"remove the +: {existing[1]}=…")
    if override := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text):
        key = override[1]
        if key in _keys()["Config"]:  # a mapping: the schema does not list its keys
            fix = f"write a leading + to add keys: +{key}=…"
            return ConfigError(f"an override without + cannot add new keys to {key}", where=key, fix=fix)
        return _unknown_key(key, _keys()["Config"])
    return None


def _wrong_value(error: Exception, text: str) -> ConfigError | None:
    """Return the error of a value with a wrong type or syntax."""
    if bad := re.search(r"full_key: (\S+)", text):
        what = str(error.__cause__ or error).splitlines()[0]
        value = re.search(r"Invalid value '([^']*)'", what)
        return InvalidValueError(what, key=bad[1], value=value and value[1])
    if "LexerNoViableAltException: " in text:
        return _unquoted(text.partition("LexerNoViableAltException: ")[2].splitlines()[0])
    if "no viable alternative" in text or "mismatched input" in text or "Error parsing override" in text:
        return ConfigError(
            text.splitlines()[0],
            where="command line",
            fix="quote list items that contain = , or :, and quote the whole override for the shell: "
            """'cluster.slurm.arguments=["--exclude=n1"]'""",
        )
    return None


def _unquoted(override: str) -> ConfigError:
    """Return the error of a value with characters that Hydra's grammar does not allow; the fix quotes the override."""
    key, _, value = override.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{escaped}"')
    unknown = (letter for letter in value if not letter.isascii() or letter in "'\"`!#&;<>|^")
    letter = next(unknown, "a character")
    return ConfigError(
        f"the override {override} contains {letter}, which must be quoted",
        where="command line",
        fix=f"put the value in double quotes and the whole override in single quotes: {quoted}",
    )


def _unknown_key(name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = _offer(near, "to list all keys: runstop launch --cfg job")
    return ConfigError(f"unknown key {name!r}", where="command line", fix=fix)


def _offer(near: list[str], others: str) -> str:
    return f"did you mean {near[0]}? {others}" if near else others


def _keys() -> dict[str, list[str]]:
    """Return the dotted keys below each schema class, by class name."""
    keys_of: dict[str, list[str]] = {}

    def walk(kind: Any) -> list[str]:
        keys = keys_of.setdefault(kind.__name__, [])
        for name, hint in typing.get_type_hints(kind).items():
            keys.append(name)
            for inner in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(inner):
                    keys += [f"{name}.{key}" for key in walk(inner)]
        return keys

    walk(Config)
    return keys_of
