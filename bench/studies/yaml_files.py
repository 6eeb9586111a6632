"""Read a YAML file as one of the types in `bench.studies.spec`, and write one."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from bench.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


class _Texts(yaml.CBaseLoader):
    """Reads every scalar but null as text, and refuses a key that stands twice in one mapping."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        is_null = node.style is None and node.value in ("", "~", "null")
        return None if is_null else super().construct_scalar(node)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> Any:
        assert isinstance(node, yaml.MappingNode)
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = f"the key {key!r} stands twice"
            if is_list := isinstance(key, list | dict):
                problem = f"a key is a word, and this one is {key!r:.60}"
            if is_list or key in seen:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load(path: Path, kind: type[T]) -> T:
    """Return what a file holds.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has an unknown, missing or mistyped key; with its place.
    """
    try:
        raw = yaml.load(path.read_text(), Loader=_Texts)  # noqa: S506  # a BaseLoader: texts only
        return msgspec.convert(raw, kind, strict=False)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot be read: {reason}", where=str(path), fix="name a readable file") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(_of_yaml(error), where=str(path), fix="see the YAML of conf/study/tiny.yaml") from error
    except msgspec.ValidationError as error:
        raise _explained(str(error), path, kind) from error


def is_before(path: Path, first: str, second: str) -> bool:
    """Return whether a file has both keys, and the first one before the other."""
    keys = list(yaml.load(path.read_text(), Loader=_Texts))  # noqa: S506  # a BaseLoader: texts only
    return {first, second} <= set(keys) and keys.index(first) < keys.index(second)


def dump(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a YAML file in one step."""
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120))
    part.replace(path)


def _of_yaml(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"{problem or 'not YAML'}{f', line {mark.line + 1}' if mark else ''}"


def _explained(said: str, path: Path, kind: type[msgspec.Struct]) -> ConfigError:
    """Return msgspec's words for a wrong key or value, with its place in the file and the keys that there are."""
    what, _, place = said.partition(" - at `")
    keys = place.rstrip("`").removeprefix("$.").removeprefix("$")
    where = f"{path}{f': {keys}' if keys else ''}"
    if unknown := re.search(r"unknown field `(.*)`", what):
        known = _keys(kind)
        near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
        offer = f"did you mean {near[0]}? " if near else ""
        fix = f"{offer}the keys of bench/studies/spec.py: {', '.join(sorted(known))}"
        return ConfigError(f"no key {unknown[1]!r}", where=where, fix=fix)
    if missing := re.search(r"missing required field `(.*)`", what):
        return ConfigError(f"{missing[1]} is missing", where=where, fix=f"add {missing[1]}")
    return ConfigError(what.replace("`", ""), where=where, fix="give a value of that type")


def _keys(kind: type[msgspec.Struct]) -> set[str]:
    """Return the keys of a type and of all types in it."""
    found: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, msgspec.inspect.StructType):
            for field in node.fields:
                found.add(field.encode_name)
                walk(field.type)
        for part in ("types", "item_types"):
            for inner in getattr(node, part, ()):
                walk(inner)
        for part in ("value_type", "item_type"):
            if inner := getattr(node, part, None):
                walk(inner)

    walk(msgspec.inspect.type_info(kind))
    return found
