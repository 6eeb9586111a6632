"""What runstop answers to wrong settings: golden_refusals.txt, so that a change shows all answers it changes.

refused_settings.txt has the settings. After a change on purpose, run it once with WRITE_REFUSALS=1, and read the
difference.
"""

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.planning import compose, overrides
from helpers import golden, user_tables

SETTINGS = Path(__file__).with_name("refused_settings.txt")
GOLDEN = Path(__file__).with_name("golden_refusals.txt")


def requests() -> Iterator[str]:
    before = ""
    for line in SETTINGS.read_text().splitlines():
        if line.startswith("= "):
            before = line.removeprefix("= ")
        elif line and not line.startswith("#"):
            yield f"{before} {line}"


def answer(request: str) -> str:
    words = shlex.split(request)
    try:
        overrides.check(words)
        compose.compose(words)
    except ConfigError as error:
        return str(error).replace(str(compose.CONF), "conf")
    return "is planned"


@pytest.mark.long
def test_answers_to_wrong_settings_are_the_golden_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user_tables.leave_out(monkeypatch)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.ERROR)
    text = "".join(f"{request}\n  {answer(request)}\n" for request in requests())
    golden.require(text, GOLDEN, variable="WRITE_REFUSALS")
