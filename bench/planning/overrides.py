"""Check the overrides of a command line before Hydra composes them.

Refused are words without `=`, spaces around it, unknown keys and choices, several values without --multirun, and two
choices of one group. A key with two values gets a warning: Hydra takes the last one, which scripts rely on.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from bench.contract import regular_files
from bench.contract.schema import Precision
from bench.errors import ConfigError
from bench.planning import config_keys, synonyms
from bench.planning.compose_errors import MOVED, RENAMED_OPTIONS, UnknownChoiceError, unknown_key
from bench.planning.conf_folder import CONF
from bench.user_folder import user_folder

_log = logging.getLogger(__name__)

GROUPS = ("task", "model", "cluster", "gpu@cluster.gpu", "engine", "data", "container", "server")
"""Config groups that a user chooses from, in the order in which the choice of a bare word is looked up."""
NOT_OF_A_RUN = ("study", "published", "preset", "deepspeed", "transport")
"""Folders of conf/ that a run does not choose from."""
_FUNCTIONS = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag)\(")
"""Hydra's functions that make several values."""
_DECIMAL_COMMA = re.compile(r"[+-]?0,\d+")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check(
    words: Sequence[str], *, sweeps: bool = False, config_dir: Path | None = None, knows_choices: bool = True
) -> None:
    """Raise ConfigError for the first wrong word.

    sweeps: a key may have several values (--multirun). knows_choices: no other folder than config_dir has choices.
    """
    _check_spaces(words)
    knows_choices = knows_choices and not any(override.startswith("hydra.searchpath") for override in words)
    for override in words:
        if override == "~":
            raise ConfigError("~ has no key", where="command line", fix="write ~KEY, without a space, or remove ~")
        if "=" not in override and not override.startswith("~"):
            raise not_an_override(override, config_dir=config_dir)
    given: dict[str, str] = {}
    for override in words:
        if "=" not in override:
            continue
        key, value = split(override)
        _check_form(override, key, value)
        if (before := given.get(key, value)) != value:
            what = f"{key} is given twice: {before} and {value}"
            if is_group(key):
                fix = f"remove {key}={before} or {key}={value}"
                raise ConfigError(what, where="command line", fix=fix)
            _log.warning("%s; the last one is used", what)
        given[key] = value
        if has_several(value) and not sweeps:
            raise several_values(key, value)
        if key in NOT_OF_A_RUN:
            raise ConfigError(
                f"{key} is not a setting of a run",
                where="command line",
                fix=f"run `runstop study {value}` instead" if key == "study" else f"remove {key}={value}",
            )
        if is_group(key) and key not in synonyms.GROUPS:
            if knows_choices:
                _check_choice(key, value, config_dir=config_dir)
        elif key not in MOVED and not _is_key(key):
            raise unknown_key(key, config_keys.known(), value=value)


OF_FILE = "@"
"""An argument that begins with it names a file with an override on each line."""


