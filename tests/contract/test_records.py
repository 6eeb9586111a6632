"""What passes between the parts of bench cannot be changed on the way, and takes no field that it does not have."""

import ast
import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

import bench
from bench.contract.schema import Config

FOLLOWING = {
    *("Progress", "Watched", "Curves", "Gpus", "FollowedTrial", "FollowedRun"),
    *("Drive", "Member", "Node", "Interruption", "Runners", "DriverJob"),
    *("Live", "Reports", "Listing"),
    *("_Attempt", "_Clock"),
}
"""These follow a log, record by record, the nodes of a run, the runs of the dashboard, or attempts, and change."""
CACHING = {"Subject", "Trials", "Repository"}
"""These keep what they have worked out, for which slots have no place."""


def options() -> dict[str, set[str]]:
    """Return what each dataclass of bench asks for, as its source says it."""
    options_of = {}
    for path in Path(bench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclass":
                    options_of[node.name] = {
                        str(keyword.arg) for keyword in call.keywords if ast.literal_eval(keyword.value)
                    }
    return options_of


def struct_options() -> dict[str, dict[str, bool]]:
    """Return the same of each msgspec.Struct of bench."""
    return {
        node.name: {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        for path in Path(bench.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "frozen" for keyword in node.keywords)
    }


def of_config(kind: Any) -> set[str]:
    """Return the names of a config's class and of all classes below it."""
    names = {kind.__name__}
    for hint in typing.get_type_hints(kind).values():
        parts = typing.get_args(hint)
        for inner in (hint, *parts, *(each for part in parts for each in typing.get_args(part))):
            if dataclasses.is_dataclass(inner):
                names |= of_config(inner)
    return names


@pytest.mark.long
def test_records_are_frozen_and_a_config_takes_no_unknown_key() -> None:
    """Hydra fills the classes of a config, so that these cannot be frozen; without slots they would take any key."""
    options_of, filled = options(), of_config(Config)
    assert len(options_of) > 100 and {"Task", "Launch", "Slurm", "Config"} <= filled <= options_of.keys()
    assert {name for name in filled if options_of[name] != {"slots", "kw_only"}} == set()
    records = options_of.keys() - filled - FOLLOWING
    assert {name for name in records if "frozen" not in options_of[name]} == set()
    assert {name for name in records - CACHING if "slots" not in options_of[name]} == set()
    structs, base = struct_options(), {"frozen": True, "kw_only": True}
    read = {"frozen": True, "forbid_unknown_fields": True}
    special = {"Part": read | {"omit_defaults": True}, "_Part": read, "Event": {"frozen": True, "gc": False}}
    assert structs == dict.fromkeys(structs, base) | special and len(structs) > 15
