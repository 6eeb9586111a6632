"""Errors of Hydra and OmegaConf as ConfigErrors: what is wrong, where, and the fix."""

import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.contract import old_plans
from bench.errors import ConfigError
from bench.planning import config_keys, synonyms
from bench.texts import nearest

MOVED = {
    "cluster.scheduler": "cluster.backend",
    "recipe.max_steps": "task.training.max_steps",
    "task.lora": "task.training.lora",
    "task.base": "task.training.base",
    "task.target_eval_loss": "task.training.target_eval_loss",
    **old_plans.CONFIG_KEYS,
}
"""Keys of earlier versions, and their current names."""
RENAMED_OPTIONS = {
    "task": {
        f"{name}_apart": f"{name}_local_sgd"
        for name in ("pretrain_tiny", "pretrain_7b", "finetune_7b_dolly", "finetune_70b_dolly", "qlora_70b")
    }
}
"""By config group: options of earlier versions, and their names now."""


class UnknownChoiceError(ConfigError):
    """A config group has no such choice, for example an engine of a later version."""

    def __init__(self, name: str, known: list[str], *, group: str) -> None:
        fixes = synonyms.CHOICE_FIXES.get(group.partition("@")[0], {})
        near = _near_choice(group, name, known)
        offer = f"choose from {', '.join(sorted(known))}"
        if near is not None:
            others = "to list all: runstop launch --help" if len(known) > _FEW_CHOICES else offer
            offer = f"did you mean {near}? {others}"
        fix = fixes.get(name.lower()) or "; ".join([offer, *([fixes[""]] if "" in fixes else [])])
        super().__init__(f"{group}={name} does not exist", where=group, fix=fix)
        self.group, self.name, self.known = group, name, known


_FEW_CHOICES = 12
"""With a suggestion, a longer list of choices would hide it."""


def _near_choice(group: str, name: str, known: list[str]) -> str | None:
    """Return the choice of a group that a name means, by its meaning or its spelling; None if none is near."""
    plain = name.lower().replace("-", "_")
    other = synonyms.CHOICES.get(group.partition("@")[0], {}).get(name.lower())
    if other in known:
        return str(other)
    within = [choice for choice in known if plain and choice.endswith(plain)]
    if len(within) == 1 or group.startswith("gpu"):  # one digit away is another GPU
        same = [choice for choice in known if choice.replace("_", "") == plain.replace("_", "")]
        return next(iter([*within, *same]), None)
    return nearest(plain, known)


