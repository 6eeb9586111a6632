"""docs/json.md and docs/schemas/ from the classes of `bench.answers.schema`, and what a new version must not change."""

import ast
import dataclasses
import enum
import functools
import inspect
import json
import re
import textwrap
import typing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.answers.schema import ANSWERS
from helpers.paths import ROOT

PAGE, SCHEMAS = ROOT / "docs/json.md", ROOT / "docs/schemas"
KINDS = {kind.__struct_config__.tag.split("/")[1]: kind for kinds in ANSWERS.values() for kind in kinds}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_INTRODUCTION = """\
# How do programs read the output of runstop?

With the option `--json`, a command prints its answer as JSON on stdout. Progress and errors are on stderr. These
examples select fields with `jq`:

    runstop runs --json | jq -r 'select(.is_active) | .run'
    runstop parse runs/*/result_0.txt --json | jq '{file, valid, time_to_train_min}'
    runstop history lora_tiny --check 2 --json | jq -r 'select(.verdict == "regression") | .text'

- **Lines**: each line is one JSON object. A command that lists runs, logs, rules or similar things prints one line for
  each entry of the list. For an empty list, the command prints nothing. Every other command prints exactly one line.
- **Exit code**: `--json` does not change the exit code. If runstop refuses the request (exit code 2), stdout is empty.
- **Units**: most names of measured values end with the unit: `_ms`, `_s`, `_min`, `_gib`, `_bytes`. Names with
  `tokens_s` or `samples_s` are rates per second.
- **Times**: a time is in UTC in the format of ISO 8601, such as `2026-11-22T07:53:04Z`.
- **Unknown values**: a value that was not measured is `null`, and never 0.
- **Secrets** are masked.

## Versions and fields

The first field of every line is `schema`, such as `runstop/run/1.0`. This field contains the kind of the answer (`run`)
and the version MAJOR.MINOR (`1.0`).

- A new field raises MINOR. Ignore fields that your program does not know.
- Every other change of a field raises MAJOR, such as a new name, type or meaning. Refuse a MAJOR that your program does
  not know.

The [JSON Schema](https://json-schema.org) of an answer has the type of every field, and describes the fields inside of
objects. This page and the [schemas](schemas/) are generated from the code in
[`bench/answers/`](../bench/answers/schema.py).

These fields have the same meaning in all answers, unless the answer says something else:

| field | meaning |
| --- | --- |
| `run` | the path of a run folder |
| `file` | the path of a file |
| `folder` | the path of a folder that is not a run folder |
| `started` | the time of the start |
| `time_to_train_min` | the minutes from the record run_start to the record run_stop in the log |
| `rule` | the ID of a rule, such as SLU-02; `runstop rules ID` explains the rule |
| `findings` | the broken rules, as [Finding](#objects-in-several-answers) |
| `valid` | whether the results count |
| `passed` | whether all checks passed |

Each section below describes the answers of one command.
"""


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of answer. Objects of later versions may have more fields."""
    content: dict[str, Any] = without_words(json.loads(json.dumps(msgspec.json.schema(KINDS[name]))))
    for part_name, part in content["$defs"].items():
        if kind := _classes().get(part_name):
            part["description"] = _summary(kind)
            documented = _docstrings(kind)
            for field_name, field in part["properties"].items():
                if words := documented.get(field_name):
                    field["description"] = words
    return {"$schema": _DRAFT, "title": KINDS[name].__struct_config__.tag, **content}


def without_words(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON Schema without the descriptions of its objects and fields."""
    objects = {
        name: _wordless(part)
        | {"properties": {key: _wordless(field) for key, field in part.get("properties", {}).items()}}
        if "properties" in part
        else _wordless(part)
        for name, part in whole["$defs"].items()
    }
    return whole | {"$defs": objects}


def text(name: str) -> str:
    return json.dumps(schema(name), indent=1) + "\n"


