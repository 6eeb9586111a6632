"""Nodes whose processes are started from here, by ssh or in a container; their standard streams are the connection."""

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

OPENS_S = 900.0
"""How long a node may take to say its first word: its image may have to be pulled."""
ENDS_S = 15.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A process that speaks for a node."""

    name: str
    process: "subprocess.Popen[bytes]"
    errors: Path
    """What it writes to stderr."""


def member_words(folder: Path, number: int, *, python: str) -> list[str]:
    """Return the command of a node that is spoken to by its standard streams."""
    return [python, "-m", "bench.driver", str(folder), "--node", str(number), "--stdio"]


@contextmanager
def opened(plan: Plan, folder: Path, host: str, commands: Mapping[str, Sequence[str]]) -> Iterator[Nodes]:
    """Start the process of each node by its name; yield the nodes, whose rank 0 listens on `host`.

    When the block is left, for whatever reason, none of them runs any more.

    Raises:
        SubmitError: one cannot be reached, or does not start; in its own words.
    """
    nodes, every = Nodes(plan, folder, host, own=None), list[Opened]()
    try:
        for name, words in commands.items():
            every.append(_start(name, words, folder))
        for number, node in enumerate(every):
            nodes.add(_member(number, node))
        nodes.send_plan(check=_nothing)
        require_shared(nodes)
        yield nodes
    finally:
        nodes.bye(0)
        for node in every:
            _end(node.process)


def recognised(text: str, otherwise: str) -> tuple[str, str | None]:
    """Return the line of an answer that shows a rule, and the rule; else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        for rule in (rule for rule in RULES.values() if rule.id.startswith("HST-")):
            if any(re.search(sign.pattern, line.encode()) for sign in rule.signs):
                return line, rule.id
    return (lines[-1] if lines else otherwise), None


def _nothing() -> None:
    """Nothing ends the waiting but the signals, which raise by themselves."""


def _start(name: str, words: Sequence[str], folder: Path) -> Opened:
    errors = folder / run_files.host_errors(name)
    with errors.open("ab") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, process_group=0, bufsize=0
        )
    return Opened(name, process, errors)


def _member(number: int, node: Opened) -> Member:
    """Return a node once it has said its first word."""
    assert node.process.stdin is not None and node.process.stdout is not None
    channel = Channel(os.dup(node.process.stdout.fileno()), os.dup(node.process.stdin.fileno()), is_noisy=True)
    node.process.stdin.close()
    node.process.stdout.close()
    try:
        said = channel.next(OPENS_S, "join")
    except LostError as error:
        channel.close()
        with suppress(subprocess.TimeoutExpired):
            node.process.wait(ENDS_S)
        what, rule = recognised(node.errors.read_text(errors="replace"), str(error))
        fix = RULES[rule].fix if rule else f"read {node.errors}"
        raise SubmitError(f"{node.name}: {what}", where=f"cluster.hosts: {node.name}", fix=fix, rule=rule) from None
    return Member(number, str(said["name"]), channel)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """See that the process is gone; its streams are closed, at whose end it ends itself."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()  # of one that has not said its first word
    for end in (process.terminate, process.kill):
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
            return
        end()
    process.wait()
