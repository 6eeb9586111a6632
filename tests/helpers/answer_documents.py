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

With the option `--json`, a command prints its answer as JSON on stdout. Progress and errors are on stderr. These
examples select fields with `jq`:

    runstop runs --json | jq -r 'select(.is_active) | .run'
    runstop parse runs/*/result_0.txt --json | jq '{file, valid, time_to_train_min}'
    runstop history lora_tiny --check 2 --json | jq -r 'select(.verdict == "regression") | .text'

- **Lines**: each line is one JSON object. A command about several things, such as runs, logs or rules, prints one line
  for each thing, and nothing if there is no such thing. Every other command prints exactly one line.
- **Exit code**: `--json` does not change the exit code. If runstop refuses the request (exit code 2), stdout is empty.
- **Units**: the ending of a name is the unit: `_ms`, `_s`, `_min`, `_gib`, `_bytes`. Objects in `measurements` have a
  field `unit`.
- **Times**: a time is in UTC in the format of ISO 8601, such as `2026-11-22T07:53:04Z`.
- **Unknown values**: a value that was not measured is `null`, and never 0.
- **Secrets** are masked.

## Names and versions

The first field of every line is `schema`, such as `runstop/run/1.0`. It contains the kind of the answer (`run`) and the
version MAJOR.MINOR (`1.0`).

- A new field raises MINOR. Ignore fields that your program does not know.
- Every other change of a field raises MAJOR, such as a new name, type or meaning. Refuse a MAJOR that your program does
  not know.

These fields have the same meaning in all answers:

| field | meaning |
| --- | --- |
| `run` | the path of a run folder |
| `file` | the path of a file |
| `folder` | the path of a folder that is not a run folder |
| `started` | the time of the start |
| `rule` | the ID of a rule, such as SLU-02; `runstop rules ID` explains the rule |
| `findings` | the broken rules |
| `valid` | whether the results count |
| `passed` | whether all checks passed |

The headings below are the verbs of runstop. Each answer has a link to its [JSON Schema](https://json-schema.org). Types
with a capital letter, such as `Finding`, are [objects inside of answers](#objects-inside-of-answers).

This page and the [schemas](schemas/) are generated from the code in [`bench/answers/`](../bench/answers/schema.py).
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
            kind = _classes()[name]
            if also := _answer_with(kind):
                both = f"**{name}**: {_in_json(inspect.getdoc(kind) or '')} {also}"
                sections.append(textwrap.fill(both, 120, break_long_words=False, break_on_hyphens=False) + "\n")
            else:
                sections.append(_section(f"**{name}**", kind, parts[name], name))
    return "\n".join(sections).rstrip("\n") + "\n"


def _section(heading: str, kind: type, whole: dict[str, Any], own: str) -> str:
    """Return the fields of an object; `whole` is the schema that has it under the name `own`."""
    summary = _in_json((inspect.getdoc(kind) or "").split("\n\n")[0])
    lines = [textwrap.fill(f"{heading}: {summary}", 120, break_long_words=False, break_on_hyphens=False), ""]
    documented, defs = _docstrings(kind), whole["$defs"]
    rows: list[tuple[list[str], str, str]] = []
    for name, field in defs[own]["properties"].items():
        words, more = _words(field, defs), documented.get(name, "")
        if name == "schema":
            continue
        if rows and not more and rows[-1][1:] == (words, ""):
            rows[-1][0].append(name)  # several fields of one type without a description share a line
        else:
            rows.append(([name], words, more))
    for names, words, more in rows:
        row = f"- {', '.join(f'`{name}`' for name in names)}: {words}" + (f". {more}" if more else "")
        lines.append(textwrap.fill(row, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def _answer_with(kind: type) -> str | None:
    """Return the sentence about an object whose fields are also in an answer, so that the page has them once."""
    for verb, answers in ANSWERS.items():
        for answer in answers:
            if issubclass(answer, kind):
                more = typing.get_type_hints(answer).keys() - typing.get_type_hints(kind).keys()
                missing = " and ".join(f"`{name}`" for name in sorted(more))
                return f"The fields are those of the answer of [{verb}](#{verb}), without {missing}."
    return None


def _in_json(words: str) -> str:
    """Return a docstring with JSON's words for Python's constants."""
    for constant, value in (("None", "null"), ("True", "true"), ("False", "false")):
        words = re.sub(rf"\b{constant}\b", value, words)
    words = re.sub(r"(^|\. )null\b", r"\1Null", words)
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
