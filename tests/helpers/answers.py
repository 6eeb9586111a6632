"""Read the lines of --json as a strict program does."""

import functools
import json
from typing import Any

import jsonschema
import msgspec

from helpers import answer_documents


def read(text: str) -> list[dict[str, Any]]:
    """Return the objects of an output; each obeys its schema, and has no field that the schema does not name."""
    return [_checked(json.loads(line)) for line in text.splitlines()]


def one(text: str) -> dict[str, Any]:
    """Return the only object of an output."""
    (answer,) = read(text)
    return answer


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    name = answer["schema"].split("/")[1]
    _validator(name).validate(answer)
    if name != "plan":  # its fields depend on the kind of the task
        typed = msgspec.convert(answer, answer_documents.KINDS[name])
        assert json.loads(msgspec.json.encode(typed)) == answer, "every field is one of the schema"
    return answer


@functools.cache
def _validator(name: str) -> jsonschema.protocols.Validator:
    return jsonschema.Draft202012Validator(answer_documents.schema(name))
