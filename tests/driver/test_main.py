"""`python -m bench.driver` on the lead node and on another node, and its run folder."""

import fcntl
import io
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.backends.nodes import member
from bench.backends.nodes.interruption import STOPPED, CutShortError, Interruption, NodeLostError
from bench.backends.nodes.lead import Nodes
from bench.contract import plan as plans
from bench.contract import plan_kinds, run_files
from bench.contract.plan import Plan
from bench.driver import __main__ as runner
from bench.driver import lead as leads
from bench.driver.drive import Drive
from bench.errors import BenchError, ConfigError
from bench.planning import compose

MAIN = Callable[..., int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[MAIN]:
    """Run the command with these arguments; restore the signal handlers."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def main(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["bench.driver", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            runner.main()
        assert isinstance(stop.value.code, int)
        return stop.value.code

    yield main
    for number, handler in kept.items():
        signal.signal(number, handler)


def planned(num_nodes: int = 2) -> Plan:
    words = ["task=lora_tiny", "cluster=hosts", "cluster.device=cpu", "cluster.gpu=null", "cluster.ranks_per_node=1"]
    plan = compose.compose(words)
    return replace(plan, world=replace(plan.world, num_nodes=num_nodes))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_files.PLAN).write_text(plan_kinds.dumps(planned()))
    return tmp_path / "run"


@dataclass
class FakeDriver:
    """Records the calls of the lead node instead of driving a run."""

    calls: list[tuple[Any, ...]]
    driven: list[Drive]
    nodes: list[Nodes]
    ends: Callable[[], int] = lambda: 4

    def drive(self, run: Drive, connect: Callable[[], AbstractContextManager[Nodes]]) -> int:
        self.driven.append(run)
        run.progress.say("on the screen")
        print("of an error", file=sys.stderr)
        with connect() as nodes:
            self.nodes.append(nodes)
        return self.ends()

    @property
    def last(self) -> Drive:
        return self.driven[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver([], [], [])

    def noted(name: str, *shown: str) -> Callable[..., None]:
        return lambda nodes, *words, **more: fake.calls.append((name, *words, *(more.get(key) for key in shown)))

    monkeypatch.setattr(leads, "drive", fake.drive)
    monkeypatch.setattr(Nodes, "join", noted("join", "token", "within_s"))
    monkeypatch.setattr(Nodes, "send_plan", noted("send the plan"))
    monkeypatch.setattr(Nodes, "shutdown", noted("shutdown"))
    monkeypatch.setattr(leads, "require_shared", noted("is shared"))
    monkeypatch.setenv("RUNSTOP_TOKEN", "ours")
    return fake


def test_the_lead_node_drives_the_run_with_its_arguments(
    main: MAIN, run: Path, fake: FakeDriver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leads.time, "monotonic", lambda: 1000.0)
    words = ("--node", 0, "--lead", "[::1]:70", "--join-s", 2.5, "--limit-min", 0.5, "--trial-min", 7)
    assert main(run, *words, "--job", "j7", "--attempt", 3, "--restarts") == 4
    assert fake.calls == [("join", 70, "ours", 2.5), ("send the plan",), ("is shared",), ("shutdown", 4)]
    driven, (nodes,) = fake.last, fake.nodes
    interruption: Interruption = driven.check.__self__  # type: ignore[attr-defined]
    assert (driven.folder, driven.job, driven.backend_job_id, driven.restarts) == (run, "j7", "j7", True)
    assert interruption.limit_s == 1030.0
    assert (nodes._host, nodes._own, nodes.plan) == ("::1", driven.plan.environment, driven.plan)
    assert driven.plan == plans.within(planned(), 7) != planned() and not driven.made_progress
    printed = capsys.readouterr()
    first = f"job j7, attempt 3, {driven.plan.name} on 2 nodes"
    assert (printed.out, printed.err) == (f"{first}\non the screen\n", "of an error\n")
    kept = (run / run_files.RUNNER_OUTPUT).read_text()
    assert kept == f"{first}\non the screen\nof an error\n"
    signal.raise_signal(signal.SIGTERM)
    assert (interruption.why, interruption.signum) == (STOPPED, signal.SIGTERM)
    monkeypatch.setenv("RUNSTOP_TOKEN", "ours")
    assert main(run, "--node", 0) == 4
    interruption = fake.last.check.__self__  # type: ignore[attr-defined]
    assert (fake.last.job, fake.last.restarts, interruption.limit_s) == (str(run), False, None)
    assert fake.last.plan == planned() and fake.calls[4] == ("join", 0, "ours", 900.0)
    assert (run / run_files.RUNNER_OUTPUT).read_text().startswith(f"{kept}job {run}, attempt 0, ")


def test_a_run_on_one_node_needs_no_token_and_one_on_two_does(
    main: MAIN, run: Path, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RUNSTOP_TOKEN")
    assert main(run, "--node", 0) == 2 and not fake.driven
    assert "the token that authenticates the nodes of this run is not set" in capsys.readouterr().err
    (run / run_files.PLAN).write_text(plan_kinds.dumps(planned(1)))
    assert main(run, "--node", 0) == 4 and fake.calls[0][:3] == ("join", 0, "")
    assert main(run.parent / "absent", "--node", 0) == 2 and not (run.parent / "absent").exists()


@pytest.mark.parametrize(
    ("error", "words", "code", "message"),
    [
        (CutShortError(STOPPED, signal.SIGINT), (), 130, f"{STOPPED}\n"),
        (NodeLostError("the lead", "no beat"), (), 1, "HST-01: the lead was lost: no beat\n"),
        (NodeLostError("the lead", "no beat"), ("--restarts",), 75, "HST-01: the lead was lost: no beat\n"),
        (ConfigError("refused", where="w", fix="f"), (), 2, "refused\n  where: w\n  fix:   f\n"),
        (BenchError("late", where="w", fix="f"), (), 1, "late\n  where: w\n"),
        (None, (), 9, ""),
    ],
)
def test_another_node_serves_the_lead_node_and_prints_why_it_ended(
    main: MAIN,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("RUNSTOP_TOKEN", "ours")
    calls: list[tuple[Any, ...]] = []

    def join(lead: tuple[str, int], number: int, *, token: str, within_s: float, check: Callable[[], None]) -> str:
        calls.append((lead, number, token, within_s))
        check()
        return "joined"

    def serve(channel: object, number: int, folder: Path, *, check: Callable[[], None]) -> int:
        calls.append((channel, number, folder))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(CutShortError):
            check()
        if error is not None:
            raise error
        return 9

    monkeypatch.setattr(member, "join", join)
    monkeypatch.setattr(member, "serve", serve)
    monkeypatch.setattr(member, "over_stdio", lambda number: f"streams of {number}")
    monkeypatch.chdir(run.parent)
    assert main("run", "--node", 2, "--lead", "rig0:65535", "--join-s", 3, *words) == code
    assert calls == [(("rig0", 65535), 2, "ours", 3.0), ("joined", 2, run)]
    assert capsys.readouterr().err.startswith(message)
    assert main("run", "--node", 0, "--stdio", *words) == code and calls[2:] == [("streams of 0", 0, run)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node", "-1"], "'-1' is not an integer of 0 or more"),
        (["--node", "x"], "'x' is not an integer of 0 or more"),
        (["--node", "0", "--lead", "rig0"], "'rig0' is not an address of the form HOST:PORT"),
        (["--node", "0", "--lead", ":1"], "':1' is not an address of the form HOST:PORT"),
        (["--node", "0", "--lead", "rig0:0"], "'rig0:0' is not an address of the form HOST:PORT"),
        (["--node", "0", "--lead", "rig0:65536"], "'rig0:65536' is not an address of the form HOST:PORT"),
        (["--node", "0", "--lead", "rig0:x"], "'rig0:x' is not an address of the form HOST:PORT"),
        ([], "required: --node"),
    ],
)
def test_invalid_node_numbers_and_addresses_are_refused(
    main: MAIN, run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run, *words) == 2 and message in capsys.readouterr().err


def test_tee_writes_to_screen_and_file() -> None:
    screen, kept = io.StringIO(), io.StringIO()
    tee = leads.Tee(screen, kept)
    assert tee.write("four") == 4 and screen.getvalue() == kept.getvalue() == "four" and not tee.isatty()


def test_a_new_run_folder_gets_its_plan_from_a_file_and_an_old_one_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, file, run = planned(), tmp_path / "mine.json", tmp_path / "deep/run"
    run.parent.mkdir(mode=0o755)
    paths = plan.config.cluster.paths
    paths.data, paths.model, paths.logs = "$DATADIR/x", "$DATA", "/logs"
    file.write_text(plan_kinds.dumps(plan))
    monkeypatch.setenv("DATADIR", "/of/rows")
    monkeypatch.setenv("DATA", "/of/models")
    before = os.umask(0)
    try:
        with leads.opened(run, file) as opened:
            assert opened == plan_kinds.load(run / run_files.PLAN)
            filled = opened.config.cluster.paths
            assert (filled.data, filled.model, filled.logs) == ("/of/rows/x", "/of/models", "/logs")
            with (run / run_files.RUN_LOCK).open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(ConfigError, match="CFG-05: another process is already working on this run"):
                leads.opened(run, None).__enter__()
    finally:
        os.umask(before)
    for folder in (run, run / run_files.RANK_LOGS):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    monkeypatch.setenv("DATA", "/elsewhere")
    with leads.opened(run, file) as reopened, leads.output(run) as output:
        assert reopened == opened and output.name == str(run / run_files.RUNNER_OUTPUT)
    with leads.opened(run, None) as reopened:
        assert reopened == opened
    run.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to this run folder"):
        leads.opened(run, None).__enter__()


@pytest.mark.parametrize("value", [None, "", 'a"b', "a\\b", "a$b", "a`b", "a\x1f", "\n"])
def test_unset_and_hostile_variables_of_a_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    plan = planned()
    plan.config.cluster.paths.data = "$DATADIR"
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(plan))
    monkeypatch.setenv("DATADIR", value) if value is not None else monkeypatch.delenv("DATADIR", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"^CFG-06: the environment variable DATADIR is .*\n  where: .*\n  fix:   set DATADIR to a path",
    ):
        leads.filled_in(tmp_path / "plan.json")
    monkeypatch.setenv("DATADIR", "a b'c")
    assert plan_kinds.loads(leads.filled_in(tmp_path / "plan.json")).config.cluster.paths.data == "a b'c"


def test_a_run_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned()))
    with pytest.raises(BenchError, match=r"CFG-08: cannot write: .*\n  where: .*/file/run"):
        leads.opened(tmp_path / "file/run", tmp_path / "plan.json").__enter__()


def test_the_cause_of_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch, main: MAIN) -> None:
    """The time limit is one cause; a cancellation replaces it."""
    now_s = [5.0]
    monkeypatch.setattr("bench.backends.nodes.interruption.time.monotonic", lambda: now_s[0])
    ending = Interruption(limit_s=6.0)
    ending.listen()
    for now_s[0] in (5.0, 6.0):
        ending.check()
    now_s[0] = 6.1
    with pytest.raises(CutShortError, match="^SLU-07: the time limit is near$"):
        ending.check()
    signal.raise_signal(signal.SIGINT)
    assert (ending.why, ending.signum) == (STOPPED, signal.SIGINT)
    signal.raise_signal(signal.SIGUSR1)
    assert ending.why == STOPPED
    ending.why, now_s[0] = None, 0.0
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(CutShortError, match="^SLU-07: "):
        ending.check()
    Interruption().check()
