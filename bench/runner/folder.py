"""The run folder of a runner: made and claimed by the lead, with its plan in it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bench.backends import run_lock
from bench.contract import plan_kinds, plan_paths, run_files
from bench.contract.plan import Plan
from bench.errors import ConfigError, written
from bench.runs import folder as folders

_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")


@contextmanager
def opened(run: Path, plan_file: Path | None) -> Iterator[Plan]:
    """Yield the plan of a run folder, which nobody else works in meanwhile; a new one gets its plan from a file.

    Raises:
        ConfigError: another process works in it, it is not this user's, or it has no plan.
    """
    if plan_file is None:
        plan_kinds.load(run / run_files.PLAN)  # or nothing is made
    with written(run):
        run.mkdir(mode=folders.NOT_OTHERS, parents=True, exist_ok=True)
        folders.require_ours(run)
        (run / run_files.RANK_LOGS).mkdir(mode=folders.NOT_OTHERS, exist_ok=True)
    with run_lock.driving(run):
        if plan_file is not None and not (run / run_files.PLAN).exists():
            with written(run):
                (run / run_files.PLAN).write_text(filled_in(plan_file))
        yield plan_kinds.load(run / run_files.PLAN)


def filled_in(plan_file: Path) -> str:
    """Return a plan's text with this environment's values in place of $DATADIR and the like, as job.sh writes it.

    Raises:
        ConfigError: one of them is not set.
    """
    plan = plan_kinds.load(plan_file)
    text = plan_kinds.dumps(plan)
    named = plan_paths.named_paths(plan.config).values()
    names = {name for path in named if path for name in _VARIABLE.findall(path)}
    for name in sorted(names, key=len, reverse=True):
        value = os.environ.get(name, "")
        if not value or re.search(r'["\\$`\x00-\x1f]', value):
            fix = "set it, without quotes, backslashes, dollar signs and control characters"
            raise ConfigError(f"{name} is {value!r}", where="the environment", fix=fix, rule="CFG-06")
        text = text.replace(f"${name}", value)
    return text


@contextmanager
def output(run: Path) -> Iterator[TextIO]:
    """Yield the file in which a runner keeps what it prints."""
    with (run / run_files.RUNNER_OUTPUT).open("a") as file:
        yield file