class InvalidValueError(ConfigError):
    """A key has an invalid value, for example an engine of a later version."""

    def __init__(self, what: str, *, where: str, fix: str, key: str, value: str | None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.key, self.value = key, value


@contextmanager
def explained(words: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a ConfigError with where and fix. words: the overrides."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError
    from yaml.constructor import ConstructorError

    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a file of the config"
        fix = "correct this line or one before it: close each bracket and quote, and indent by spaces only"
        if isinstance(error, ConstructorError):
            fix = "write plain YAML: texts, numbers, lists and mappings, without tags such as !!python"
        raise ConfigError(
            f"the file is not valid YAML: {error.problem}", where=where, fix=fix, rule="CFG-09"
        ) from error
    except AssertionError as error:
        if "Unexpected type for root: NoneType" not in str(error):
            raise
        raise _below_null(error) from error
    except (HydraException, OmegaConfBaseException, AttributeError, ValueError, TypeError) as error:
        known = caused_by(error) or _explain(error, words)
        if known is None:
            raise
        raise known from error


def caused_by(error: BaseException | None) -> ConfigError | None:
    """Return the ConfigError that caused an error, such as one of a resolver."""
    seen: set[int] = set()
    while error is not None and not isinstance(error, ConfigError):
        if id(error) in seen:  # OmegaConf makes an error its own cause under a debugger and with OC_CAUSE=1
            return None
        seen.add(id(error))
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


def _explain(error: Exception, words: Sequence[str]) -> ConfigError | None:
    """Return the error as a ConfigError; None for one that the command line did not cause."""
    from omegaconf.errors import OmegaConfBaseException

    text = "\n".join(dict.fromkeys(str(e) for e in (error, error.__cause__) if e))
    if known := _wrong_reference(text) or _wrong_choice(text) or _wrong_key(error, text) or _wrong_value(text, words):
        return known
    if known := _wrong_file(text):
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
            "an override sets a config group to null, a number or a boolean, but a choice is a name",
            where="command line",
            fix="write the name of a choice; --help lists all",
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
        known = config_keys.by_class().get(stray[1]) if stray else None
        if stray and known:
            return unknown_key(stray[2], known)
    stray = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if stray and f".{stray[1]}'" not in text:  # inside the braces of key={…}: the override does not name it
        return _in_class(stray[1], stray[2], text)
    if variable := re.search(r"Could not override 'cluster\.environment\.([^'\s]+)", text):
        return ConfigError(
            f"cluster.environment does not contain {variable[1]}, so an override cannot change it",
            where="cluster.environment",
            fix="write a leading + to add the variable: +cluster.environment.NCCL_SOCKET_IFNAME=ib0",
        )
    if existing := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        what = f"a leading + adds a new key, but {existing[1]} already exists"
        return ConfigError(what, where="command line", fix=f"remove the +: {existing[1]}=…")
    if override := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text):
        key = override[1]
        if key in config_keys.known():  # a mapping: the schema does not list its keys
            fix = f"write a leading + to add keys: +{key}=…"
            return ConfigError(f"an override without + cannot add new keys to {key}", where=key, fix=fix)
        return unknown_key(key, config_keys.known())
    return None


def _in_class(name: str, kind: str, text: str) -> ConfigError:
    """Return the error of a key that a block of the config does not have; of a file of the config, if one has it."""
    block = re.search(r"full_key: (\S+)", text)
    full = block[1] if block and block[1].endswith(name) else name
    file = _FILE.search(text)
    where = _named(file[1]) if file else "command line"
    keys = config_keys.known() if "." in full else config_keys.by_class().get(kind, [])
    return unknown_key(full, keys, where=where)


_FILE = re.compile(r"In '([^']+)': \w+ raised while composing config")
"""How Hydra names the file of the config with a wrong key or value."""


def _named(file: str) -> str:
    """Return the name of a config file; Hydra leaves out its suffix."""
    return f"{file}.yaml"


def _wrong_value(text: str, words: Sequence[str]) -> ConfigError | None:
    """Return the error of a value with a wrong type or syntax."""
    if bad := re.search(r"full_key: (\S+)", text):
        return _wrong_type(bad[1], text, words)
    if "LexerNoViableAltException: " in text:
        return _unquoted(text.partition("LexerNoViableAltException: ")[2].splitlines()[0])
    if several := re.search(r"Ambiguous value for argument '([^']+)'", text):
        key, _, value = several[1].partition("=")
        fix = f"write {key}=[{value}]" if config_keys.takes_list(key) else "write one value; --multirun takes several"
        return ConfigError(f"{key} has several values, but takes one value: {value}", where=key, fix=fix)
    if (open_brace := re.search(r"Error parsing override '([^']*\$\{[^}']*)'", text)) is not None:
        return ConfigError(
            f"the override {open_brace[1]} has ${{ without a closing brace",
            where="command line",
            fix="close the brace, or write the value itself; put an override with $ in single quotes",
        )
    if "no viable alternative" in text or "mismatched input" in text or "Error parsing override" in text:
        return next(filter(None, map(_unclosed, words)), None) or ConfigError(
            text.splitlines()[0],
            where="command line",
            fix="quote list items that contain an equals sign, comma or colon, and quote the whole override for the "
            """shell: 'cluster.slurm.arguments=["--exclude=n1"]'""",
        )
    return None


_CLOSING = {"[": "]", "{": "}", "(": ")"}


def _unclosed(override: str) -> ConfigError | None:
    """Return the error of an override whose last open bracket is not closed; None if all brackets are closed."""
    opened: list[str] = []
    quote = ""
    for letter in override.partition("=")[2]:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSING:
            opened.append(letter)
        elif opened and letter == _CLOSING[opened[-1]]:
            opened.pop()
    if not opened:
        return None
    return ConfigError(
        f"the override {override} has {opened[-1]} without the closing {_CLOSING[opened[-1]]}",
        where="command line",
        fix="close each bracket, and put the whole override in single quotes",
    )


def _wrong_type(key: str, text: str, words: Sequence[str]) -> ConfigError:
    """Return the error of a value that a key does not take: what it takes, with an example."""
    if missing := re.search(r"missing mandatory value: (\S+)", text):
        return _missing_value(key, missing[1], words)
    message = next(line for line in text.splitlines() if not line.startswith(("In '", "Error merging")))
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", message)
    if "does not support deletion" in message:
        fix = f"remove ~{key}, or set its value: {config_keys.example(key, '')}"
        return InvalidValueError(f"{key} cannot be deleted", where="command line", fix=fix, key=key, value=None)
    item, file_of = key.partition("[")[0], _FILE.search(text)
    own = next((override for override in reversed(words) if override.lstrip("+").partition("=")[0] == item), None)
    if own is not None and item == key:
        value: str | None = own.partition("=")[2]
    else:
        quoted = re.search(r"[Vv]alue:? '?([^',]*)'?", message)
        value = quoted[1] if quoted and "assigned" not in message else None
    where = _named(file_of[1]) + f", {key}" if own is None and file_of else key
    if "NoneType" in message and config_keys.is_block(key):
        group = key.partition(".")[0]
        what = f"the block {key} is null in this config, and cannot be set on the command line"
        fix = f"write it into a file of your own, DIR/{group}/mine.yaml, and add --config-dir DIR "
        fix += f"{group}=mine (docs/configuration.md)"
        return InvalidValueError(what, where=where, fix=fix, key=key, value=value)
    what, wanted, is_null = message, config_keys.form(key), "is not Optional" in message
    if wanted and any(part in message for part in _OF_TYPE) and (is_null or value is not None):
        value = "null" if is_null else value or ""
        what = f"{key} is {_shown(value)}, but must be {wanted}"
    if "Cannot merge" in message and wanted:  # a list for a block, or a block for a list
        is_list = config_keys.takes_list(key)
        what = f"{key} is a {'block' if is_list else 'list'}, but must be {wanted}"
        return InvalidValueError(what, where=where, fix=_fix_of_value(key, ""), key=key, value=value)
    return InvalidValueError(what, where=where, fix=_fix_of_value(key, value or ""), key=key, value=value)


def _missing_value(key: str, name: str, words: Sequence[str]) -> ConfigError:
    """Return the error of a file that an override chooses, and that lacks a key."""
    package = f"@{key.rpartition('.')[0]}"
    chosen = next((override for override in reversed(words) if override.partition("=")[0].endswith(package)), "")
    group, _, choice = chosen.partition("=")
    where = f"{group.partition('@')[0]}/{choice}.yaml" if choice else key
    fix = f"add {name} to this file, with its unit as in the files of conf/"
    return InvalidValueError(f"the key {name} is missing", where=where, fix=fix, key=key, value=None)


def _fix_of_value(key: str, value: str) -> str:
    """Return what to write instead of a wrong value."""
    if known := synonyms.VALUE_FIXES.get(key.partition("[")[0], {}).get(value.lower()):
        return known
    if key == "model.weights" and "/" in value:
        return f"export MODEL={value}, and leave out model.weights"
    example = config_keys.example(key, value)
    if key == "walltime" and re.fullmatch(r"\d+:\d\d", value):
        first, second = map(int, value.split(":"))
        return f"write walltime={60 * first + second} for {first} h {second} min, {example} for {first} min {second} s"
    return f"write a value such as {example}"


_OF_TYPE = (
    "could not be converted",
    "Invalid value",
    "is not a valid",
    "is not Optional",
    "is not a subclass",
    "incompatible with",
    "Cannot convert",
    "Cannot assign",
    "is not a ListConfig",
    "is not a DictConfig",
    "Invalid type assigned",
)
"""Parts of OmegaConf's messages about a value of a wrong type."""


def _shown(value: str) -> str:
    """Return a value as a message shows it: numbers, true and false as they are, texts in quotes."""
    try:
        float(value)
    except ValueError:
        return value if value in ("true", "false", "null") or value.startswith("[") else repr(value)
    return value


def _wrong_reference(text: str) -> ConfigError | None:
    """Return the error of ${name} in a value, where the config has no such key."""
    if missing := re.search(r"Interpolation key '([^']+)' not found", text):
        fix = "write the value itself, or the name of a key of the config; put the override in single quotes"
        return ConfigError(
            f"${{{missing[1]}}} names the key {missing[1]}, which does not exist", where="command line", fix=fix
        )
    return None


def _wrong_file(text: str) -> ConfigError | None:
    """Return the error of a defaults list in the wrong order."""
    if late := re.search(r"In ([\w/]+): Override '(\S+) : [^']*' is defined before '([^']+)'", text):
        return ConfigError(
            f"`override {late[2]}` is before {late[3].rpartition(' ')[2]} in the defaults list, but must be after it",
            where=_named(late[1]),
            fix=f"move the line with `override {late[2]}` to the end of the defaults list",
        )
    return None


def _unquoted(override: str) -> ConfigError:
    """Return the error of a value with characters that Hydra's grammar does not allow; the fix quotes the override."""
    key, _, value = override.partition("=")
    if (after := re.search(r"[;&] ?([\w.@]+)=", value)) and config_keys.is_known(after[1]):
        words = " ".join([f"{key}={value[: after.start()]}", value[after.start() + 1 :].strip()])
        what = f"{override} is one word, but has two settings"
        return ConfigError(what, where="command line", fix=f"separate the two settings by a space: {words}")
    if config_keys.takes_number(key) and (plain := value.strip("'\"`")) != value:
        what = f"{override} has a quote that is not closed"
        return ConfigError(what, where="command line", fix=f"write a value such as {config_keys.example(key, plain)}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{escaped}"')
    unknown = (letter for letter in value if not letter.isascii() or letter in "'\"`!#&;<>|^")
    letter = next(unknown, "a character")
    return ConfigError(
        f"the override {override} contains {letter}, which must be quoted",
        where="command line",
        fix=f"put the value in double quotes and the whole override in single quotes: {quoted}",
    )


def unknown_key(name: str, known: Sequence[str], *, value: str = "", where: str = "command line") -> ConfigError:
    """Return the error of a key that does not exist; the fix names the key that the user probably means."""
    last = name.lower().rpartition(".")[2]
    all_keys = "to list all keys: runstop launch --cfg job"
    if (group := synonyms.GROUPS.get(name.lower())) is not None:
        fix = f"write {group}={value or 'NAME'}"
    elif last in synonyms.EXPLAINED:
        fix = synonyms.EXPLAINED[last]
    elif (key := config_keys.meant(name, known)) is not None:
        fix = f"did you mean {config_keys.override(key, value) if value else key}? {all_keys}"
    else:
        fix = all_keys
    return ConfigError(f"unknown key {name!r}", where=where, fix=fix)
