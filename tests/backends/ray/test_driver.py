"""The driver of a Ray job: attempts until the run has its final status, with lost nodes and signals."""

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.nodes.interruption import RESTART_EXIT_CODE
from bench.backends.ray import driver
from bench.backends.ray.placement_group import Group, LostError, Place
from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.run_files import LEFT_OUT, PLAN, RAY_OUTPUT, STATUS
from bench.driver import between_commands
from bench.errors import SubmitError
from bench.planning import compose

WELL = 0
LOST = LostError("RAY-04", "node 1 (rig1) is lost")
Step = int | Exception | signal.Signals | Callable[[Path], int]


@dataclass
class Cluster:
    """A fake cluster. Each attempt ends with the next item of `ends`: an exit code, an error, or a signal."""

    ends: list[Step]
    reserve_errors: list[Exception] = field(default_factory=list)
    """The errors of the first calls of `reserve`."""
    writes_status: bool = True
    """Whether a runner writes the run's final status, if it requests no restart."""
    done: list[Any] = field(default_factory=list)
    closed: list[list[str]] = field(default_factory=list)
    """The arguments of the commands with which the driver itself closed a run."""
    used: list[list[str]] = field(default_factory=list)
    """The nodes of each attempt."""
    avoided: list[dict[str, str]] = field(default_factory=list)
    """The nodes that each reservation leaves out."""
    closes: bool = False
    """Whether these commands are executed."""

    def reserve(self, plan: plans.Plan, say: Any, *, check: Any) -> Group:
        assert plan.config.cluster.name == "ray_test" and callable(say)
        self.done.append("reserve")
        if self.reserve_errors:
            raise self.reserve_errors.pop(0)
        check()
        avoided = dict(plan.config.cluster.avoided)
        free = [name for number in range(9) if (name := f"rig{number}") not in avoided]
        names = free[: plans.nodes_of_job(plan)]
        self.avoided.append(avoided)
        return Group(None, [None] * len(names), [Place(name, "", "") for name in names])

    def release(self, group: Group) -> None:
        assert group.names[0] == "rig0"
        self.done.append("release")

    def attempt(self, group: Group, words: Sequence[str], job: driver.DriverJob) -> int:
        self.done.append(list(words))
        self.used.append(group.names)
        end = self.ends.pop(0)
        if callable(end):
            end = end(job.run)
        if isinstance(end, signal.Signals):
            handler = signal.getsignal(end)
            assert callable(handler)
            handler(end, None)
            job.check()
        if isinstance(end, Exception):
            raise end
        if self.writes_status and end != RESTART_EXIT_CODE:
            (job.run / STATUS).write_text(json.dumps({"outcome": "valid", "exit_code": end}))
        return end

    def command(self, argv: list[str], *, cwd: Path, env: dict[str, str], stdin: int, check: bool) -> None:
        """Run the driver's command in this process."""
        assert argv[:3] == [sys.executable, "-m", "bench.driver.between_commands"] and argv[3] == str(cwd)
        assert (stdin, check) == (subprocess.DEVNULL, False)
        assert str(Path(driver.__file__).parents[3]) in env["PYTHONPATH"].split(":")
        self.closed.append(argv[4:])
        if not self.closes:
            return
        own, sys.argv = sys.argv, argv[2:]
        try:
            between_commands.main()
        except SystemExit as ended:
            assert ended.code in (0, 1)
        finally:
            sys.argv = own

    def runs(self, *words: object) -> int:
        """Return the exit code of the driver."""
        sys.argv = ["driver", *map(str, words)]
        with pytest.raises(SystemExit) as ended:
            driver.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    fake = Cluster([])
    ray = SimpleNamespace(init=lambda **words: fake.done.append(words))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(driver, "run_attempt", fake.attempt)
    monkeypatch.setattr(driver, "groups", SimpleNamespace(reserve=fake.reserve, release=fake.release))
    monkeypatch.setattr(driver.subprocess, "run", fake.command)
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-11-23 16:00:00")
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield fake
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return folder(tmp_path / "a")


def folder(path: Path, *words: str) -> Path:
    path.mkdir()
    plan = compose.compose(["task=lora_tiny", "cluster=ray_test", "trials=2", *words])
    (path / PLAN).write_text(plan_kinds.dumps(plan))
    return path


def status(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / STATUS).read_text()))


INIT = {"address": "auto", "logging_level": logging.WARNING}
CLOSE = ["close", "--exit-code", "1", "--what"]
TRIALS = ["--trials", "0 1"]


