"""The ranks of one command, on every node of a run, while it runs; and why it failed, once it has ended."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bench.backends.nodes.ending import NodeLostError
from bench.backends.nodes.nodes import Nodes
from bench.contract import groups, run_files
from bench.contract.plan import Command
from bench.errors import BenchError, SubmitError

TIME_IS_UP = 124
"""Exit code of a rank that walltime ended; the same as timeout(1)'s."""


class Running:
    """A command under way."""

    def __init__(self, nodes: Nodes, command: Command, folder: Path) -> None:
        self._nodes, self._command, self._folder = nodes, command, folder
        self._until_s = time.monotonic() + 60 * command.limit_min if command.limit_min else None
        self._exit_codes: dict[int, int] = {}
        self._needed = groups.needed_ranks(nodes.plan, command)
        self._restarts = groups.restarts(nodes.plan, command)
        self.lost: NodeLostError | None = None
        """Set once a node is gone, which explains how the ranks of others end."""
        self._is_late = False

    def are_running(self) -> bool:
        """Return, after a moment, whether all is well and work goes on; False as soon as a needed rank has failed."""
        try:
            self._exit_codes = self._nodes.exit_codes()
        except NodeLostError as error:
            self.lost = error
            return False
        codes = self._needed_codes()
        are_left = len(codes) < len(self._needed)
        self._is_late = are_left and self._until_s is not None and time.monotonic() > self._until_s
        goes_on = are_left and not self._is_late and not any(codes.values())
        if goes_on:
            self._start_again()
        return goes_on

    def _start_again(self) -> None:
        """Start a group of which a rank has failed, as often as it may be."""
        for ranks in self._restarts:
            if any(self._exit_codes.get(rank) for rank in ranks):
                self._restarts.remove(ranks)
                self._nodes.start_again(ranks)
                return

    def stop(self) -> None:
        """End what still runs, and wait until it has. How ranks end from here on is our doing and says nothing."""
        codes = self._needed_codes()
        has_failed = self._is_late or any(codes.values())
        lost = self._nodes.stop()
        is_done = len(codes) == len(self._needed) and not has_failed
        self.lost = self.lost or (None if is_done else lost)

    def _needed_codes(self) -> dict[int, int]:
        return {rank: code for rank, code in self._exit_codes.items() if rank in self._needed}

    @property
    def exit_code(self) -> int:
        """The exit code of the command, as srun has it: the highest of all ranks."""
        return TIME_IS_UP if self._is_late else max(self._needed_codes().values(), default=0)

    def check(self) -> None:
        """Raise the reason if a rank failed: its node is gone, the signal that killed it, or its own account.

        Raises:
            NodeLostError: a node is gone.
            SubmitError: with the exit code that the rank's error asks for.
        """
        codes, name, logs = self._needed_codes(), self._command.name, self._folder / run_files.RANK_LOGS
        if self.lost is not None:
            raise self.lost
        if self._is_late:
            what, fix = f"{name} took longer than its walltime", "raise walltime (minutes per trial), or set it to null"
            raise SubmitError(what, where="walltime", fix=fix, rule="SLU-07")
        if len(codes) == len(self._needed) and not any(codes.values()):
            return
        if ended := {rank: signal_name(code) for rank, code in codes.items() if code > 128}:
            raise SubmitError(
                f"{', '.join(f'rank {r} got {got}' for r, got in sorted(ended.items()))} during {name}",
                where=str(self._folder / run_files.rank_output(name, min(ended))),
                fix="look for what ends processes on this machine: memory, a time limit, a person",
                rule="RUN-02",
            )
        if (first := first_error(self._folder, self._command)) is not None:
            raise first
        what = f"{name} ended without a result; exit codes by rank: {codes}"
        raise SubmitError(what, where=str(logs), fix="read the *_rank_*.out there")


@contextlib.contextmanager
def started(nodes: Nodes, command: Command, folder: Path, *, port: int) -> Iterator[Running]:
    """Start a command's ranks; when the block is left, for whatever reason, none of them runs any more."""
    for old in folder.glob(run_files.rank_error(command.name, "*")):
        old.unlink()
    running = Running(nodes, command, folder)
    try:
        nodes.start(command, port)
        yield running
    finally:
        running.stop()


def signal_name(exit_code: int) -> str:
    """Return the signal of an exit code above 128, as SIGKILL."""
    with contextlib.suppress(ValueError):
        return signal.Signals(exit_code - 128).name
    return f"signal {exit_code - 128}"


def first_error(folder: Path, command: Command) -> BenchError | None:
    """Return what the rank that failed first said; the others mostly say that it is gone."""
    accounts = []
    for path in folder.glob(run_files.rank_error(command.name, "*")):
        with contextlib.suppress(OSError, ValueError):
            accounts.append(json.loads(path.read_text()))
    if not accounts:
        return None
    first = min(accounts, key=lambda account: account["time"])
    error = SubmitError(first["what"], where=first["where"], fix=first["fix"], rule=first.get("rule"))
    error.exit_code = first["exit_code"]
    return error
