"""One command of a run on all of its ranks: when it keeps running, what ends it, and why it has failed."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.backends.local import HERE
from bench.backends.nodes import file_transfer, lead, processes
from bench.backends.nodes.interruption import NodeLostError
from bench.backends.nodes.lead import Nodes, Running
from bench.contract import plan as plans
from bench.contract import run_files
from bench.contract.plan import Command, Plan
from bench.errors import BenchError, ConfigError, SubmitError
from bench.planning import compose

LOCAL_SGD = (
    "task=pretrain_tiny_local_sgd",
    "cluster=local",
    "cluster.ranks_per_node=6",
    "parallel.groups=3",
    "recipe.global_batch_size=48",
    "recipe.eval_every_samples=480",
)


@dataclass
class FakeNodes:
    """Fake nodes whose ranks have ended with these exit codes so far."""

    plan: Plan
    codes: dict[int, int] = field(default_factory=dict)
    lost: NodeLostError | None = None
    """A node whose connection is lost while the command runs."""
    gone: NodeLostError | None = None
    """A node whose loss is detected when ranks are stopped."""
    restarted: list[list[int]] = field(default_factory=list)
    started: list[tuple[str, int]] = field(default_factory=list)
    names: Sequence[str] = ("rig0",)

    def start(self, command: Command, port: int, attempt: str | None = None) -> None:
        self.started.append((command.name, port))

    def exit_codes(self) -> dict[int, int]:
        if self.lost is not None:
            raise self.lost
        return dict(self.codes)

    def restart(self, ranks: Sequence[int]) -> None:
        self.restarted.append([*ranks])
        for rank in ranks:
            self.codes.pop(rank, None)

    def stop(self) -> NodeLostError | None:
        return self.gone


@dataclass
class Trial:
    """A trial of three groups of two ranks; the first group writes the log, and each may restart twice."""

    nodes: FakeNodes
    running: Running
    folder: Path

    @property
    def command(self) -> Command:
        return plans.trial_commands(self.nodes.plan)[0]

    def report(self, rank: int, **error: Any) -> None:
        path = self.folder / run_files.rank_error("trial 0", rank)
        path.write_text(json.dumps({"rule": None, "where": f"rank {rank}", "fix": "f", "exit_code": 1} | error))


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    plan = compose.compose([*LOCAL_SGD, "recipe.local_sgd.restarts=2"])
    (tmp_path / run_files.RANK_LOGS).mkdir()
    nodes = FakeNodes(plan)
    return Trial(nodes, Running(cast(Nodes, nodes), plans.trial_commands(plan)[0], tmp_path), tmp_path)


def test_a_failed_group_restarts_up_to_its_limit(trial: Trial) -> None:
    nodes, ranks = trial.nodes, trial.running
    for failed in (4, 5, 2):
        nodes.codes[failed] = 1
        assert ranks.are_running()
    assert nodes.restarted == [[4, 5], [4, 5], [2, 3]]
    nodes.codes = {4: 9, 5: 9, 2: 0}
    assert ranks.are_running() and nodes.codes == {4: 9, 5: 9, 2: 0} and len(nodes.restarted) == 3
    assert ranks.exit_code == 0, "the trial continues without them"
    nodes.codes[0] = 0
    assert ranks.are_running(), "rank 1 is needed, too"
    nodes.codes |= {1: 0, 2: 1}
    assert not ranks.are_running() and len(nodes.restarted) == 3, "the trial is over"
    nodes.gone = NodeLostError("node 1", "it has ended")
    ranks.stop()
    ranks.check()
    assert (ranks.exit_code, ranks.lost) == (0, None), "a node lost after the end does not matter"


@pytest.mark.parametrize(
    ("codes", "exit_code", "what"),
    [
        ({0: 0, 1: 3}, 3, r"trial 0 ended without a result; exit codes by rank: \{0: 0, 1: 3\}"),
        ({1: 137, 0: 128 + 64, 5: 139}, 192, "RUN-02: rank 0 got SIGRTMAX, rank 1 got SIGKILL during trial 0"),
        ({1: 128 + 99}, 227, "RUN-02: rank 1 got signal 99 during trial 0"),
        ({0: 128}, 128, "trial 0 ended without a result"),
    ],
)
def test_a_failed_required_rank_ends_the_trial(trial: Trial, codes: dict[int, int], exit_code: int, what: str) -> None:
    trial.nodes.codes = codes
    assert not trial.running.are_running()
    trial.running.stop()
    assert trial.running.exit_code == exit_code and trial.running.lost is None
    with pytest.raises(SubmitError, match=f"^{what}") as error:
        trial.running.check()
    first = min(rank for rank, code in codes.items() if rank < 2 and code) if exit_code > 128 else None
    assert error.value.where == str(
        trial.folder / (run_files.RANK_LOGS if first is None else run_files.rank_output("trial 0", first))
    )


def test_a_rank_that_was_killed_on_another_node_is_the_reason_although_its_peer_ended_first(trial: Trial) -> None:
    trial.nodes.names = ("rig0", "rig1")
    trial.report(0, time=3.0, what="the connection was closed", rule="NCC-06")
    trial.nodes.codes = {0: 1}
    assert trial.running.are_running(), "the other node may have the reason"
    trial.nodes.codes = {0: 1, 1: 137}
    assert not trial.running.are_running()
    with pytest.raises(SubmitError, match="^RUN-02: rank 1 got SIGKILL"):
        trial.running.check()


def test_the_error_of_the_rank_that_failed_first_is_the_reason(trial: Trial) -> None:
    trial.report(0, time=3.0, what="a rank is gone")
    trial.report(1, time=2.0, what="no room", rule="CFG-08", exit_code=5)
    (trial.folder / run_files.rank_error("trial 0", 2)).write_text("{")
    trial.nodes.codes = {0: 1, 1: 5}
    assert not trial.running.are_running()
    with pytest.raises(SubmitError, match="^CFG-08: no room\n  where: rank 1\n  fix:   f$") as error:
        trial.running.check()
    assert error.value.exit_code == trial.running.exit_code == 5
    assert lead.first_error(trial.folder, replace(trial.command, name="trial 1")) is None
    with lead.started(cast(Nodes, trial.nodes), trial.command, trial.folder, port=77):
        assert trial.nodes.started == [("trial 0", 77)]
        assert not list(trial.folder.glob("rank_logs/*")), "reports of an earlier attempt are removed"


def test_a_lost_node_is_the_reason_of_failed_ranks(trial: Trial) -> None:
    trial.nodes.lost = NodeLostError("node 2", "no beat")
    assert not trial.running.are_running()
    trial.nodes.lost, trial.nodes.codes = None, {0: 137}
    trial.running.stop()
    with pytest.raises(NodeLostError, match="node 2 was lost: no beat"):
        trial.running.check()
    trial.nodes.gone = NodeLostError("node 1", "it has ended")
    trial.running.stop()
    assert "node 2" in str(trial.running.lost), "the first one"
    failed, unfinished = (Running(cast(Nodes, trial.nodes), trial.command, trial.folder) for _ in range(2))
    assert not failed.are_running()
    for ranks in (failed, unfinished):
        ranks.stop()
        with pytest.raises(NodeLostError, match="node 1 was lost: it has ended"):
            ranks.check()


def test_a_trial_that_takes_longer_than_its_limit_is_late_unless_it_has_just_ended(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    limited = replace(trial.command, limit_min=2)
    late, ended, unlimited = (
        Running(cast(Nodes, trial.nodes), command, trial.folder)
        for command in (limited, limited, replace(limited, limit_min=None))
    )
    for now_s[0], is_running in ((1120.0, True), (1120.5, False)):
        assert (late.are_running(), unlimited.are_running()) == (is_running, True)
    trial.nodes.codes = dict.fromkeys(range(6), 0)
    trial.nodes.gone = NodeLostError("node 1", "it has ended")
    assert not ended.are_running()
    monkeypatch.undo()
    late.stop()
    assert (late.exit_code, ended.exit_code) == (124, 0) and late.lost is not None
    late.lost = None
    with pytest.raises(
        SubmitError, match="^SLU-07: trial 0 took longer than its walltime\n  where: walltime\n  fix:   raise"
    ):
        late.check()
    ended.check()


def wait_for(nodes: Nodes, codes: dict[int, int]) -> None:
    deadline_s = time.monotonic() + 10
    while nodes.exit_codes() != codes:
        assert time.monotonic() < deadline_s, nodes.exit_codes()


@pytest.mark.long
def test_restarted_ranks_get_their_restart_count(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ignores SIGTERM is killed; the other ranks keep running."""
    monkeypatch.setattr(lead, "POLL_S", 0.005)
    monkeypatch.setattr(processes, "POLL_S", 0.005)
    monkeypatch.setattr(processes, "GRACE_S", 0.05)
    deaf = 'trap "" TERM; echo "$RANK:$RUNSTOP_RESTART" >>"lives_$RANK"; [ $RANK = 3 ] && exit 7; '
    deaf += "while :; do sleep 1; done"
    nodes = Nodes(trial.nodes.plan, trial.folder, HERE, own={})
    nodes.start(replace(trial.command, argv=["sh", "-c", deaf]), 1)
    wait_for(nodes, {3: 7})
    lives = [trial.folder / f"lives_{rank}" for rank in range(6)]
    try:
        for times in (1, 2):
            while not all(path.exists() and len(path.read_text().split()) == times for path in lives[2:4]):
                nodes.exit_codes()
            wait_for(nodes, {3: 7})
            nodes.restart([2, 3])
        while len(lives[2].read_text().split()) < 3:
            nodes.exit_codes()
        wait_for(nodes, {3: 7})
    finally:
        assert nodes.stop() is None
    starts = [path.read_text().split() for path in lives]
    assert starts == [[f"{rank}:"] for rank in (0, 1)] + [[f"{r}:", f"{r}:1", f"{r}:2"] for r in (2, 3)] + [
        ["4:"],
        ["5:"],
    ]
    assert nodes.exit_codes() == {}


