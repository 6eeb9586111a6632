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

This page is generated from the code: [`bench/answers/`](../bench/answers/schema.py). To generate it again, run
`WRITE_ANSWERS=1 pytest tests/console/test_json_answers.py`.

With `--json`, a verb prints its answer as JSON on stdout, one object on each line. Progress and errors are on stderr.
The exit code is the same as without `--json`. If runstop refuses the request (exit code 2), stdout is empty.

    runstop runs --json | jq -r 'select(.is_active) | .run'
    runstop parse runs/*/result_0.txt --json | jq '{file, valid, time_to_train_min}'
    runstop history lora_tiny --check 2 --json | jq -r 'select(.verdict == "regression") | .text'

- **One line for each thing**: a verb about several things, such as runs, logs or rules, prints one line for each of
  them, and no line if there is none. Every other verb prints exactly one line. A line is never an array.
- **Schema**: the first field of every line is `schema`, such as `runstop/run/1.0`. It names the kind of the answer, and
  its version MAJOR.MINOR. MINOR rises when a field is added. MAJOR rises when a field is removed or renamed, or when
  its type or its meaning changes. So a program checks the kind and MAJOR, and ignores fields that it does not know.
- **Names**: one thing has the same name in all answers. `run` is the path of a run folder, `file` the path of a file,
  and `folder` the path of another folder. `started` is the time of the start. `rule` is the number of a rule, and
  `findings` are broken rules with the fields `what`, `where` and `fix`. `valid` says whether results count, and
  `passed` whether all checks passed.
- **Units** are in the names: `_ms`, `_s`, `_min`, `_gib`, `_bytes`. In `measurements`, the field `unit` has the unit.
- **Times** are ISO 8601 in UTC, such as `2026-11-22T07:53:04Z`.
- **Unknown values** are `null`. A value that was not measured is never 0.
- **Secrets** are masked, as in all output.

[`docs/schemas/`](schemas/) has a [JSON Schema](https://json-schema.org) for each kind of answer. A test compares the
schemas with kept copies. The test fails if a field changes without a new version.
"""


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of answer. Objects of later versions may have more fields."""
    content: dict[str, Any] = json.loads(json.dumps(msgspec.json.schema(KINDS[name])))
    for part in content["$defs"].values():
        part.pop("description", None)
    return {"$schema": _DRAFT, "title": KINDS[name].__struct_config__.tag, **content}


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
    return {key: value for key, value in field.items() if key not in ("default", "description")}


def version(schema_of_kind: dict[str, Any]) -> tuple[int, int]:
    """Return MAJOR and MINOR of a JSON Schema."""
    major, minor = schema_of_kind["title"].rsplit("/", 1)[1].split(".")
    return int(major), int(minor)


def page() -> str:
    """Return the text of docs/json.md."""
    parts, sections = {}, [_INTRODUCTION]
    for verb, kinds in ANSWERS.items():
        sections.append(f"## {verb}\n")
        for kind in kinds:
            name = kind.__struct_config__.tag.split("/")[1]
            whole = schema(name)
            own = whole["$ref"].rsplit("/", 1)[1]
            parts |= {part: whole for part in whole["$defs"] if part != own}
            sections.append(_section(f"`{whole['title']}` ([schema](schemas/{name}.json))", kind, whole, own))
    sections.append("## Objects inside of answers\n")
    for name in sorted(parts):
        if "properties" in parts[name]["$defs"][name]:
            sections.append(_section(f"**{name}**", _classes()[name], parts[name], name))
    return "\n".join(sections).rstrip("\n") + "\n"


def _section(heading: str, kind: type, whole: dict[str, Any], own: str) -> str:
    """Return the fields of an object; `whole` is the schema that has it under the name `own`."""
    summary = _in_json((inspect.getdoc(kind) or "").split("\n\n")[0])
    lines = [textwrap.fill(f"{heading}: {summary}", 120, break_long_words=False, break_on_hyphens=False), ""]
    documented, defs = _docstrings(kind), whole["$defs"]
    for name, field in whole["$defs"][own]["properties"].items():
        if name == "schema":
            continue
        more = documented.get(name, "")
        row = f"- `{name}`: {_words(field, defs)}" + (f". {more}" if more else "")
        lines.append(textwrap.fill(row, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def _in_json(words: str) -> str:
    """Return a docstring with JSON's words for Python's constants."""
    for constant, value in (("None", "null"), ("True", "true"), ("False", "false")):
        words = re.sub(rf"\b{constant}\b", value, words)
    return " ".join(words.split())


def _words(field: dict[str, Any], defs: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return _words(defs[name], defs) if "enum" in defs[name] else name
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_words(one, defs) for one in field["anyOf"]))
    if "enum" in field:
        return " or ".join(json.dumps(one) for one in field["enum"])
    match field.get("type"):
        case "array" if "prefixItems" in field:
            return (
                f"list of {len(field['prefixItems'])}: {', '.join(_words(one, defs) for one in field['prefixItems'])}"
            )
        case "array":
            return f"list of {_words(field['items'], defs)}"
        case "object":
            values = field.get("additionalProperties")
            return f"object of {_words(values, defs)}" if isinstance(values, dict) and values else "object"
        case kind:
            return {"string": "text", "null": "null", "boolean": "true or false", None: "any value"}.get(
                kind, str(kind)
            )


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
