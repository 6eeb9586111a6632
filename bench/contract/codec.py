"""Convert dataclasses to JSON data and back, checking every field's type. Standard library only: ranks import it."""

import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

OMIT_DEFAULT = {"json": "omit the default"}
"""Metadata of a field that is written to JSON only if it differs from its default."""


def plain(value: Any) -> Any:
    """Convert dataclasses, enums, tuples and lists to JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: plain(v) for f, v in values if f.metadata != OMIT_DEFAULT or v != _default(f)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def repeated(pairs: Iterable[tuple[str, Any]]) -> str | None:
    """Return the first name of a JSON object's pairs that occurs more than once; None if all are distinct."""
    return next((name for name, number in Counter(name for name, _ in pairs).items() if number > 1), None)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON objects, with dotted keys; empty objects have none."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def typed(kind: type[T], value: Any) -> T:
    """Convert JSON data to this type.

    Raises:
        ValueError, TypeError, KeyError: an unknown, missing or mistyped field.
    """
    return typing.cast(T, _typed(kind, value))


def _typed(kind: Any, value: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(args[0], value)
    if origin is list:
        return [_typed(args[0], v) for v in value]
    if origin is tuple:
        kinds = (args[0],) * len(value) if args[1:] == (...,) else args
        return tuple(_typed(kind, v) for kind, v in zip(kinds, value, strict=True))
    if origin is dict:
        return {_typed(args[0], key): _typed(args[1], v) for key, v in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if unknown := set(value) - set(hints):
            raise ValueError(f"unknown field {sorted(unknown)} of {kind}")
        return kind(**{name: _typed(hints[name], v) for name, v in value.items()})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[value]
    if kind is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"an integer of {value.bit_length()} bits is too large for a float") from error
    if origin is None and kind in (int, str, bool, float) and type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value