def test_runs_follow_each_other_on_the_same_nodes(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    cluster.ends, other = [RESTART_EXIT_CODE, 3, WELL], folder(tmp_path / "b")
    assert cluster.runs("--job", "j@h", "--limit-min", "28.5", "--walltime", "20", run, other) == 3
    words = ["--limit-min", "28.5", "--trial-min", "20"]
    first, second = (["--job", "j@h", "--attempt", number, "--restarts", *words] for number in ("0", "1"))
    assert cluster.done == [INIT, "reserve", first, second, first] and not cluster.closed
    lines = [f"job j@h, attempt {number}, on rig0, rig1\n" for number in range(2)]
    assert (run / RAY_OUTPUT).read_text() == "".join(lines)
    assert (other / RAY_OUTPUT).read_text() == lines[0]


def test_after_a_lost_node_new_nodes_are_reserved_up_to_the_last_attempt(
    cluster: Cluster, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.ends, cluster.closes = [LOST, RESTART_EXIT_CODE, LOST], True
    assert cluster.runs("--job", "j", run) == 1
    words = [["--job", "j", "--attempt", f"{number}", *["--restarts"][: number < 2]] for number in range(3)]
    assert cluster.done == [INIT, "reserve", words[0], "release", "reserve", words[1], words[2], "release"]
    assert cluster.closed == [["open", "--job", "j"], [*CLOSE, "RAY-04: node 1 (rig1) is lost", *TRIALS]]
    ended = status(run)
    assert (ended["outcome"], ended["exit_code"], ended["rule"]) == ("failed", 1, "RAY-04")
    lost = "2026-11-23 16:00:00 RAY-04: node 1 (rig1) is lost\n"
    attempts = [f"job j, attempt {number}, on rig0, rig1\n" for number in range(3)]
    assert capsys.readouterr().out.startswith(f"{attempts[0]}{lost}{attempts[1]}{attempts[2]}{lost}")


def test_a_spare_node_replaces_the_one_that_an_attempt_has_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """Without a new reservation; if a node is lost later, one spare node less is reserved for each of the two."""
    run = folder(tmp_path / "spare", "launch.replace_slow=true", "cluster.spare_nodes=2", "launch.attempts=4")
    seen = list[str]()

    def slow(run: Path) -> int:
        seen.append((run / ".spares").read_text())
        entries = {"rig1": {"why": "RUN-26: slow", "job": "j"}, "rig0": {"why": "RUN-26: slow", "job": "other"}}
        (run / LEFT_OUT).write_text(json.dumps(entries))
        return RESTART_EXIT_CODE

    def ends(run: Path) -> int:
        seen.append((run / ".spares").read_text())
        return WELL

    cluster.ends = [slow, LOST, ends]
    assert cluster.runs("--job", "j", run) == 0
    assert cluster.used == [["rig0", "rig1"], ["rig0", "rig2"], ["rig0", "rig2"]]
    assert cluster.avoided == [{}, {"rig1": "RUN-26: slow"}] and seen == ["rig2,rig3\n", "\n"]


@pytest.mark.parametrize("rule", driver.FINAL)
def test_errors_that_other_nodes_would_repeat_end_the_run(rule: str, cluster: Cluster, run: Path) -> None:
    cluster.reserve_errors = [LostError(rule, "no")]
    assert cluster.runs("--job", "j", run) == 1
    assert cluster.done == [INIT, "reserve"] and cluster.closed[1] == [*CLOSE, f"{rule}: no", *TRIALS]


def test_a_failed_reservation_is_repeated(cluster: Cluster, run: Path) -> None:
    cluster.reserve_errors, cluster.ends = [LOST], [WELL]
    assert cluster.runs(run) == 0
    assert cluster.done == [INIT, "reserve", "reserve", ["--job", "ray", "--attempt", "1", "--restarts"]]


def test_a_run_without_final_status_is_closed(cluster: Cluster, run: Path) -> None:
    cluster.ends, cluster.writes_status = [WELL], False
    assert cluster.runs("--job", "j", run) == 1
    assert cluster.closed == [["open", "--job", "j"], [*CLOSE, "the run ended with exit code 0", *TRIALS]]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_job_closes_its_run(signum: signal.Signals, cluster: Cluster, run: Path) -> None:
    cluster.ends = [signum]
    assert cluster.runs("--job", "j", run, run) == 128 + signum
    assert cluster.closed == [["open", "--job", "j"], [*CLOSE, "SLU-08: the job was cancelled", *TRIALS]]
    assert (run / RAY_OUTPUT).read_text().splitlines()[1] == "2026-11-23 16:00:00 the job was cancelled"
    assert len(cluster.done) == 3, "no other run is started"
    cluster.ends, cluster.closed = [signum], []
    (run / STATUS).touch()
    assert cluster.runs("--job", "j", run) == 128 + signum and not cluster.closed, "it has its final status"


def test_a_signal_is_raised_once(run: Path) -> None:
    job = driver.DriverJob("j", None, None, None, run)
    job.check()
    job._record(signal.SIGTERM, None)
    with pytest.raises(driver.Stopped) as stopped:
        job.check()
    job.check()
    assert stopped.value.exit_code == 143


def test_a_folder_that_the_head_cannot_read_is_an_error_without_plan_file(
    cluster: Cluster, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = tmp_path / "unseen"
    assert cluster.runs(run, unseen) == 1 and not cluster.done
    assert f"RAY-09: the Ray head node cannot read the run folder\n  where: {unseen}" in capsys.readouterr().out
    assert "RAY-09" in (run / RAY_OUTPUT).read_text()
    cluster.ends = [LOST] * 3
    monkeypatch.setenv(driver.JOB_CONFIG, '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    assert cluster.runs("--plan", run / PLAN, unseen) == 1
    words = cluster.done[2]
    assert words == ["--job", "raysubmit_1", "--attempt", "0", "--restarts", "--plan", str(run / PLAN)]
    assert not cluster.closed and not unseen.exists(), "its folder was not created"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"metadata": {"job_submission_id": null}}', '{"metadata": 1}'])
def test_a_job_without_submission_id_is_called_ray(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(driver.JOB_CONFIG, text)
    assert driver._own_id() == "ray"


def test_a_bench_error_ends_the_driver_with_its_exit_code(cluster: Cluster, run: Path) -> None:
    cluster.reserve_errors = [SubmitError("no", where="there", fix="do")]
    assert cluster.runs(run) == 1
    assert (run / RAY_OUTPUT).read_text() == "no\n  where: there\n  fix:   do\n"
