"""The keys of the config by the schema: which exist, which value each takes, and which one a user means."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

from bench.contract.schema import Config
from bench.planning import synonyms
from bench.texts import nearest

EXAMPLES = {
    "cluster.gpu": "gpu@cluster.gpu=h200",
    "cluster.environment": "+cluster.environment.NAME=VALUE",
    "cluster.hosts": "cluster.hosts=[rig0,rig1]",
    "data.files": "data.files='data/*.jsonl'",
    "launch.trackers": "launch.trackers=[wandb]",
    "launch.stall": "launch.stall.factor=20",
    "launch.stall.factor": "launch.stall.factor=20",
    "launch.stall.floor_s": "launch.stall.floor_s=120",
    "recipe": "recipe.lr=0.001",
    "recipe.lr": "recipe.lr=0.001",
    "walltime": "walltime=60",
}
"""By key: an override with a valid value, where the type alone gives no good one."""


@cache
def by_class() -> Mapping[str, Sequence[str]]:
    """Return the dotted keys below each schema class, by class name."""
    classes = {Config, *(block for hint in _hints().values() for block in _blocks(hint))}
    return {kind.__name__: list(_hints(kind)) for kind in classes}


@cache
def _hints(kind: Any = Config) -> Mapping[str, Any]:
    """Return the type of each key below a schema class, by dotted key."""
    hints: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        hints[name] = hint
        for block in _blocks(hint):
            hints |= {f"{name}.{key}": of_key for key, of_key in _hints(block).items()}
    return hints


def _blocks(hint: Any) -> list[Any]:
    """Return the schema classes in a type, such as Gpu in `Gpu | None`."""
    return [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]


def known() -> Sequence[str]:
    """Return all keys of the config."""
    return by_class()[Config.__name__]


def is_known(key: str) -> bool:
    """Return whether the config has a key, or a mapping or list above it whose items have any name."""
    if key in _hints():
        return True
    above = key.rpartition(".")[0]
    return bool(above) and (_is(above, dict) or _is(above, list) or (above not in _hints() and is_known(above)))


def meant(name: str, keys: Iterable[str]) -> str | None:
    """Return the key that a user means by an unknown one: by its meaning, its last part or its spelling; or None."""
    keys = [key for key in keys if not dataclasses.is_dataclass(_kind(key))]
    full = name.lower().replace("-", "_")
    last = full.rpartition(".")[2]
    if not last:
        return None
    for one in (full, last):
        if (key := synonyms.KEYS.get(one)) in keys:
            return key
    ends = [key for key in keys if key.rpartition(".")[2] == last]
    if len(ends) == 1:
        return ends[0]
    near = nearest(full, ends or keys)
    if near is None or _likeness(full, near) >= _CLEAR:
        return near
    by_last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    if (alike := nearest(last, by_last, likeness=_CLEAR)) is not None:
        return by_last[alike]
    is_near = _likeness(last, near.rpartition(".")[2]) >= 0.5 if "." in full else "." not in near
    return near if is_near else None


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


_CLEAR = 0.8
"""Keys that are at least as similar as this are a misspelling; below it, the last parts of the keys are compared."""


def override(key: str, value: str) -> str:
    """Return an override of a key; a single value of a list in brackets."""
    is_bare = _is(key, list) and not value.startswith("[")
    return f"{key}=[{value}]" if is_bare else f"{key}={value}"


def takes_list(key: str) -> bool:
    """Return whether a key takes a list."""
    return _is(key, list)


def is_block(key: str) -> bool:
    """Return whether a key is a block of keys of its own."""
    return dataclasses.is_dataclass(_kind(key))


def takes_number(key: str) -> bool:
    """Return whether a key takes a number that may have a fraction."""
    return _is(key, float)


def takes_null(key: str) -> bool:
    """Return whether a key may be null."""
    return type(None) in typing.get_args(_hints().get(key))


def form(key: str) -> str:
    """Return which values a key takes, in words; an empty text for an unknown key."""
    kind = _kind(key)
    if kind is None:
        return ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = f"one of {', '.join(kind.__members__)}"
    elif dataclasses.is_dataclass(kind):
        return "a block of keys"
    else:
        words = _FORMS.get(typing.get_origin(kind) or kind, "")
    if key == "walltime":
        words = "a whole number of minutes"
    return f"{words}, or null" if words and takes_null(key) else words


_FORMS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a block of keys",
}


def example(key: str, value: str) -> str:
    """Return an override of a key with a valid value, as close as possible to a wrong one."""
    item = key.partition("[")[0]
    if item == "walltime" and (minutes := _minutes(value)):
        return f"walltime={minutes}"
    kind = _kind(item)
    if kind is float and (number := _number(value.replace(",", "."))):
        return f"{item}={number}"
    if item in EXAMPLES and not (item != key or takes_list(item)):
        return EXAMPLES[item].replace("h200", value) if item == "cluster.gpu" and value else EXAMPLES[item]
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = list(kind.__members__)
        other = synonyms.VALUES.get(item, {}).get(value.lower())
        return f"{item}={other or nearest(value.lower(), names) or names[0]}"
    if takes_list(item):
        return EXAMPLES.get(item, f"{item}=[…]") if not value or item != key else override(item, value)
    if kind is str and value[:1] in ("[", "{"):
        return f"{item}={value.strip('[{}]').partition(',')[0].strip() or 'TEXT'}"
    return f"{item}={ {bool: 'true', int: _whole(value), float: '0.5'}.get(kind, '…') }"


def _number(text: str) -> str:
    """Return the number at the start of a text; empty without one."""
    digits = text.lstrip("+")
    end = next((n for n, letter in enumerate(digits) if letter not in "0123456789."), len(digits))
    return digits[:end].rstrip(".")


def _whole(text: str) -> str:
    """Return the whole number that a text such as 1e9, 1.5 or 8k begins with; 1 without one."""
    try:
        return str(int(float(text)))
    except (ValueError, OverflowError):
        return _number(text.partition(".")[0]) or "1"


_UNIT_MIN = {"s": 1 / 60, "m": 1, "min": 1, "h": 60, "d": 1440}


def _minutes(text: str) -> int | None:
    """Return the minutes of a text such as 2h, 90m, 1d, or HH:MM:SS as Slurm reads it."""
    try:
        if ":" in text:
            days, _, time = text.rpartition("-")
            parts = [float(part) for part in time.split(":")]
            weights = (1, 1 / 60) if len(parts) == 2 and not days else (60, 1, 1 / 60)
            total = float(days or 0) * 1440 + sum(w * p for w, p in zip(weights, parts, strict=False))
            return max(1, round(total))
        number = _number(text)
        unit = text[len(number) :].strip().lower().rstrip(".")
        unit = {"hour": "h", "hours": "h", "mins": "min", "minutes": "min", "day": "d", "days": "d"}.get(unit, unit)
        return max(1, round(float(number) * _UNIT_MIN[unit]))
    except (ValueError, KeyError):
        return None


def _kind(key: str) -> Any:
    """Return the type of a key without None; that of the items for `key[0]`; None for an unknown key."""
    item, bracket, _ = key.partition("[")
    hint = _hints().get(item)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((one for one in typing.get_args(hint) if one is not type(None)), None)
    return typing.get_args(hint)[0] if bracket and typing.get_origin(hint) is list else hint


def _is(key: str, kind: type) -> bool:
    own = _kind(key)
    return (typing.get_origin(own) or own) is kind
