"""The lead node of a run: it controls its own ranks and the nodes that have joined it."""

import contextlib
import json
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from bench.backends.nodes import channel as channels
from bench.backends.nodes import file_transfer, processes
from bench.backends.nodes.channel import Channel, LostError
from bench.backends.nodes.interruption import NodeLostError
from bench.backends.nodes.member import node_name
from bench.backends.nodes.processes import GRACE_S, Ranks
from bench.contract import groups, plan_paths, run_files
from bench.contract.plan import Command, Plan
from bench.errors import BenchError, ConfigError, SubmitError, exit_code_of


@contextmanager
def marked(run: Path) -> Iterator[str]:
    """Create a marker file while the block runs, and yield its name; nodes that share the folder can see the file."""
    marker = run / f".lead-{token_hex(8)}"
    marker.touch()
    try:
        yield marker.name
    finally:
        marker.unlink()


def require_shared(nodes: "Nodes") -> None:
    """Raise ConfigError if the run needs a shared run folder and a node does not share it.

    Rank 0 writes the log there, and all ranks write checkpoints. Outputs, facts and adapters are sent to the lead
    node, so they need no shared folder.
    """
    others = [member for member in nodes.members if not member.is_shared]
    if rank_0 := next((member for member in others if member.number == 0), None):
        raise ConfigError(
            f"rank 0 cannot write the log, because the host of rank 0, {rank_0.name}, cannot access the run folder",
            where="LOGDIR",
            fix=f"start the run on {rank_0.name}, or put LOGDIR on a file system that all nodes share",
            rule="HST-09",
        )
    if others and nodes.plan.checkpoint_every_steps is not None:
        hosts = ", ".join(member.name for member in others)
        raise ConfigError(
            f"all nodes write checkpoints into the run folder, but {hosts} cannot access this folder",
            where="task.training.checkpoint_every_steps",
            fix="put LOGDIR on a file system that all nodes share, or set task.training.checkpoint_every_steps=null",
            rule="HST-09",
        )


def require_prepared(nodes: "Nodes", check: Callable[[], None] = lambda: None) -> None:
    """Raise ConfigError if prepared data or weights do not exist at the same path on every node."""
    paths = plan_paths.to_prepare(nodes.plan)
    for member, existing in zip(nodes.members, nodes.query("exist", check=check, paths=paths), strict=True):
        if missing := [path for path in paths if path not in existing]:
            raise ConfigError(
                f"{missing[0]} was prepared, but does not exist on the host {member.name}",
                where="DATADIR, MODEL",
                fix="copy the files to the same path on every host, or put DATADIR and MODEL on a shared file system",
                rule="HST-10",
            )


POLL_S = 0.1
SHUTDOWN_TIMEOUT_S = 10.0
"""How long nodes may take to exit after the run has ended."""
STOP_TIMEOUT_S = GRACE_S + 50
"""How long a node may take to stop its ranks and to send their files."""
Check = Callable[[], None]
"""Called while the lead waits; it may raise to interrupt the wait."""


@dataclass(slots=True)
class Member:
    """Another node."""

    number: int
    name: str
    channel: Channel
    is_shared: bool = True
    codes: dict[int, int] = field(default_factory=dict)

    def lost(self, why: object) -> NodeLostError:
        return NodeLostError(f"node {self.number} ({self.name})", why)


