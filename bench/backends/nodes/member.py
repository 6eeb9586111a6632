"""A member node: it starts the ranks of each command on request of the lead node, and reports their exit codes."""

import importlib.util
import os
import socket
import sys
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
"""How long to wait for the lead node: its image may have to be pulled."""
RETRY_S = 0.5
POLL_S = 0.2


@dataclass(slots=True)
class Node:
    """The state of this node."""

    number: int
    folder: Path
    channel: Channel
    plan: Plan
    is_shared: bool
    """Whether the run folder is shared with the lead node."""
    sent: file_transfer.Stamps = field(default_factory=dict)
    ranks: Ranks | None = None
    reported: dict[int, int] = field(default_factory=dict)
    """The exit codes that were sent to the lead node."""


def node_name() -> str:
    """Return the name of this node that messages show."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get(run_files.NODE_VARIABLE) or socket.gethostname()


def join(lead: tuple[str, int], number: int, *, token: str, within_s: float, check: Callable[[], None]) -> Channel:
    """Connect to the lead node and authenticate both sides.

    Raises:
        ConfigError: the lead refuses this node, or does not know the token.
        BenchError: the lead does not answer, or another program uses its port.
    """
    until_s, last = time.monotonic() + within_s, "no process listens at this address"
    while time.monotonic() < until_s:
        check()
        try:
            connection = socket.create_connection(lead, timeout=5.0)
            return authenticate(channels.from_socket(connection), number, token=token)
        except (OSError, LostError) as error:
            last = str(error)
            time.sleep(RETRY_S)
    raise BenchError(
        f"node {number} could not join the lead node within {within_s:.0f} s: {last}",
        where="{}:{}".format(*lead),
        fix="check that the lead node (node 0) runs, and that this machine can connect to the port of the lead node",
        rule="HST-02",
    )


def authenticate(channel: Channel, number: int, *, token: str) -> Channel:
    """Prove to the lead that this node knows the token, and check that the lead knows it."""
    mine, theirs = channels.challenge(), channel.next(10.0, "challenge")
    answer = channels.proof(token, theirs["text"], f"node {number}")
    channel.send("join", node=number, proof=answer, challenge=mine, name=node_name())
    welcome = channel.next(60.0, "welcome", "refused")
    if welcome["kind"] == "refused":
        fix = f"set the same {channels.TOKEN} and --lead on all nodes of the run, and a different --node on every node"
        what = f"the lead node refuses node {number}: {welcome['what']}"
        raise ConfigError(what, where="--lead", fix=fix, rule="HST-03")
    if not channels.is_valid_proof(welcome.get("proof"), token, mine, "lead"):
        what = "another program listens at the address of --lead: it does not know the token of this run"
        fix = "end the program that listens at the address of --lead, then start the run again"
        raise ConfigError(what, where="--lead", fix=fix, rule="HST-03")
    return channel


def probe() -> None:
    """Print the address of this host's own name, and exit with 1 if a package named in sys.argv is not installed.

    Packages are not imported; a missing parent package raises ModuleNotFoundError.
    """
    with suppress(OSError):
        print(socket.gethostbyname(socket.gethostname()))
    if missing := [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]:
        sys.exit(f"No module named {', '.join(missing)}")


def over_stdio(number: int) -> Channel:
    """Return a connection to the parent process over standard input and output, which ranks do not inherit."""
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    channel.send("join", node=number, name=node_name())
    return channel


def serve(channel: Channel, number: int, folder: Path, *, check: Callable[[], None]) -> int:
    """Carry out the lead's requests until the run has ended; return the run's exit code.

    Raises:
        CutShortError: raised by `check`; the lead is notified.
        NodeLostError: the lead is lost. All ranks of this node are stopped.
    """
    channels.beat([channel])
    node: Node | None = None
    try:
        while True:
            check()
            for message in channel.received(POLL_S):
                if message["kind"] == "shutdown":
                    return int(message["exit_code"])
                if message["kind"] == "plan":
                    node = receive_plan(message, channel, number, folder)
                elif node is not None:
                    handle(node, message)
            if node is not None and node.ranks is not None:
                report(node, node.ranks)
    except CutShortError as error:
        with suppress(LostError):
            channel.send("leaving", why=str(error))
        raise
    except LostError as error:
        raise NodeLostError("the lead node", error) from None
    finally:
        if node is not None and node.ranks is not None:
            node.ranks.stop()


def receive_plan(message: dict[str, Any], channel: Channel, number: int, folder: Path) -> Node:
    """Read the plan; if the run folder is not shared, write the plan into this node's own folder."""
    is_shared = (folder / str(message["marker"])).exists()
    if not is_shared:
        (folder / run_files.RANK_LOGS).mkdir(parents=True, exist_ok=True)
        (folder / run_files.PLAN).write_text(message["text"])
    sent = {} if is_shared else file_transfer.stamps(folder)
    channel.send("ready", is_shared=is_shared)
    return Node(number, folder, channel, plan_kinds.loads(message["text"]), is_shared, sent)


def handle(node: Node, message: dict[str, Any]) -> None:
    """Carry out one request of the lead."""
    match message["kind"]:
        case "start":
            command = plans.command(node.plan, message["command"])
            assert command is not None
            if not node.is_shared:
                clear(node, command)
            master = (str(message["host"]), int(message["port"]))
            node.reported = {}
            environment = processes.environment(node.plan.environment, master, message.get("attempt"))
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
    """Send the lead the exit codes if more ranks have ended."""
    codes = ranks.exit_codes()
    if codes != node.reported:
        node.reported = codes
        node.channel.send("ended", codes={str(rank): code for rank, code in codes.items()})


def clear(node: Node, command: Command) -> None:
    """Remove an earlier attempt's files from this node's own folder; the lead moves its own files itself."""
    patterns = [run_files.rank_error(command.name, "*"), run_files.rank_output(command.name, "*")]
    trials = plans.trial_commands(node.plan)
    if command in trials:
        patterns += run_files.of_attempt(node.plan.trials[trials.index(command)].index)
    for path in (path for pattern in patterns for path in node.folder.glob(pattern)):
        path.unlink()
        node.sent.pop(path, None)
