"""The lead node: open the run folder, wait for the other nodes, and drive the plan on all of them."""

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from bench import masking
from bench.backends import run_lock
from bench.backends.nodes import channel
from bench.backends.nodes.interruption import Interruption
from bench.backends.nodes.lead import Nodes, require_shared
from bench.console import trial as trial_tables
from bench.contract import atomic_files, plan_kinds, plan_paths, run_files
from bench.contract import plan as plans
from bench.contract.plan import Command, Plan, Trial
from bench.driver.drive import Drive, drive
from bench.errors import BenchError, ConfigError, written
from bench.results.kind import Judged
from bench.runs import folder as folders


class Tee(io.TextIOBase):
    """Write output to the terminal and to a file in the run folder, which `why` reads."""

    def __init__(self, screen: TextIO, file: TextIO) -> None:
        self._screen, self._file = screen, file

    def write(self, text: str) -> int:
        self._file.write(text)
        written = self._screen.write(text)
        self.flush()
        return written

    def flush(self) -> None:
        self._file.flush()
        self._screen.flush()

    def isatty(self) -> bool:
        return False


class Lines:
    """Print the progress of a run as lines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def say(self, text: str) -> None:
        print(text, flush=True)

    def failed(self, error: BenchError) -> None:
        print(masking.masked(str(error)), file=sys.stderr, flush=True)

    def follow(self, nodes: Nodes, command: Command, is_running: Callable[[], bool]) -> None:
        while is_running():
            pass

    def judged(self, trial: Trial, judged: Judged) -> None:
        trial_tables.show(self._folder, trial, judged)


def run(args: argparse.Namespace) -> int:
    """Drive a run from node 0 with the arguments of `python -m bench.driver`; return its exit code."""
    folder: Path = args.run.absolute()
    interruption = Interruption(limit_s=None if args.limit_min is None else time.monotonic() + 60 * args.limit_min)
    interruption.listen()
    with opened(folder, args.plan) as planned, output(folder) as file:
        plan = planned if args.trial_min is None else plans.within(planned, args.trial_min)
        token = channel.token() if plan.world.num_nodes > 1 else ""
        nodes = Nodes(plan, folder, args.lead[0], own=plan.environment)
        job = args.job or str(folder)

        @contextmanager
        def connect() -> Iterator[Nodes]:
            nodes.join(args.lead[1], token=token, within_s=args.join_s, check=interruption.check)
            nodes.send_plan(check=interruption.check)
            require_shared(nodes)
            yield nodes

        with redirect_stdout(Tee(sys.stdout, file)), redirect_stderr(Tee(sys.stderr, file)):
            print(f"job {job}, attempt {args.attempt}, {plan.name} on {plan.world.num_nodes} nodes", flush=True)
            driven = Drive(
                folder=folder,
                plan=plan,
                progress=Lines(folder),
                job=job,
                backend_job_id=job,
                check=interruption.check,
                restarts=args.restarts,
            )
            code = drive(driven, connect)
            nodes.shutdown(code)
            return code


_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")


@contextmanager
def opened(run: Path, plan_file: Path | None) -> Iterator[Plan]:
    """Lock a run folder and yield its plan; a new folder gets its plan from a file.

    Raises:
        ConfigError: another process uses the folder, it belongs to another user, or it has no plan.
    """
    if plan_file is None:
        plan_kinds.load(run / run_files.PLAN)  # without a plan no folder is created
    with written(run):
        run.mkdir(mode=folders.NOT_OTHERS, parents=True, exist_ok=True)
        folders.require_ours(run)
        (run / run_files.RANK_LOGS).mkdir(mode=folders.NOT_OTHERS, exist_ok=True)
    with run_lock.driving(run):
        if plan_file is not None and not (run / run_files.PLAN).exists():
            with written(run):
                atomic_files.write_text(run / run_files.PLAN, filled_in(plan_file))
        yield plan_kinds.load(run / run_files.PLAN)


def filled_in(plan_file: Path) -> str:
    """Return a plan's JSON with $DATADIR and the like replaced by their values, as job.sh does.

    Raises:
        ConfigError: a variable is not set, or its value contains a forbidden character.
    """
    plan = plan_kinds.load(plan_file)
    text = plan_kinds.dumps(plan)
    named = plan_paths.named_paths(plan.config).values()
    names = {name for path in named if path for name in _VARIABLE.findall(path)}
    for name in sorted(names, key=len, reverse=True):
        value = os.environ.get(name, "")
        if not value or re.search(r'["\\$`\x00-\x1f]', value):
            fix = f"set {name} to a path without quotes, backslashes, dollar signs and control characters"
            raise ConfigError(
                f"the environment variable {name} is {value!r}, which is not a valid path",
                where="environment variables",
                fix=fix,
                rule="CFG-06",
            )
        text = text.replace(f"${name}", value)
    return text


@contextmanager
def output(run: Path) -> Iterator[TextIO]:
    """Open the file for the driver's output."""
    with (run / run_files.RUNNER_OUTPUT).open("a") as file:
        yield file