class Nodes:
    """The nodes of a run: the lead node, if it runs ranks itself, and the nodes that have joined it.

    `own` is the environment of the ranks on the lead node; None if the lead runs no ranks.
    """

    def __init__(self, plan: Plan, folder: Path, host: str, *, own: Mapping[str, str] | None) -> None:
        self.plan, self._folder, self._host, self._own = plan, folder, host, own
        self.members: list[Member] = []
        self._ranks: Ranks | None = None
        self._beating: list[Channel] = []

    @property
    def names(self) -> list[str]:
        """The names of all nodes in rank order."""
        return [*([node_name()] if self._own is not None else []), *(member.name for member in self.members)]

    def join(self, port: int, *, token: str, within_s: float, check: Check) -> None:
        """Wait until all other nodes have joined and authenticated with the token.

        Raises:
            BenchError: a node has not joined in time.
        """
        expected, until_s = set(range(1, self.plan.world.num_nodes)), time.monotonic() + within_s
        with listening((self._host, port)) as listener:
            while missing := expected - {member.number for member in self.members}:
                check()
                if time.monotonic() > until_s:
                    raise _missing(missing, within_s)
                if select.select([listener], [], [], POLL_S)[0]:
                    channel = channels.from_socket(listener.accept()[0])
                    with suppress(LostError):
                        self._authenticate(channel, missing, token)
        self.members.sort(key=lambda member: member.number)

    def _authenticate(self, channel: Channel, missing: set[int], token: str) -> None:
        """Add a node that knows the token and has one of the missing numbers; refuse any other connection."""
        mine = channels.challenge()
        channel.send("challenge", text=mine)
        request = channel.next(5.0, "join")
        number, name = request.get("node"), str(request.get("name"))
        if not channels.is_valid_proof(request.get("proof"), token, mine, f"node {number}"):
            print(f"refused {name!r:.80}: this process does not know the token of this run", flush=True)
            channel.send("refused", what="its token differs from the token of this run")
        elif number not in missing:
            print(f"refused {name!r:.80}: it claims to be node {number}, which is not missing", flush=True)
            channel.send("refused", what=f"the run only waits for nodes {sorted(missing)}")
        else:
            channel.send("welcome", proof=channels.proof(token, str(request.get("challenge")), "lead"))
            return self.add(Member(int(number), name, channel))
        channel.close()
        return None

    def add(self, member: Member) -> None:
        """Add an authenticated node and send it heartbeats."""
        self.members.append(member)
        self._beating.append(member.channel)
        if len(self._beating) == 1:
            channels.beat(self._beating)

    def send_plan(self, *, check: Check) -> None:
        """Send the plan to every node and record whether the node shares the lead's run folder."""
        text = (self._folder / run_files.PLAN).read_text()
        with marked(self._folder) as marker:
            for member in self.members:
                self._send(member, "plan", text=text, marker=marker)
            for member, answer in self._answers("ready", check=check):
                member.is_shared = bool(answer["is_shared"])

    def start(self, command: Command, port: int, attempt: str | None = None) -> None:
        """Start a command's ranks on every node. `attempt` is the nonce of the attempt at a trial."""
        for member in self.members:
            member.codes = {}
            self._send(member, "start", command=command.name, host=self._host, port=port, attempt=attempt)
        if self._own is not None:
            environment = processes.environment(self._own, (self._host, port), attempt)
            self._ranks = Ranks(self.plan, command, self._folder, node=0, environment=environment)

    def restart(self, ranks: Sequence[int]) -> None:
        """Restart ranks of the lead node."""
        assert self._ranks is not None
        self._ranks.restart(ranks)

    def exit_codes(self) -> dict[int, int]:
        """Wait a moment, and return the exit codes of all ranks that have ended, by rank.

        Raises:
            NodeLostError: a node is lost.
        """
        incoming = [member.channel.incoming for member in self.members]
        select.select(incoming, [], [], POLL_S) if incoming else time.sleep(POLL_S)
        for member in self.members:
            for message in self._received(member):
                self._handle(member, message)
        codes = self._ranks.exit_codes() if self._ranks is not None else {}
        for member in self.members:
            codes |= member.codes
        return codes

    def stop(self) -> NodeLostError | None:
        """Stop the ranks on all nodes and receive the files of nodes without a shared folder; return a lost node."""
        lost = None
        for member in self.members:
            with suppress(LostError):  # raised again below
                member.channel.send("stop")
        if self._ranks is not None:
            self._ranks.stop()
        until_s = time.monotonic() + STOP_TIMEOUT_S
        for member in self.members:
            try:
                while not self._has_stopped(member):
                    if time.monotonic() > until_s:
                        raise member.lost("the ranks of this node do not end")
            except NodeLostError as error:
                lost = lost or error
        return lost

    def query(self, kind: str, *, check: Check, **content: Any) -> list[Any]:
        """Send a query to every other node and return the answers."""
        for member in self.members:
            self._send(member, kind, **content)
        return [answer["value"] for _, answer in self._answers("answer", check=check)]

    def shutdown(self, exit_code: int) -> None:
        """Tell the other nodes to exit with the run's exit code, and close the connections."""
        for member in self.members:
            with suppress(LostError):
                member.channel.send("shutdown", exit_code=exit_code)
        until_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for member in self.members:
            with suppress(LostError):  # closing a connection with unread data would discard the last messages sent
                while time.monotonic() < until_s:
                    member.channel.received(POLL_S)
            member.channel.close()

    def _has_stopped(self, member: Member) -> bool:
        messages = self._received(member, wait_s=POLL_S)
        for message in messages:
            self._handle(member, message)
        return any(message["kind"] == "stopped" for message in messages)

    def _answers(self, kind: str, *, check: Check) -> list[tuple[Member, dict[str, Any]]]:
        """Wait for one message of this kind from every other node."""
        answers = []
        for member in self.members:
            matches: list[dict[str, Any]] = []
            while not matches:
                check()
                for message in self._received(member, wait_s=POLL_S):
                    self._handle(member, message)
                    matches += [message] if message["kind"] == kind else []
            answers.append((member, matches[0]))
        return answers

    def _handle(self, member: Member, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "ended":
                member.codes = {int(rank): int(code) for rank, code in message["codes"].items()}
            case "file":
                file_transfer.write(self._folder, dict(message))
            case "leaving":
                raise member.lost(message["why"])

    def _received(self, member: Member, wait_s: float = 0.0) -> Sequence[dict[str, Any]]:
        try:
            return member.channel.received(wait_s)
        except LostError as error:
            raise member.lost(error) from None

    def _send(self, member: Member, kind: str, **content: Any) -> None:
        try:
            member.channel.send(kind, **content)
        except LostError as error:
            raise member.lost(error) from None

    def drop_caches(self, words: Sequence[str], *, check: Check) -> list[str]:
        """Drop the page cache on every node; return each node's report."""
        others = self.query("drop_caches", check=check, words=list(words))
        return [*([processes.drop_caches(words, node_name())] if self._own is not None else []), *others]


def listening(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at the lead's address, or on all interfaces if this host does not have it.

    Raises:
        ConfigError: the port is in use.
    """
    try:
        try:
            return socket.create_server(address)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.strerror is None or "assign" in error.strerror:
                return socket.create_server(("", address[1]))
            raise
    except OSError as error:
        what = f"node 0 cannot listen at {address[0]}:{address[1]}: {error.strerror}"
        raise ConfigError(
            what, where="--lead", fix="set --lead to an address with a free port", rule="NCC-05"
        ) from error


def _missing(missing: set[int], within_s: float) -> BenchError:
    nodes = ", ".join(map(str, sorted(missing)))
    return BenchError(
        f"node {nodes} has not joined within {within_s:.0f} s",
        where="--lead",
        fix=f"on node {nodes}: check that runstop was started, read its output, and test the connection to the port of "
        "node 0",
        rule="HST-02",
    )


SETTLE_S = 2.0
"""How long to wait, once a rank has failed, for the news that a rank of another node was killed before."""
TIME_IS_UP = 124
"""Exit code of a command that exceeded its walltime; the same as that of timeout(1)."""


class Running:
    """A running command."""

    def __init__(self, nodes: Nodes, command: Command, folder: Path) -> None:
        self._nodes, self._command, self._folder = nodes, command, folder
        self._until_s = time.monotonic() + 60 * command.limit_min if command.limit_min else None
        self._exit_codes: dict[int, int] = {}
        self._needed = groups.needed_ranks(nodes.plan, command)
        self._restarts = groups.restarts(nodes.plan, command)
        self.lost: NodeLostError | None = None
        """Set when a node is lost; ranks on other nodes fail as a consequence."""
        self._is_late = False
        self._failed_s: float | None = None

    def are_running(self) -> bool:
        """Wait a moment, and return whether the command still runs; False once a needed rank has failed.

        A rank whose peer was killed fails, too. If that peer is on another node, its exit code may arrive later.
        """
        try:
            self._exit_codes = self._nodes.exit_codes()
        except NodeLostError as error:
            self.lost = error
            return False
        codes = self._needed_codes()
        are_left = len(codes) < len(self._needed)
        self._is_late = are_left and self._until_s is not None and time.monotonic() > self._until_s
        if not are_left or self._is_late:
            return False
        if any(codes.values()):
            self._failed_s = self._failed_s or time.monotonic()
            may_be_a_consequence = len(self._nodes.names) > 1 and max(codes.values()) <= 128
            return may_be_a_consequence and time.monotonic() < self._failed_s + SETTLE_S
        self._restart_failed_group()
        return True

    def _restart_failed_group(self) -> None:
        """Restart a group with a failed rank, if it has restarts left."""
        for ranks in self._restarts:
            if any(self._exit_codes.get(rank) for rank in ranks):
                self._restarts.remove(ranks)
                self._nodes.restart(ranks)
                return

    def stop(self) -> None:
        """Stop all running ranks and wait until they have ended. Their exit codes are not evaluated any more."""
        codes = self._needed_codes()
        has_failed = self._is_late or any(codes.values())
        lost = self._nodes.stop()
        is_done = len(codes) == len(self._needed) and not has_failed
        self.lost = self.lost or (None if is_done else lost)

    def _needed_codes(self) -> dict[int, int]:
        return {rank: code for rank, code in self._exit_codes.items() if rank in self._needed}

    @property
    def exit_code(self) -> int:
        """The exit code of the command: the highest exit code of all ranks, as srun returns it."""
        return TIME_IS_UP if self._is_late else max(self._needed_codes().values(), default=0)

    def killed(self) -> list[int]:
        """Return the ranks that got SIGKILL before this process stopped any: from a user, or from the OOM killer."""
        return [rank for rank, code in sorted(self._needed_codes().items()) if code == exit_code_of(-signal.SIGKILL)]

    def check(self) -> None:
        """Raise the error of a failed command: a lost node, the signal that killed a rank, or a rank's own error.

        Raises:
            NodeLostError: a node is lost.
            SubmitError: a rank failed; it carries the exit code of the rank's error.
        """
        codes, name, logs = self._needed_codes(), self._command.name, self._folder / run_files.RANK_LOGS
        if self.lost is not None:
            raise self.lost
        if self._is_late:
            what, fix = (
                f"{name} took longer than its walltime",
                "raise walltime (minutes per trial), or set walltime=null to remove the limit",
            )
            raise SubmitError(what, where="walltime", fix=fix, rule="SLU-07")
        if len(codes) == len(self._needed) and not any(codes.values()):
            return
        if ended := {rank: signal_name(code) for rank, code in codes.items() if code > 128}:
            killed_ranks = ", ".join(f"rank {rank} got {signal}" for rank, signal in sorted(ended.items()))
            raise SubmitError(
                f"{killed_ranks} during {name}",
                where=str(self._folder / run_files.rank_output(name, min(ended))),
                fix="find out whether the OOM killer (see dmesg), a time limit, or a user killed the rank",
                rule="RUN-02",
            )
        if (first := first_error(self._folder, self._command)) is not None:
            raise first
        what = f"{name} ended without a result; exit codes by rank: {codes}"
        raise SubmitError(what, where=str(logs), fix="read the *_rank_*.out files in this folder")


@contextlib.contextmanager
def started(
    nodes: Nodes, command: Command, folder: Path, *, port: int, attempt: str | None = None
) -> Iterator[Running]:
    """Start a command's ranks; all of them are stopped when the block ends."""
    for old in folder.glob(run_files.rank_error(command.name, "*")):
        old.unlink()
    running = Running(nodes, command, folder)
    try:
        nodes.start(command, port, attempt)
        yield running
    finally:
        running.stop()


def signal_name(exit_code: int) -> str:
    """Return the name of the signal of an exit code above 128, for example SIGKILL."""
    with contextlib.suppress(ValueError):
        return signal.Signals(exit_code - 128).name
    return f"signal {exit_code - 128}"


def first_error(folder: Path, command: Command) -> BenchError | None:
    """Return the error of the rank that failed first; later errors are mostly consequences."""
    reports = []
    for path in folder.glob(run_files.rank_error(command.name, "*")):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    if not reports:
        return None
    first = min(reports, key=lambda report: report["time"])
    error = SubmitError(first["what"], where=first["where"], fix=first["fix"], rule=first.get("rule"))
    error.exit_code = first["exit_code"]
    return error