def test_if_one_rank_cannot_start_the_others_are_stopped(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "POLL_S", 0.005)
    started, real = [], processes.start

    def start(words: Sequence[str], *rest: Any) -> Any:
        if len(started) == 2:
            raise FileNotFoundError(2, "No such file or directory", words[0])
        assert words == [sys.executable, "-m", "jobs.tasks.train", "plan.json", "--trial", "0"]
        started.append(real(["sleep", "60"], *rest))
        return started[-1]

    monkeypatch.setattr(processes, "start", start)
    with pytest.raises(FileNotFoundError):
        processes.Ranks(trial.nodes.plan, trial.command, trial.folder, node=0, environment={"PATH": "/usr/bin:/bin"})
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


@dataclass
class Other:
    """A fake node."""

    number: int
    name: str
    is_shared: bool
    has: Callable[[str], bool] = lambda path: True


@dataclass
class Others:
    plan: Plan
    members: list[Other]

    def query(self, kind: str, *, check: Callable[[], None], paths: list[str]) -> list[list[str]]:
        assert kind == "exist"
        check()
        return [[path for path in paths if member.has(path)] for member in self.members]


def test_nodes_must_share_files_that_several_of_them_write() -> None:
    """Rank 0's node writes the log, and every node writes checkpoints."""
    plan = compose.compose(["task=pretrain_tiny", "cluster=local"])
    saving = compose.compose(["task=pretrain_tiny", "cluster=local", "task.training.checkpoint_every_steps=5"])
    shares, alone = Other(0, "rig0", True), Other(1, "rig1", False)
    two = [shares, alone, Other(2, "rig2", True), Other(3, "rig3", False)]
    for fine in (Others(plan, two), Others(saving, [shares]), Others(saving, [])):
        lead.require_shared(cast(Nodes, fine))
    message = r"HST-09: all nodes write checkpoints .*, but rig1, rig3 cannot access this folder\n  where: task\.tr"
    with pytest.raises(ConfigError, match=message):
        lead.require_shared(cast(Nodes, Others(saving, two)))
    message = "HST-09: rank 0 cannot write the log, because the host of rank 0, rig0, cannot access "
    message += "the run folder\n  where: LOGDIR\n  fix:   start the run on rig0"
    with pytest.raises(ConfigError, match=message):
        lead.require_shared(cast(Nodes, Others(plan, [alone, Other(0, "rig0", False)])))


