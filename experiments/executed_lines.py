"""A plugin of pytest: which test executes which lines? `EXECUTED_LINES=FOLDER pytest -p executed_lines -n 2`

Each worker of xdist writes FOLDER/WORKER.json: {"tests": [test, …], "lines": {file: {line: [place of a test, …]}}},
with the files of bench/ and jobs/. The data of coverage.py stays in memory: tests fork, and a child would change a file
of its parent.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

SOURCES = ("bench", "jobs")
recorder = coverage.Coverage(data_file=None, source=SOURCES, config_file=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start for each test again: a test can set a trace function of its own, which ends the recording."""
    recorder.start()
    recorder.switch_context(item.nodeid)
    yield
    recorder.stop()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return
    data = recorder.get_data()
    tests = sorted(data.measured_contexts() - {""})
    place_of = {test: place for place, test in enumerate(tests)}
    lines = {
        str(Path(file).relative_to(Path.cwd())): {
            line: [place_of[test] for test in executing if test]
            for line, executing in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    content = json.dumps({"tests": tests, "lines": lines})
    Path(os.environ["EXECUTED_LINES"], f"{worker}.json").write_text(content)
