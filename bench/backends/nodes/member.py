"""A node that obeys: it starts the ranks of each command when the lead says so, and reports how they end."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.backends.nodes import channel as channels
from bench.backends.nodes import file_transfer, processes
from bench.backends.nodes.channel import Channel, LostError
from bench.backends.nodes.interruption import CutShortError, NodeLostError
from bench.backends.nodes.processes import Ranks
from bench.contract import plan as plans
from bench.contract import plan_kinds, run_files
from bench.contract.plan import Command, Plan
from bench.errors import BenchError, ConfigError

JOIN_S = 900.0
"""How long the lead may take to be there: its image may have to be pulled."""
RETRY_S = 0.5
POLL_S = 0.2


@dataclass(slots=True)
class Node:
    """This node, between two commands."""

    number: int
    folder: Path
    channel: Channel
    plan: Plan
    is_shared: bool
    """Whether the lead sees what is written into the run folder here."""
    sent: file_transfer.Stamps = field(default_factory=dict)
    ranks: Ranks | None = None
    told: dict[int, int] = field(default_factory=dict)
    """The exit codes that the lead knows."""


def node_name() -> str:
    """Return the name of this node, as findings have it."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get(run_files.NODE_VARIABLE) or socket.gethostname()


def join(lead: tuple[str, int], number: int, *, token: str, within_s: float, check: Callable[[], None]) -> Channel:
    """Return a connection with a lead that has proven that it is one, and knows who this node is.

    Raises:
        ConfigError: the lead refuses this node.
        BenchError: there is no lead, or another program listens there.
    """
    until_s, last = time.monotonic() + within_s, "nothing listens there"
    while time.monotonic() < until_s:
        check()
        try:
            connection = socket.create_connection(lead, timeout=5.0)
            return introduce(channels.of_socket(connection), number, token=token)
        except (OSError, LostError) as error:
            last = str(error)
            time.sleep(RETRY_S)
    raise BenchError(
        f"node {number} could not join the lead within {within_s:.0f} s: {last}",
        where="{}:{}".format(*lead),
        fix="see whether node 0 runs, and whether this port of it can be reached from here",
        rule="HST-02",
    )


def introduce(channel: Channel, number: int, *, token: str) -> Channel:
    """Prove that this node knows the token, and see that the lead does."""
    mine, asked = channels.challenge(), channel.next(10.0, "challenge")
    answer = channels.proof(token, asked["text"], f"node {number}")
    channel.send("join", node=number, proof=answer, challenge=mine, name=node_name())
    welcome = channel.next(60.0, "welcome", "refused")
    if welcome["kind"] == "refused":
        fix = f"give every node the same {channels.TOKEN}, its own --node, and the lead of its own run"
        raise ConfigError(f"the lead refuses node {number}: {welcome['what']}", where="--lead", fix=fix, rule="HST-03")
    if not channels.is_proven(welcome.get("proof"), token, mine, "lead"):
        what = "who answers as the lead does not know the token of this run"
        raise ConfigError(what, where="--lead", fix="see what listens there; start the run anew", rule="HST-03")
    return channel


def by_streams(number: int) -> Channel:
    """Return a connection with whoever started this process: its standard streams, which ranks do not inherit."""
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    channel.send("join", node=number, name=node_name())
    return channel


def obey(channel: Channel, number: int, folder: Path, *, check: Callable[[], None]) -> int:
    """Do what the lead says until it says that the run has ended; return the exit code that it gives.

    Raises:
        CutShortError: of `check`; the lead is told.
        NodeLostError: the lead is gone. No rank of this node runs any more.
    """
    channels.beat([channel])
    node: Node | None = None
    try:
        while True:
            check()
            for message in channel.received(POLL_S):
                if message["kind"] == "bye":
                    return int(message["exit_code"])
                if message["kind"] == "plan":
                    node = received(message, channel, number, folder)
                elif node is not None:
                    follow(node, message)
            if node is not None and node.ranks is not None:
                report(node, node.ranks)
    except CutShortError as error:
        with suppress(LostError):
            channel.send("leaving", why=str(error))
        raise
    except LostError as error:
        raise NodeLostError("the lead", error) from None
    finally:
        if node is not None and node.ranks is not None:
            node.ranks.stop()


def received(message: dict[str, Any], channel: Channel, number: int, folder: Path) -> Node:
    """Take the plan; where this node has a run folder of its own, write it there."""
    is_shared = (folder / str(message["marker"])).exists()
    if not is_shared:
        (folder / run_files.RANK_LOGS).mkdir(parents=True, exist_ok=True)
        (folder / run_files.PLAN).write_text(message["text"])
    sent = {} if is_shared else file_transfer.stamps(folder)
    channel.send("ready", is_shared=is_shared)
    return Node(number, folder, channel, plan_kinds.loads(message["text"]), is_shared, sent)


def follow(node: Node, message: dict[str, Any]) -> None:
    """Do one thing that the lead has said."""
    match message["kind"]:
        case "start":
            command = plans.command(node.plan, message["command"])
            assert command is not None
            if not node.is_shared:
                clear(node, command)
            master = (str(message["host"]), int(message["port"]))
            node.told = {}
            environment = processes.environment(node.plan.environment, master)
            node.ranks = Ranks(node.plan, command, node.folder, node=node.number, environment=environment)
        case "stop":
            if node.ranks is not None:
                node.ranks.stop()
                node.ranks = None
            if not node.is_shared:
                for part in file_transfer.parts(node.folder, node.sent):
                    node.channel.send("file", **part)
            node.channel.send("stopped")
        case "drop_caches":
            node.channel.send("answer", value=processes.drop_caches(message["words"], node_name()))
        case "exist":
            node.channel.send("answer", value=[path for path in message["paths"] if Path(path).exists()])


def report(node: Node, ranks: Ranks) -> None:
    """Tell the lead which ranks have ended since it was last told."""
    codes = ranks.exit_codes()
    if codes != node.told:
        node.told = codes
        node.channel.send("ended", codes={str(rank): code for rank, code in codes.items()})


def clear(node: Node, command: Command) -> None:
    """Remove what an earlier attempt left in a folder that is this node's own: the lead has set its own aside."""
    patterns = [run_files.rank_error(command.name, "*"), run_files.rank_output(command.name, "*")]
    trials = plans.trial_commands(node.plan)
    if command in trials:
        patterns += run_files.of_attempt(node.plan.trials[trials.index(command)].index)
    for path in (path for pattern in patterns for path in node.folder.glob(pattern)):
        path.unlink()
        node.sent.pop(path, None)