def test_prepared_files_must_exist_on_every_node(tmp_path: Path) -> None:
    paths = [f"cluster.paths.{name}={tmp_path}/{name}" for name in ("data", "model", "logs")]
    plan = compose.compose(["task=lora_tiny", "cluster=local", *paths])
    checked: list[int] = []
    every = [Other(1, "rig1", True), Other(2, "rig2", True)]
    lead.require_prepared(cast(Nodes, Others(plan, every)), lambda: checked.append(1))
    assert checked == [1]
    every[1].has = lambda path: "/model" not in path
    missing = rf"{re.escape(str(tmp_path))}/model/\S+"
    message = rf"HST-10: {missing} was prepared, but does not exist on the host rig2\n  where: DATADIR, MODEL"
    with pytest.raises(ConfigError, match=message):
        lead.require_prepared(cast(Nodes, Others(plan, every)))


def test_the_marker_of_a_run_folder_is_removed_after_the_block(tmp_path: Path) -> None:
    with pytest.raises(BenchError), lead.marked(tmp_path) as name, lead.marked(tmp_path) as other:
        assert {path.name for path in tmp_path.iterdir()} == {name, other} and name != other
        assert re.fullmatch(r"\.lead-[0-9a-f]{16}", name)
        raise BenchError("what", where="where", fix="fix")
    assert not list(tmp_path.iterdir())


