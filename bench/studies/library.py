"""Load and check the studies and published figures in conf/ and in the folder of --config-dir."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from bench.contract import regular_files
from bench.errors import ConfigError
from bench.planning.compose import CONF
from bench.results import published as figures
from bench.results.published import PublishedTable
from bench.studies import checks
from bench.studies.spec import Study
from bench.texts import nearest

T = TypeVar("T", bound=msgspec.Struct)


class _Texts(yaml.CBaseLoader):
    """Reads every scalar except null as text, and refuses duplicate keys in a mapping."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        is_null = node.style is None and node.value in ("", "~", "null")
        return None if is_null else super().construct_scalar(node)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> Any:
        assert isinstance(node, yaml.MappingNode)
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = f"duplicate key {key!r}"
            if is_list := isinstance(key, list | dict):
                problem = f"the key {key!r:.60} is not a text"
            if is_list or key in seen:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_yaml(path: Path, kind: type[T]) -> T:
    """Return the content of a file, which may have keys of earlier versions.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has an unknown, missing or mistyped key.
    """
    try:
        text = regular_files.read_text(path, follows_links=True)
        raw = yaml.load(text, Loader=_Texts)  # noqa: S506  # a BaseLoader: texts only
        return msgspec.convert(_with_current_keys(raw), kind, strict=False)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not a text file"
        raise ConfigError(
            f"the file cannot be read: {reason}", where=str(path), fix="give the path of a readable text file"
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(_of_yaml(error), where=str(path), fix="write YAML as in conf/study/tiny.yaml") from error
    except msgspec.ValidationError as error:
        raise _explained(str(error), path, kind) from error


def _with_current_keys(raw: Any) -> Any:
    """Return a study with the present names of keys: earlier versions wrote `words` and, in coefficients, `of`."""
    if not isinstance(raw, dict):
        return raw
    renamed = {"overrides" if key == "words" else key: value for key, value in raw.items()}
    if isinstance(renamed.get("study"), dict):
        renamed["study"] = _with_current_keys(renamed["study"])
    if isinstance(columns := renamed.get("coefficients"), list):
        renamed["coefficients"] = [
            {"measurement" if key == "of" else key: value for key, value in one.items()}
            if isinstance(one, dict)
            else one
            for one in columns
        ]
    return renamed


def is_before(path: Path, first: str, second: str) -> bool:
    """Return whether a file has both keys, the first one above the second."""
    keys = list(yaml.load(path.read_text(), Loader=_Texts))  # noqa: S506  # a BaseLoader: texts only
    return {first, second} <= set(keys) and keys.index(first) < keys.index(second)


def dump_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a YAML file atomically."""
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120))
    part.replace(path)


def _of_yaml(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"{problem or 'not YAML'}{f', line {mark.line + 1}' if mark else ''}"


def _explained(message: str, path: Path, kind: type[msgspec.Struct]) -> ConfigError:
    """Return msgspec's message about a wrong key or value as an error with the place in the file and the known keys."""
    what, _, place = message.partition(" - at `")
    keys = place.rstrip("`").removeprefix("$.").removeprefix("$")
    where = f"{path}{f': {keys}' if keys else ''}"
    if unknown := re.search(r"unknown field `(.*)`", what):
        known = _keys(kind)
        near = _SYNONYMS.get(unknown[1]) or nearest(unknown[1], known)
        offer = f"did you mean {near}? " if near else ""
        fix = f"{offer}known keys: {', '.join(sorted(known))}"
        return ConfigError(f"unknown key {unknown[1]!r}", where=where, fix=fix)
    if missing := re.search(r"missing required field `(.*)`", what):
        return ConfigError(f"the key {missing[1]} is missing", where=where, fix=f"add the key {missing[1]}")
    return ConfigError(what.replace("`", ""), where=where, fix="correct this value")


_SYNONYMS = dict.fromkeys(("repeat", "repeats", "repetitions", "trials", "seeds"), "runs")
"""Other words for keys, which their letters do not suggest."""


def _keys(kind: type[msgspec.Struct]) -> set[str]:
    """Return the keys of a type and of all types in it."""
    keys: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, msgspec.inspect.StructType):
            for field in node.fields:
                keys.add(field.encode_name)
                walk(field.type)
        for part in ("types", "item_types"):
            for inner in getattr(node, part, ()):
                walk(inner)
        for part in ("value_type", "item_type"):
            if inner := getattr(node, part, None):
                walk(inner)

    walk(msgspec.inspect.type_info(kind))
    return keys


STUDIES, PUBLISHED = "study", "published"
"""Subfolders of conf/ and of the folder of --config-dir."""


def names(*, config_dir: Path | None = None) -> list[str]:
    return sorted(_files(STUDIES, config_dir))


def titles(config_dir: Path | None = None) -> list[tuple[str, Study]]:
    """Return name and content of all studies."""
    return [(name, load(name, config_dir=config_dir)) for name in names(config_dir=config_dir)]


def load(name: str, *, config_dir: Path | None = None) -> Study:
    """Return a study that has passed all checks.

    Raises:
        ConfigError: no study has this name, or its file, or a published table that it names, has a mistake.
    """
    path = _file(STUDIES, name, config_dir)
    study = msgspec.structs.replace(load_yaml(path, Study), axes_first=is_before(path, "axes", "arms"))
    checks.check(study, where=str(path))
    publications(study, config_dir=config_dir)
    return study


def with_runs(study: Study, runs: int) -> Study:
    """Return the study with another number of runs of each arm; raise ConfigError for a number out of range."""
    checks.check_runs(runs, where="--runs")
    return msgspec.structs.replace(study, runs=runs)


def publications(study: Study, *, config_dir: Path | None = None) -> dict[str, PublishedTable]:
    """Return the published tables that a study names."""
    return {name: published(name, config_dir=config_dir) for name in study.published}


def published(name: str, *, config_dir: Path | None = None) -> PublishedTable:
    """Return the published figures in conf/published/NAME.yaml."""
    path = _file(PUBLISHED, name, config_dir)
    table = figures.read(path)
    checks.check_published(table, where=str(path))
    return table


def _files(group: str, config_dir: Path | None) -> Mapping[str, Path]:
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(
            "this folder does not exist",
            where=f"--config-dir {config_dir}",
            fix="give a folder with a subfolder study/",
        )
    folders = [CONF / group, *([config_dir / group] if config_dir else [])]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _file(group: str, name: str, config_dir: Path | None) -> Path:
    files = _files(group, config_dir)
    if name not in files:
        checks.refuse_unknown(name, list(files), noun=f"{group} file" if group == PUBLISHED else group, where=group)
    return files[name]
