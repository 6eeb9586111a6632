"""The table of inputs (right_answers.toml): each has its right exit code and answer, and none a traceback."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers import command_line
from helpers.nvml import H200, L40S

ROWS: list[list[Any]] = [
    row for rows in tomllib.loads(Path(__file__).with_name("right_answers.toml").read_text()).values() for row in rows
]
EVERY = 6
"""One of so many rows is checked for each change, all of them by `make slow`."""
GPUS = {gpu[0]: gpu for gpu in (H200, L40S)} | {"unknown": ("NVIDIA Some New GPU", 100.0, (12, 1))}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    return command_line.furnish(tmp_path_factory.mktemp("here"))


def _marked(number: int, row: list[Any]) -> Any:
    name = " ".join([row[0], *(json.dumps(option) for option in row[3:])])
    return pytest.param(row, id=name, marks=() if number % EVERY == 0 else pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize("row", [_marked(number, row) for number, row in enumerate(ROWS)])
def test_every_input_has_its_right_answer(row: list[Any], here: Path) -> None:
    command, code, words, *options = row
    more: dict[str, Any] = dict(*options)
    answer = command_line.answer(
        command,
        here,
        more.get("env", {}),
        encoding=more.get("encoding", "utf-8"),
        without=more.get("without", ()),
        gpus=[GPUS[name] for name in more.get("gpus", ())],
    )
    text = " ".join(answer.text.replace(str(here), "{here}").split())
    assert "Traceback" not in text, answer.text
    missing = [each for each in words if each not in text]
    assert (answer.code, missing, [each for each in more.get("not", ()) if each in text]) == (code, [], []), answer.text
