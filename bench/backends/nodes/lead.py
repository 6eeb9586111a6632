"""All nodes of a run, as the lead sees them: its own, and those that have joined it."""

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
from bench.errors import BenchError, ConfigError, SubmitError


@contextmanager
def marked(run: Path) -> Iterator[str]:
    """Yield the name of a file by which other nodes see whether this folder is theirs too."""
    marker = run / f".lead-{token_hex(8)}"
    marker.touch()
    try:
        yield marker.name
    finally:
        marker.unlink()


def require_shared(nodes: "Nodes") -> None:
    """Raise ConfigError if the run needs a folder that nodes share with the lead, and they do not.

    Rank 0 writes the log there, and all ranks write checkpoints. Outputs, facts and adapters are sent to the lead.
    """
    others = [member for member in nodes.members if not member.is_shared]
    if rank_0 := next((member for member in others if member.number == 0), None):
        raise ConfigError(
            f"rank 0 writes the log, and {rank_0.name} does not see the run folder of this machine",
            where="LOGDIR",
            fix=f"start the run on {rank_0.name}, name this machine first, or put LOGDIR where both see it",
            rule="HST-09",
        )
    if others and nodes.plan.checkpoint_every_steps is not None:
        names = ", ".join(member.name for member in others)
        raise ConfigError(
            f"all nodes write checkpoints into the run folder, and {names} has another one",
            where="task.training.checkpoint_every_steps",
            fix="put LOGDIR on a file system that every node shares, or set it to null",
            rule="HST-09",
        )


def require_prepared(nodes: "Nodes", check: Callable[[], None] = lambda: None) -> None:
    """Raise ConfigError if a node does not have, at the same path, what another one has prepared."""
    paths = plan_paths.to_prepare(nodes.plan)
    for member, there in zip(nodes.members, nodes.ask("exist", check=check, paths=paths), strict=True):
        if missing := [path for path in paths if path not in there]:
            raise ConfigError(
                f"{missing[0]} was prepared, and {member.name} does not have it",
                where="DATADIR, MODEL",
                fix="copy it to the same path on every host, or use a file system that all of them see",
                rule="HST-10",
            )