def test_a_changed_file_is_sent_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_transfer, "PART_BYTES", 4)
    own, lead = tmp_path / "own", tmp_path / "lead"
    for name in ("facts/a", "adapters_0.part/deep/b", "rank_logs/empty"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("" if "empty" in name else f"of {name[-1]}: 3456")
    known: file_transfer.Stamps = {}
    sent = list(file_transfer.parts(own, known))
    assert [(part["name"], part["offset"]) for part in sent if part["name"] == "facts/a"] == [
        ("facts/a", offset) for offset in (0, 4, 8)
    ]
    assert list(file_transfer.parts(own, known)) == [] and len(known) == 3
    lead.mkdir()
    (lead / "facts").mkdir()
    (lead / "facts/a").write_text("what was there before, which is longer")
    for part in sent:
        file_transfer.write(lead, part)
    assert (lead / "facts/a").read_text() == "of a: 3456" and len(sent) == 6
    assert (lead / "adapters_0/deep/b").read_text() == "of b: 3456"
    (own / "facts/a").write_text("of a: 7")
    assert [part["name"] for part in file_transfer.parts(own, known)] == ["facts/a"] * 2


def test_received_files_are_only_written_into_the_allowed_folders(tmp_path: Path) -> None:
    own, lead = tmp_path / "own", tmp_path / "lead"
    for name in ("rank_logs/a.out", "facts/rank_0001.json", "adapters_0.part/__1_0.distcp", "result_0.txt"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(name.encode() * 100_000)
    (own / "rank_logs" / "link.out").symlink_to("/etc/passwd")
    lead.mkdir()
    known: file_transfer.Stamps = {}
    for part in file_transfer.parts(own, known):
        file_transfer.write(lead, part)
    assert sorted(str(path.relative_to(lead)) for path in lead.rglob("*") if path.is_file()) == [
        "adapters_0/__1_0.distcp",
        "facts/rank_0001.json",
        "rank_logs/a.out",
    ]
    assert (lead / "rank_logs/a.out").read_bytes() == (own / "rank_logs/a.out").read_bytes()
    assert list(file_transfer.parts(own, known)) == [], "unchanged files are not sent restarted"
    (lead / "rank_logs" / "out").symlink_to(tmp_path)
    for name in ("ledger.json", "../x", "rank_logs/../plan.json", "/etc/x", "rank_logs/out/x", "rank_logs"):
        with pytest.raises((BenchError, OSError)):
            file_transfer.write(lead, {"name": name, "offset": 0, "data": ""})
    assert not (tmp_path / "x").exists()
