"""Nodes whose processes this machine starts, by ssh or in a container, and controls over their standard streams."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.backends.nodes.channel import Channel, LostError
from bench.backends.nodes.lead import Member, Nodes, require_shared
from bench.contract import run_files
from bench.contract.plan import Plan
from bench.errors import SubmitError
from bench.rules import RULES

START_TIMEOUT_S = 900.0
"""How long a node may take to send its first message: its image may have to be pulled."""
EXIT_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class RemoteProcess:
    """The process of a node."""

    name: str
    process: "subprocess.Popen[bytes]"
    errors: Path
    """The file with its stderr."""


def member_command(folder: Path, number: int, *, python: str) -> list[str]:
    """Return the command of a member node that is controlled over its standard streams."""
    return [python, "-m", "bench.driver", str(folder), "--node", str(number), "--stdio"]


@contextmanager
def opened(plan: Plan, folder: Path, host: str, commands: Mapping[str, Sequence[str]]) -> Iterator[Nodes]:
    """Start the process of each node (`commands` by node name) and yield the nodes; rank 0 listens on `host`.

    All processes are stopped when the block ends.

    Raises:
        SubmitError: a node cannot be reached or does not start; the message is the node's own.
    """
    nodes, every = Nodes(plan, folder, host, own=None), list[RemoteProcess]()
    try:
        for name, words in commands.items():
            every.append(_start(name, words, folder))
        for number, node in enumerate(every):
            nodes.add(_member(number, node))
        nodes.send_plan(check=_nothing)
        require_shared(nodes)
        yield nodes
    finally:
        nodes.shutdown(0)
        for node in every:
            _end(node.process)


def find_rule(text: str, otherwise: str) -> tuple[str, str | None]:
    """Return the last line that matches a HST rule, and the rule's id; without a match, the last line and None."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        for rule in (rule for rule in RULES.values() if rule.id.startswith("HST-")):
            if any(re.search(sign.pattern, line.encode()) for sign in rule.signs):
                return line, rule.id
    return (lines[-1] if lines else otherwise), None


def _nothing() -> None:
    """Do not interrupt the wait; signal handlers raise by themselves."""


def _start(name: str, words: Sequence[str], folder: Path) -> RemoteProcess:
    errors = folder / run_files.host_errors(name)
    with errors.open("ab") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, process_group=0, bufsize=0
        )
    return RemoteProcess(name, process, errors)


def _member(number: int, node: RemoteProcess) -> Member:
    """Wait for a node's first message and return the node."""
    assert node.process.stdin is not None and node.process.stdout is not None
    channel = Channel(os.dup(node.process.stdout.fileno()), os.dup(node.process.stdin.fileno()), is_noisy=True)
    node.process.stdin.close()
    node.process.stdout.close()
    try:
        request = channel.next(START_TIMEOUT_S, "join")
    except LostError as error:
        channel.close()
        with suppress(subprocess.TimeoutExpired):
            node.process.wait(EXIT_TIMEOUT_S)
        reason, rule = find_rule(node.errors.read_text(errors="replace"), str(error))
        fix = RULES[rule].fix if rule else f"read {node.errors}"
        raise SubmitError(
            f"the host {node.name} did not join the run: {reason}",
            where=f"cluster.hosts: {node.name}",
            fix=fix,
            rule=rule,
        ) from None
    return Member(number, str(request["name"]), channel)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close the process's streams, which makes it exit; terminate and kill it if it does not."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()  # no error if _member has closed it
    for end in (process.terminate, process.kill):
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
            return
        end()
    process.wait()