def broken(kept: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield what a program that reads the kept version could not read in the new one."""
    for name, part in kept["$defs"].items():
        now = new["$defs"].get(name)
        if now is None:
            yield f"{name} is removed"
            continue
        if "enum" in part and not set(part["enum"]) <= set(now.get("enum", ())):
            yield f"{name} has lost a value"
        for field, kept_type in part.get("properties", {}).items():
            if field == "schema":
                continue
            if field not in now.get("properties", {}):
                yield f"{name}.{field} is removed"
            elif _type(kept_type) != _type(now["properties"][field]):
                yield f"{name}.{field} has another type"
            elif field in part.get("required", ()) and field not in now.get("required", ()):
                yield f"{name}.{field} may be missing"


def _type(field: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _wordless(field).items() if key != "default"}


def _wordless(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "description"}


def version(schema_of_kind: dict[str, Any]) -> tuple[int, int]:
    """Return MAJOR and MINOR of a JSON Schema."""
    major, minor = schema_of_kind["title"].rsplit("/", 1)[1].split(".")
    return int(major), int(minor)


def page() -> str:
    """Return the text of docs/json.md: the fields of the answers, and of the objects that several answers have."""
    sections, users = [_INTRODUCTION], Counter[str]()
    for verb, kinds in ANSWERS.items():
        sections.append(f"## {verb}\n")
        for kind in kinds:
            name = kind.__struct_config__.tag.split("/")[1]
            whole = schema(name)
            users.update(whole["$defs"].keys())
            sections.append(_section(f"`{whole['title']}` ([schema](schemas/{name}.json))", kind))
    sections.append("## Objects in several answers\n")
    shared = (name for name, count in sorted(users.items()) if count > 1 and name in _classes())
    sections += [_section(f"**{name}**", _classes()[name]) for name in shared]
    return "\n".join(sections).rstrip("\n") + "\n"


def _section(heading: str, kind: type) -> str:
    """Return the fields of an object. Fields without a description share a line."""
    documented = _docstrings(kind)
    fields = [name for name in typing.get_type_hints(kind) if not name.startswith("_")]
    rows = [f"- `{name}`: {documented[name]}" for name in fields if name in documented]
    if others := [f"`{name}`" for name in fields if name not in documented]:
        rows.append(f"- {'Other fields' if rows else 'Fields'}: {', '.join(others)}")
    lines = [textwrap.fill(f"{heading}: {_summary(kind)}", 120, break_long_words=False, break_on_hyphens=False), ""]
    for row in rows:
        lines.append(textwrap.fill(row, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def _summary(kind: type) -> str:
    return _in_json((inspect.getdoc(kind) or "").split("\n\n")[0])


def _in_json(words: str) -> str:
    """Return a docstring with JSON's words for Python's constants."""
    for constant, value in (("None", "null"), ("True", "true"), ("False", "false")):
        words = re.sub(rf"\b{constant}\b", value, words)
    words = re.sub(r"(^|\. )null\b", r"\1Null", words)
    return " ".join(words.split())


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes of all answers and of the objects inside of them, by name."""
    return {kind.__name__: kind for kind in _reachable()}


def _reachable() -> Iterator[type]:
    """Yield the classes of the fields of all answers."""
    seen: set[type] = set()
    left: list[Any] = list(KINDS.values())
    while left:
        one = left.pop()
        left += [arg for arg in getattr(one, "__args__", ()) if arg is not Ellipsis]
        is_class = isinstance(one, type) and not issubclass(one, enum.Enum)
        if is_class and one not in seen and (dataclasses.is_dataclass(one) or issubclass(one, msgspec.Struct)):
            seen.add(one)
            yield one
            left += typing.get_type_hints(one).values()


def _docstrings(kind: type) -> dict[str, str]:
    """Return the text below each field of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError):
            continue
        body = getattr(node, "body", [])
        for field, after in zip(body, body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[ast.unparse(field.target)] = _in_json(str(after.value.value))
    return texts
