"""What Hydra and OmegaConf refuse, in our own words: what, where, and the fix."""

import dataclasses
import difflib
import re
import shlex
import traceback
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.contract.schema import Config
from bench.errors import ConfigError

MOVED = {
    "cluster.scheduler": "cluster.backend",
    "recipe.max_steps": "task.training.max_steps",
    "task.lora": "task.training.lora",
    "task.base": "task.training.base",
    "task.target_eval_loss": "task.training.target_eval_loss",
}
"""Keys of earlier versions, and what they are called now."""


class UnknownChoiceError(ConfigError):
    """A group of the config has no such choice, such as an engine of a later version."""

    def __init__(self, name: str, known: list[str], *, group: str) -> None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        super().__init__(f"no choice {name!r}", where=group, fix=_offer(near, ", ".join(sorted(known))))
        self.group, self.name, self.known = group, name, known


class InvalidValueError(ConfigError):
    """A key cannot have this value, such as the name of an engine of a later version."""

    def __init__(self, what: str, *, key: str, value: str | None) -> None:
        super().__init__(what, where=key, fix="give a value of the type that --cfg job shows")
        self.key, self.value = key, value


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a ConfigError with where and fix."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except AssertionError as error:
        if "Unexpected type for root: NoneType" not in str(error):
            raise
        raise _below_null(error) from error
    except (HydraException, OmegaConfBaseException, AttributeError, ValueError, TypeError) as error:
        known = _explain(error)
        if known is None:
            raise
        raise known from error


def _below_null(error: AssertionError) -> ConfigError:
    """Return that a key was set below one that is null: OmegaConf does not say which, but Hydra's frame has it."""
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    key = next((str(names["override"].key_or_group) for names in frames if "override" in names), "a key")
    block = key.rpartition(".")[0]
    group, _, name = block.partition(".")
    choose = f"engine={name}" if group == "engine" else f"a file of {group} that has {block}"
    return ConfigError(f"{key} cannot be set, since {block} is null here", where=key, fix=f"choose {choose}")


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
    stray = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if stray and f".{stray[1]}'" not in text:  # of the braces in key={…}: the override does not name it
        return _unknown_key(stray[1], _keys().get(stray[2], []))
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
        key = override[1]
        if key in _keys()["Config"]:  # a mapping, whose names the schema does not list
            fix = f"put a + before it: +{key}=…"
            return ConfigError(f"{key} holds names that a site adds", where=key, fix=fix)
        return _unknown_key(key, _keys()["Config"])
    return None


def _wrong_value(error: Exception, text: str) -> ConfigError | None:
    """Return what is wrong with a value: its type, or how it is written."""
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