POLL_S = 0.1
LEAVES_S = 10.0
"""How long nodes may take to end, once they know that the run has."""
STOPS_S = GRACE_S + 50
"""How long a node may take to end its ranks, and to send what they wrote."""
Check = Callable[[], None]
"""Called while the lead waits; raises what ends the waiting."""


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
    """The nodes of a run: the lead's own, where it runs ranks itself, and those that have joined it.

    `own` is what ranks of the lead's own node find in their environment; None: all nodes are others.
    """

    def __init__(self, plan: Plan, folder: Path, host: str, *, own: Mapping[str, str] | None) -> None:
        self.plan, self._folder, self._host, self._own = plan, folder, host, own
        self.members: list[Member] = []
        self._ranks: Ranks | None = None
        self._beating: list[Channel] = []

    @property
    def names(self) -> list[str]:
        """The names of all nodes, in the order of their ranks."""
        return [*([node_name()] if self._own is not None else []), *(member.name for member in self.members)]

    def join(self, port: int, *, token: str, within_s: float, check: Check) -> None:
        """Wait until every other node has joined, and has proven that it knows the token.

        Raises:
            BenchError: one has not.
        """
        wanted, until_s = set(range(1, self.plan.world.num_nodes)), time.monotonic() + within_s
        with listening((self._host, port)) as listener:
            while missing := wanted - {member.number for member in self.members}:
                check()
                if time.monotonic() > until_s:
                    raise _missing(missing, within_s)
                if select.select([listener], [], [], POLL_S)[0]:
                    channel = channels.of_socket(listener.accept()[0])
                    with suppress(LostError):
                        self._meet(channel, missing, token)
        self.members.sort(key=lambda member: member.number)

    def _meet(self, channel: Channel, missing: set[int], token: str) -> None:
        """Take in a node that proves who it is, and refuse everybody else."""
        mine = channels.challenge()
        channel.send("challenge", text=mine)
        said = channel.next(5.0, "join")
        number, name = said.get("node"), str(said.get("name"))
        if not channels.is_proven(said.get("proof"), token, mine, f"node {number}"):
            print(f"refused: {name!r:.80} does not know the token of this run", flush=True)
            channel.send("refused", what="its token is not that of this run")
        elif number not in missing:
            print(f"refused: {name!r:.80} says that it is node {number}", flush=True)
            channel.send("refused", what=f"the run waits for nodes {sorted(missing)}")
        else:
            channel.send("welcome", proof=channels.proof(token, str(said.get("challenge")), "lead"))
            return self.add(Member(int(number), name, channel))
        channel.close()
        return None

    def add(self, member: Member) -> None:
        """Take in a node that is known for what it is."""
        self.members.append(member)
        self._beating.append(member.channel)
        if len(self._beating) == 1:
            channels.beat(self._beating)

    def send_plan(self, *, check: Check) -> None:
        """Give every node the plan, and learn whether its run folder is the lead's."""
        text = (self._folder / run_files.PLAN).read_text()
        with marked(self._folder) as marker:
            for member in self.members:
                self._tell(member, "plan", text=text, marker=marker)
            for member, answer in self._answers("ready", check=check):
                member.is_shared = bool(answer["is_shared"])

    def start(self, command: Command, port: int) -> None:
        """Start a command's ranks on every node."""
        for member in self.members:
            member.codes = {}
            self._tell(member, "start", command=command.name, host=self._host, port=port)
        if self._own is not None:
            environment = processes.environment(self._own, (self._host, port))
            self._ranks = Ranks(self.plan, command, self._folder, node=0, environment=environment)

    def start_again(self, ranks: Sequence[int]) -> None:
        """Start ranks of the lead's own node anew."""
        assert self._ranks is not None
        self._ranks.start_again(ranks)

    def exit_codes(self) -> dict[int, int]:
        """Return those of the ranks that have ended, of all nodes, after a moment.

        Raises:
            NodeLostError: a node is gone.
        """
        incoming = [member.channel.incoming for member in self.members]
        select.select(incoming, [], [], POLL_S) if incoming else time.sleep(POLL_S)
        for member in self.members:
            for message in self._received(member):
                self._take(member, message)
        codes = self._ranks.exit_codes() if self._ranks is not None else {}
        for member in self.members:
            codes |= member.codes
        return codes

    def stop(self) -> NodeLostError | None:
        """End the ranks of all nodes, and take what nodes with a folder of their own send; return which one is gone."""
        lost = None
        for member in self.members:
            with suppress(LostError):  # which comes up again below
                member.channel.send("stop")
        if self._ranks is not None:
            self._ranks.stop()
        until_s = time.monotonic() + STOPS_S
        for member in self.members:
            try:
                while not self._has_stopped(member):
                    if time.monotonic() > until_s:
                        raise member.lost("its ranks do not end")
            except NodeLostError as error:
                lost = lost or error
        return lost

    def ask(self, kind: str, *, check: Check, **content: Any) -> list[Any]:
        """Return what every other node answers to a question."""
        for member in self.members:
            self._tell(member, kind, **content)
        return [answer["value"] for _, answer in self._answers("answer", check=check)]

    def bye(self, exit_code: int) -> None:
        """Let the other nodes end, with the exit code of the run, and close the connections."""
        for member in self.members:
            with suppress(LostError):
                member.channel.send("bye", exit_code=exit_code)
        until_s = time.monotonic() + LEAVES_S
        for member in self.members:
            with suppress(LostError):  # closed with something unread, a connection would lose what was said last
                while time.monotonic() < until_s:
                    member.channel.received(POLL_S)
            member.channel.close()

    def _has_stopped(self, member: Member) -> bool:
        messages = self._received(member, wait_s=POLL_S)
        for message in messages:
            self._take(member, message)
        return any(message["kind"] == "stopped" for message in messages)

    def _answers(self, kind: str, *, check: Check) -> list[tuple[Member, dict[str, Any]]]:
        """Return one message of this kind of every other node."""
        answers = []
        for member in self.members:
            found: list[dict[str, Any]] = []
            while not found:
                check()
                for message in self._received(member, wait_s=POLL_S):
                    self._take(member, message)
                    found += [message] if message["kind"] == kind else []
            answers.append((member, found[0]))
        return answers

    def _take(self, member: Member, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "ended":
                member.codes = {int(rank): int(code) for rank, code in message["codes"].items()}
            case "file":
                file_transfer.take(self._folder, dict(message))
            case "leaving":
                raise member.lost(message["why"])

    def _received(self, member: Member, wait_s: float = 0.0) -> Sequence[dict[str, Any]]:
        try:
            return member.channel.received(wait_s)
        except LostError as error:
            raise member.lost(error) from None

    def _tell(self, member: Member, kind: str, **content: Any) -> None:
        try:
            member.channel.send(kind, **content)
        except LostError as error:
            raise member.lost(error) from None

    def drop_caches(self, words: Sequence[str], *, check: Check) -> list[str]:
        """Have every node drop its page cache; return what each says of it."""
        others = self.ask("drop_caches", check=check, words=list(words))
        return [*([processes.drop_caches(words, node_name())] if self._own is not None else []), *others]


def listening(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at the lead's address; on all of this host's where that name is not one of them.

    Raises:
        ConfigError: the port is taken.
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
        raise ConfigError(what, where="--lead", fix="choose a free port", rule="NCC-05") from error


def _missing(missing: set[int], within_s: float) -> BenchError:
    nodes = ", ".join(map(str, sorted(missing)))
    return BenchError(
        f"node {nodes} has not joined within {within_s:.0f} s",
        where="--lead",
        fix="see whether it was started, what it says, and whether it can reach node 0's port",
        rule="HST-02",
    )


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
