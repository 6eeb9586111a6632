"""The lead node of a run and its member nodes, in threads of this process; the ranks are small shell scripts."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from bench.backends.local import free_port
from bench.backends.nodes import channel as channels
from bench.backends.nodes import lead as every_node
from bench.backends.nodes import member, processes
from bench.backends.nodes.interruption import STOPPED, CutShortError, Interruption, NodeLostError
from bench.backends.nodes.lead import Member, Nodes
from bench.contract import plan as plans
from bench.contract import plan_kinds, run_files
from bench.contract.plan import Command, Plan
from bench.errors import BenchError, ConfigError
from bench.planning import compose

PRINT = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OF_PLAN${RUNSTOP_TOKEN-}"; exit $((RANK % 4))'
HERE = "127.0.0.1"


def never_interrupt() -> None:
    """Never interrupt the wait."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll more often than on a real cluster."""
    for module in (every_node, member, processes):
        monkeypatch.setattr(module, "POLL_S", 0.005)
    monkeypatch.setattr(member, "RETRY_S", 0.005)
    monkeypatch.setattr(channels, "BEAT_S", 0.01)
    monkeypatch.setattr(every_node, "STOP_TIMEOUT_S", 5.0)
    monkeypatch.setattr(every_node, "SHUTDOWN_TIMEOUT_S", 2.0)
    monkeypatch.setattr(member, "node_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(every_node, "node_name", lambda: "rig0")


class Cluster:
    """A lead with two ranks; node 1 is a thread that shares the lead's folder, node 2 a thread with another folder."""

    def __init__(self, folder: Path) -> None:
        words = ["task=lora_tiny", "cluster=hosts", "cluster.device=cpu", "cluster.gpu=null", "model.weights=random"]
        plan = compose.compose([*words, "cluster.ranks_per_node=2"])
        world = replace(plan.world, num_nodes=3, num_ranks=6)
        commands = [replace(command, argv=["sh", "-c", PRINT]) for command in plan.commands]
        self.plan: Plan = replace(plan, world=world, commands=commands, environment={"OF_PLAN": "set"})
        self.run, self.own, self.port = folder / "run", folder / "deep/own", free_port()
        self.run.mkdir()
        (self.run / run_files.PLAN).write_text(plan_kinds.dumps(self.plan))
        self.nodes = Nodes(self.plan, self.run, HERE, own=self.plan.environment)
        self.ends: dict[int, Future[int]] = {}
        self.endings = {1: Interruption(), 2: Interruption()}

    def starts(self, number: int) -> None:
        """Start a node in a thread with its name; it joins the lead and serves it."""
        self.ends[number] = end = Future()
        threading.Thread(target=self._serve, args=(number, end), name=f"rig{number}", daemon=True).start()

    def _serve(self, number: int, end: "Future[int]") -> None:
        check, channel = self.endings[number].check, None
        try:
            channel = member.join((HERE, self.port), number, token="ours", within_s=5.0, check=check)
            end.set_result(member.serve(channel, number, self.own if number == 2 else self.run, check=check))
        except BaseException as error:  # noqa: BLE001 - raised where the future is read
            end.set_exception(error)
        finally:
            if channel is not None:
                channel.close()

    def joins(self) -> None:
        """Wait until both nodes have joined, node 2 first."""

        def check() -> None:
            if self.nodes.members and 1 not in self.ends:
                self.starts(1)

        self.starts(2)
        self.nodes.join(self.port, token="ours", within_s=5.0, check=check)
        self.nodes.send_plan(check=never_interrupt)

    def command(self, script: str | None = None) -> Command:
        """Return the trial's command, with a script in place of its argv if given."""
        (command,) = plans.trial_commands(self.plan)
        return command if script is None else replace(command, argv=["sh", "-c", script])

    def outputs(self, folder: Path) -> dict[int, str]:
        paths = {rank: folder / run_files.rank_output("trial 0", rank) for rank in range(7)}
        return {rank: path.read_text() for rank, path in paths.items() if path.exists()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    nodes_under_test = Cluster(tmp_path)
    yield nodes_under_test
    nodes_under_test.nodes.shutdown(1)
    nodes_under_test.nodes.members.clear()
    nodes_under_test.nodes.stop()


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s


@pytest.mark.long
def test_a_command_runs_on_every_node_and_files_of_unshared_folders_are_sent_to_the_lead(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.joins()
    nodes, trial = cluster.nodes, cluster.command()
    assert nodes.names == ["rig0", "rig1", "rig2"] and [each.number for each in nodes.members] == [1, 2]
    assert [each.is_shared for each in nodes.members] == [True, False]
    text = (cluster.run / run_files.PLAN).read_text()
    assert (cluster.own / run_files.PLAN).read_text() == text and not list(cluster.run.glob(".lead*"))
    nodes.send_plan(check=never_interrupt)  # as in a second attempt, with existing folders
    stale = [run_files.rank_error("trial 0", 5), "result_0.txt", f"{run_files.RANK_LOGS}/trial_0.caches"]
    for name in (*stale, run_files.rank_error("node facts", 5)):
        (cluster.own / name).write_text("of an earlier attempt")
    codes = {rank: rank % 4 for rank in range(6)}
    for times in (1, 2):
        nodes.start(trial, 4321)
        assert not any(each.codes for each in nodes.members), "exit codes of the previous start are cleared"
        until(lambda: len(nodes.exit_codes()) == 6)
        assert nodes.exit_codes() == codes and nodes.stop() is None
        printed = {rank: f"{rank} {rank % 2} 6 {HERE} 4321 set\n" for rank in range(6)}
        own = {rank: printed[rank] for rank in (4, 5)}
        assert cluster.outputs(cluster.own) == own, "an earlier attempt's files are removed in an unshared folder"
        assert cluster.outputs(cluster.run) == {rank: printed[rank] * times for rank in range(4)} | own
    assert not any((cluster.own / name).exists() for name in stale)
    left = cluster.own / run_files.rank_error("node facts", 5)
    assert left.exists() and (cluster.run / run_files.rank_error("node facts", 5)).exists()
    here = [str(cluster.own), str(cluster.run / "absent"), "/"]
    assert nodes.query("exist", check=never_interrupt, paths=here) == [[here[0], "/"]] * 2
    nodes.shutdown(3)
    assert [cluster.ends[number].result(5) for number in (1, 2)] == [3, 3]
    assert all(each.channel.is_closed for each in nodes.members) and not capsys.readouterr().out


@pytest.mark.long
def test_running_ranks_are_stopped_on_every_node(cluster: Cluster, tmp_path: Path) -> None:
    """A cancelled node notifies the lead and stops its ranks; it also stops them when the lead is lost."""
    pids = tmp_path / "pids"
    waits = f"echo $$ >>{pids}; exec sleep 60"
    commands = [replace(command, argv=["sh", "-c", waits]) for command in cluster.plan.commands]
    cluster.plan = cluster.nodes.plan = replace(cluster.plan, commands=commands)
    (cluster.run / run_files.PLAN).write_text(plan_kinds.dumps(cluster.plan))
    cluster.joins()

    def started() -> list[int]:
        return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []

    cluster.nodes.start(cluster.command(), 1)
    until(lambda: len(started()) == 6)
    assert cluster.nodes.exit_codes() == {}
    cluster.endings[1].why = STOPPED
    with pytest.raises(NodeLostError, match=r"^HST-01: node 1 \(rig1\) was lost: SLU-08: the run was cancelled, or"):
        until(lambda: bool(cluster.nodes.exit_codes()))
    with pytest.raises(CutShortError, match="SLU-08: the run was cancelled"):
        cluster.ends[1].result(5)
    lost = cluster.nodes.stop()
    assert lost is not None and lost.what.startswith("node 1 (rig1) was lost: ") and lost.where == "node 1 (rig1)"
    assert not any(Path(f"/proc/{pid}").exists() for pid in started())
    pids.unlink()
    del cluster.nodes.members[0]
    assert cluster.nodes.exit_codes() == {}, "no rank has ended by itself"
    cluster.nodes.start(cluster.command(), 1)
    until(lambda: len(started()) == 4)
    cluster.nodes.members.pop().channel.close()
    with pytest.raises(NodeLostError, match="HST-01: the lead node was lost: the connection was closed"):
        cluster.ends[2].result(5)
    assert sum(Path(f"/proc/{pid}").exists() for pid in started()) == 2, "the lead's ranks were not stopped"


def test_unexpected_nodes_are_refused_and_the_lead_keeps_waiting(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    lead = (HERE, cluster.port)
    refused: list[str] = []

    def unexpected_nodes() -> None:
        socket.create_connection(lead).close()
        for number, token in ((1, "theirs"), (3, "ours"), (0, "ours")):
            with pytest.raises(ConfigError) as error:
                member.join(lead, number, token=token, within_s=5.0, check=never_interrupt)
            refused.append(f"{error.value.rule} {error.value.what}")
        cluster.starts(2)
        cluster.starts(1)

    def check() -> None:
        if not refused:
            refused.append("")
            threading.Thread(target=unexpected_nodes, name="x" * 90, daemon=True).start()

    cluster.nodes.join(cluster.port, token="ours", within_s=5.0, check=check)
    assert refused[1:] == [
        "HST-03 the lead node refuses node 1: its token differs from the token of this run",
        "HST-03 the lead node refuses node 3: the run only waits for nodes [1, 2]",
        "HST-03 the lead node refuses node 0: the run only waits for nodes [1, 2]",
    ]
    name = "'" + "x" * 79
    assert capsys.readouterr().out.splitlines() == [
        f"refused {name}: this process does not know the token of this run",
        f"refused {name}: it claims to be node 3, which is not missing",
        f"refused {name}: it claims to be node 0, which is not missing",
    ]
    with pytest.raises(ConfigError, match=rf"NCC-05: node 0 cannot listen at {HERE}:{cluster.port}: Address already"):
        taken = every_node.listening(lead)
        with taken:
            every_node.listening(lead)


def test_waiting_for_a_node_or_the_lead_has_a_timeout(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lead, checked = (HERE, cluster.port), iter(range(3))

    def check() -> None:
        if next(checked, None) is None:
            raise CutShortError("cancelled")

    with pytest.raises(CutShortError):
        cluster.nodes.join(cluster.port, token="ours", within_s=60.0, check=check)
    checked = iter(range(3))
    with pytest.raises(CutShortError):
        member.join(lead, 1, token="ours", within_s=60.0, check=check)
    message = r"HST-02: node 1, 2 has not joined within 0 s\n  where: --lead\n  fix:   on node 1, 2: check that"
    with pytest.raises(BenchError, match=message):
        cluster.nodes.join(cluster.port, token="ours", within_s=0.0, check=never_interrupt)
    with pytest.raises(BenchError, match="within 0 s: no process listens at this address"):
        member.join(lead, 1, token="ours", within_s=0.0, check=never_interrupt)
    times_s = iter((0.0, 49.9, 50.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times_s))
    message = rf"HST-02: node 1 could not join .* within 50 s: \[Errno 111\] .* refused\n  where: {HERE}:{cluster.port}"
    with pytest.raises(BenchError, match=message):
        member.join(lead, 1, token="ours", within_s=50.0, check=never_interrupt)
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["192.0.2.1", "no such host"])
def test_a_lead_listens_on_all_interfaces_if_it_does_not_have_its_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, or behind a router: a documentation address (RFC 5737), and an unknown name."""
    real, port = socket.create_server, free_port()

    def create(address: tuple[str, int]) -> socket.socket:
        if address[0] == "no such host":
            raise socket.gaierror(-2, "Name or service not known")
        return real(address)

    monkeypatch.setattr(socket, "create_server", create)
    with every_node.listening((name, port)) as listener:
        assert listener.getsockname() == ("0.0.0.0", port)


def test_a_silent_node_or_one_that_does_not_stop_is_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_node, "STOP_TIMEOUT_S", 0.02)
    ours, theirs = socket.socketpair()
    cluster.nodes.add(Member(1, "rig1", channels.from_socket(ours)))
    (rig1,) = cluster.nodes.members
    with theirs:
        lost = cluster.nodes.stop()
        assert lost is not None and lost.what == "node 1 (rig1) was lost: the ranks of this node do not end"
        theirs.sendall(b'{"kind": "ended", "codes": {"2": 5}}\n{"kind": "stopped"}\n')
        assert cluster.nodes.stop() is None and rig1.codes == {2: 5}
    with pytest.raises(NodeLostError, match=r"node 1 \(rig1\) was lost: "):
        until(lambda: bool(cluster.nodes.query("exist", check=never_interrupt, paths=[])))
    with pytest.raises(NodeLostError, match=r"node 1 \(rig1\) was lost: Broken pipe"):
        cluster.nodes.start(cluster.command(), 1)
    lost = cluster.nodes.stop()
    assert lost is not None and lost.what == "node 1 (rig1) was lost: the connection was closed"


def test_requests_before_the_plan_are_ignored(cluster: Cluster) -> None:
    ours, theirs = socket.socketpair()
    lead = channels.from_socket(theirs)
    lead.send("start", command="trial 0", host=HERE, port=1)
    lead.send("shutdown", exit_code=7)
    channel = channels.from_socket(ours)
    assert member.serve(channel, 1, cluster.run, check=never_interrupt) == 7
    for each in (channel, lead):
        each.close()


def test_the_caches_of_every_node_are_dropped_after_a_sync(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    for name in ("sync", "drop"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" | tee -a {done}\n[ "$1" != not ]\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cluster.joins()
    caches = cluster.nodes.drop_caches(["drop", "3"], check=never_interrupt)
    assert caches == ["rig0 cleared", "rig1 cleared", "rig2 cleared"]
    assert sorted(done.read_text().splitlines()) == ["drop 3"] * 3 + ["sync"] * 3
    done.unlink()
    assert processes.drop_caches(["drop"], "a") == "a cleared" and done.read_text() == "sync\ndrop\n"
    assert processes.drop_caches(["drop", "not"], "a") == processes.drop_caches(["absent"], "a") == "a kept"
    (tmp_path / "sync").write_text("#!/bin/sh\nexit 1\n")
    assert processes.drop_caches(["drop"], "a") == "a kept" and capfd.readouterr() == ("", "")


def test_a_connection_over_stdio_redirects_prints_to_stderr(tmp_path: Path) -> None:
    """The parent process reads this process's standard output, so ranks and libraries must not print there."""
    ours, theirs = socket.socketpair()
    kept = [os.dup(number) for number in (0, 1)]
    try:
        for number in (0, 1):
            os.dup2(theirs.fileno(), number)
        channel = member.over_stdio(4)
        assert os.fstat(1).st_ino == os.fstat(2).st_ino != os.fstat(channel.incoming).st_ino
    finally:
        for number, copy in enumerate(kept):
            os.dup2(copy, number)
            os.close(copy)
    lead = channels.from_socket(ours)
    assert lead.next(5.0, "join") == {"kind": "join", "node": 4, "name": threading.current_thread().name}
    lead.send("shutdown", exit_code=0)
    assert channel.next(5.0, "shutdown")["exit_code"] == 0
    for each in (channel, lead):
        each.close()
    theirs.close()


def test_an_unexpected_message_is_not_accepted_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = map(channels.from_socket, socket.socketpair())
    for kind in ("a", "b", "c"):
        theirs.send(kind)
    assert ours.next(5.0, "z", "a") == {"kind": "a"}
    with pytest.raises(channels.LostError, match="^this node expects the message c or d, but received 'b'$"):
        ours.next(5.0, "c", "d")
    with pytest.raises(channels.LostError, match="^no answer has arrived within 0 s$"):
        ours.next(0.01, "c")
    monkeypatch.setattr(channels, "SILENT_S", 0.01)
    with pytest.raises(channels.LostError, match="^the other node has not read the messages of this node for 0 s$"):
        theirs.send("a", text="x" * 2**22)
    ours.close()
    with pytest.raises(channels.LostError, match="^Broken pipe$"):
        theirs.send("a")
    theirs.close()
