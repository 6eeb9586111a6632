"""Objects as YAML that Kubernetes reads as it was meant, and back.

Kubernetes' parser takes more words for numbers and truth values than PyYAML does (1e3, 0o17, y): a text is written
without quotes only where no parser could take it for anything else.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_/.@-]*(?: [A-Za-z0-9_/.@-]+)*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"])


class _Dumper(yaml.CSafeDumper):
    """Writes texts in quotes where in doubt, those of several lines as they stand, and never an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_all(objects: Iterable[Any]) -> str:
    """Return objects as documents of one file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=10_000)


def load_all(text: str) -> Iterator[Any]:
    """Yield the objects of a file."""
    yield from yaml.load_all(text, Loader=yaml.CSafeLoader)
