"""The schemas of --json: the page and the kept copies are those of the code, and no version breaks its readers."""

import copy
import json
import os
from typing import Any

import jsonschema
import pytest

from helpers import answer_documents as documents
from helpers import golden

WRITES = bool(os.environ.get("WRITE_ANSWERS"))


@pytest.mark.parametrize("name", documents.KINDS)
def test_schemas_are_the_kept_ones(name: str) -> None:
    path, new = documents.SCHEMAS / f"{name}.json", documents.schema(name)
    jsonschema.Draft202012Validator.check_schema(new)
    kept = json.loads(path.read_text()) if path.exists() else None
    if kept is not None and documents.without_words(kept) != documents.without_words(new):
        major, minor = documents.version(kept)
        wrong = list(documents.broken(kept, new))
        assert not wrong or documents.version(new)[0] > major, f"{wrong}: raise MAJOR in the tag of the class"
        assert documents.version(new) > (major, minor), "raise MINOR in the tag of the class"
    if WRITES:
        documents.SCHEMAS.mkdir(exist_ok=True)
        path.write_text(documents.text(name))
    assert path.exists() and path.read_text() == documents.text(name), "run with WRITE_ANSWERS=1 and commit the file"


@pytest.mark.long
def test_the_page_is_that_of_the_code() -> None:
    golden.require(documents.page(), documents.PAGE, variable="WRITE_ANSWERS")
    assert {path.stem for path in documents.SCHEMAS.iterdir()} == set(documents.KINDS)


def changed(**of_run: Any) -> dict[str, Any]:
    """Return the schema of a run with other fields; None removes one."""
    new = copy.deepcopy(documents.schema("run"))
    fields = new["$defs"]["Run"]["properties"]
    for name, value in of_run.items():
        fields.update({name: value})
        if value is None:
            del fields[name]
    return new


@pytest.mark.parametrize(
    ("new", "wrong"),
    [
        (changed(), []),
        (changed(more={"type": "string"}), []),
        (changed(started=None), ["Run.started is removed"]),
        (changed(tokens_s={"type": "string"}), ["Run.tokens_s has another type"]),
    ],
    ids=["same", "added", "removed", "another type"],
)
def test_what_breaks_a_reader(new: dict[str, Any], wrong: list[str]) -> None:
    assert list(documents.broken(documents.schema("run"), new)) == wrong


def test_an_optional_field_breaks_a_reader() -> None:
    new = changed()
    new["$defs"]["Run"]["required"].remove("jobs")
    assert list(documents.broken(documents.schema("run"), new)) == ["Run.jobs may be missing"]


def test_a_lost_value_or_object_breaks_a_reader() -> None:
    kept = {"$defs": {"Verdict": {"enum": ["passed", "failed"]}, "Trial": {"properties": {}}}}
    new = {"$defs": {"Verdict": {"enum": ["passed", "unknown"]}}}
    assert list(documents.broken(kept, new)) == ["Verdict has lost a value", "Trial is removed"]