def of_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with the overrides of FILE in place of each @FILE; lines that begin with # are comments.

    Raises:
        ConfigError: a file cannot be read, or has no override.
    """
    every: list[str] = []
    for argument in arguments:
        every += _of_file(Path(argument[len(OF_FILE) :])) if argument.startswith(OF_FILE) else [argument]
    return every


def _of_file(path: Path) -> list[str]:
    fix = "write one KEY=VALUE on each line"
    try:
        lines = [line.strip() for line in regular_files.read_text(path, follows_links=True).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not a text file"
        raise ConfigError(f"the file of overrides cannot be read: {reason}", where=str(path), fix=fix) from error
    overrides = [line for line in lines if line and not line.startswith("#")]
    if not overrides:
        raise ConfigError("the file of overrides has no override", where=str(path), fix=fix)
    if wrong_line := next((line for line in overrides if not _KEY_AND_VALUE.match(line)), ""):
        raise ConfigError(
            f"a line of the file of overrides is not KEY=VALUE: {wrong_line:.60}", where=str(path), fix=fix
        )
    return overrides


_KEY_AND_VALUE = re.compile(r"[+~]{0,2}[\w./@-]+=|~[\w./@-]+$")


def split(override: str) -> tuple[str, str]:
    """Return key and value of an override; without + or ~ in front of the key."""
    key, _, value = override.lstrip("+~").partition("=")
    return key, value


def require_several(words: Sequence[str]) -> None:
    """Raise ConfigError if no word of a --multirun has several values."""
    if not any(has_several(split(override)[1]) for override in words):
        raise ConfigError(
            "--multirun needs a key with several values, but every key has only one value",
            where="--multirun",
            fix="remove --multirun, or separate several values by commas, such as seed_base=1,2",
        )


def has_several(value: str) -> bool:
    """Return whether a value has commas outside of brackets and quotes, or is a sweep by a function of Hydra."""
    return _FUNCTIONS.match(value) is not None or _first_comma(value) is not None


def _first_comma(value: str) -> int | None:
    """Return the place of the first comma outside of brackets and quotes; None if there is none."""
    depth, quote = 0, ""
    for place, letter in enumerate(value):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and not depth:
            return place
    return None


_FIRST_OF_FUNCTION = re.compile(r"(?:choice|range)\(\s*([^\s,=()\[\]{}'\"]+)\s*[,)]")


def _first_value(value: str) -> str:
    """Return the first of several values; empty if a function does not name it."""
    if _FUNCTIONS.match(value):
        named = _FIRST_OF_FUNCTION.match(value)
        return named[1] if named else ""
    return value[: _first_comma(value)]


def several_values(key: str, value: str) -> ConfigError:
    """Return the error of a key with several values, which needs --multirun."""
    first = _first_value(value)
    if config_keys.takes_list(key):
        return ConfigError(f"{key} takes a list, which is written in brackets", where=key, fix=f"write {key}=[{value}]")
    if config_keys.takes_number(key) and _DECIMAL_COMMA.fullmatch(value):
        what, fix = f"{key} has a decimal comma: {value}", f"write a decimal point: {key}={value.replace(',', '.')}"
        return ConfigError(what, where=key, fix=fix)
    example = f", such as {key}={first}" if first else ""
    fix = f"write one value{example}; to run each: runstop launch {key}={value} --multirun"
    return ConfigError(f"{key} has several values, but takes one value: {value}", where=key, fix=fix)


def not_an_override(override: str, *, config_dir: Path | None = None) -> ConfigError:
    """Return the error of a word without `=`; the fix writes the override that the user probably means."""
    what = f"{override} is not KEY=VALUE"
    if (guess := guessed(override, config_dir=config_dir)) is not None:
        return ConfigError(what, where="command line", fix=f"write {guess}")
    fix = "write settings as KEY=VALUE, such as task=lora_tiny; runstop launch --help lists them"
    return ConfigError(what, where="command line", fix=fix)


def guessed(override: str, *, config_dir: Path | None = None) -> str | None:
    """Return the override that a bare word means: a choice of a group, a value or a key; None if it is unknown."""
    name, colon, value = override.partition(":")
    if colon and value and (is_group(name) or config_keys.is_known(name)):
        return f"{name}={value}"
    for group in GROUPS:
        known = choices(group, config_dir=config_dir)
        if (choice := _same(override, known)) is not None:
            return f"{group}={choice}"
    if override.lower() in Precision.__members__:
        return f"precision={override.lower()}"
    if (meant := _group(override)) is not None:
        return f"{meant}=NAME"
    if config_keys.is_known(override):
        return f"{override}=VALUE"
    key = synonyms.KEYS.get(override.lower())
    return None if key is None else f"{key}=VALUE"


def of_option(option: str, value: str) -> str | None:
    """Return the override that an unknown option such as --task or --lr means; None if it is unknown."""
    name = option.lstrip("-").replace("-", "_")
    if (group := _group(name)) is not None:
        return f"{group}={value or 'NAME'}"
    known = (one for one in (name, f"launch.{name}") if config_keys.is_known(one))
    if (key := next(known, synonyms.KEYS.get(name.lower()))) is None:
        return None
    is_flag = config_keys.form(key).startswith("true or false")
    return config_keys.override(key, "true" if is_flag and value not in ("true", "false") else value or "VALUE")


def _group(name: str) -> str | None:
    """Return the config group that a name or another name of a group means; None if there is none."""
    return synonyms.GROUPS.get(name, name if is_group(name) else None)


def is_group(key: str) -> bool:
    """Return whether a key names a config group, such as task, gpu@cluster.gpu or hydra/launcher."""
    group = key.partition("@")[0]
    return bool(group) and (group.startswith("hydra/") or (CONF / group).is_dir())


def choices(group: str, *, config_dir: Path | None = None) -> list[str]:
    """Return the choices of a config group: those of runstop, of a site's folder and of the user's own."""
    name = group.partition("@")[0]
    folders = [folder / name for folder in (CONF, config_dir, user_folder()) if folder is not None]
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def _check_spaces(words: Sequence[str]) -> None:
    """Refuse `task = x`, `task= x` and `task =x`."""
    for number, override in enumerate(words):
        after, then = [*words[number + 1 :], "", ""][:2]
        if "=" not in override and after == "=" and then:
            pieces = [override, after, then]
        elif ("=" not in override and after.startswith("=") and after != "=") or (
            override.endswith("=") and override != "=" and after and "=" not in after and not after.startswith("~")
        ):
            pieces = [override, after]
        else:
            continue
        raise ConfigError(
            f"there are spaces around = in {' '.join(pieces)}",
            where="command line",
            fix=f"write {''.join(pieces)}, without spaces",
        )


def _check_form(override: str, key: str, value: str) -> None:
    """Refuse an override without a key, and `==`."""
    if not key:
        value = value.lstrip("=")
        raise ConfigError(
            f"{override} has no key, but an override must be KEY=VALUE",
            where="command line",
            fix=f"write {guessed(value) or f'KEY={value}'}",
        )
    if value.startswith("="):
        raise ConfigError(
            f"{override} has two equals signs, but an override must be KEY=VALUE",
            where="command line",
            fix=f"write {key}={value.lstrip('=')}",
        )


def _is_key(key: str) -> bool:
    return config_keys.is_known(key) or (key.startswith("hydra.") and key not in synonyms.KEYS)


def _check_choice(group: str, value: str, *, config_dir: Path | None) -> None:
    """Refuse a choice that no folder has; lists, null and sweeps are Hydra's."""
    known = choices(group, config_dir=config_dir)
    if value in known or value.startswith(("[", "$")) or has_several(value) or "/" in group:
        return
    name = group.partition("@")[0]
    if known and (value.removesuffix(".yaml") in known or Path(value).stem in known):
        raise ConfigError(
            f"{group}={value} does not exist",
            where=group,
            fix=f"did you mean {Path(value).stem}? write the name of a file in conf/{name}, without folder and .yaml",
        )
    if (path_fix := _of_path(name, value)) is not None:
        raise ConfigError(f"{group}={value} does not exist", where=group, fix=path_fix)
    if value in RENAMED_OPTIONS.get(name, {}):
        return
    raise UnknownChoiceError(value, known, group=group)


def _of_path(group: str, value: str) -> str | None:
    """Return the fix for a path, or a repository of a hub, as a choice of the groups model and data."""
    if group not in ("model", "data") or "/" not in value:
        return None
    is_file = value.startswith(("/", ".", "~")) or Path(value).exists()
    if group == "data" and is_file:
        return f"for files of your own: data=text data.files={value} (docs/your-data.md)"
    if group == "model" and is_file:
        return f"for a Hugging Face folder: model=hf, with the folder in MODEL: export MODEL={value}"
    if not _HUB_NAME.fullmatch(value):
        return None
    folder = f"{group}s/{value.rpartition('/')[2]}" if group == "model" else f"data/{value.rpartition('/')[2]}"
    use = f"export MODEL={folder} and write model=hf" if group == "model" else f"write data=text data.files={folder}"
    return f"download it first: runstop fetch {group} {value} {folder}; then {use}"


def _same(override: str, known: Sequence[str]) -> str | None:
    """Return the choice that a word is, in any case and with - for _; or None."""
    name = override.lower().replace("-", "_").removesuffix(".yaml")
    return name if name in known and name not in ("none", "unknown") else None
