"""The entry point of a pod: finished runs, the address of the first pod, restarts of the runner, and signals."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.backends import run_lock
from bench.backends.kubernetes import entry, pod_template
from bench.backends.nodes.interruption import RESTART_EXIT_CODE

JOB = "job/default/a"


def write(run: Path, *, jobs: list[str], outcome: str | None, exit_code: int = 1) -> None:
    (run / "job.json").write_text(json.dumps({"jobs": [{"id": id} for id in jobs]}))
    if outcome:
        (run / "status.json").write_text(json.dumps({"outcome": outcome, "exit_code": exit_code}))


@pytest.mark.parametrize(
    ("jobs", "outcome", "exit_code", "ends_with"),
    [
        ([JOB], "valid", 0, 0),
        ([JOB], "invalid", 1, 1),
        ([JOB], "failed", 2, 2),
        ([JOB], "interrupted", 143, None),
        ([JOB], None, 0, None),
        (["job/default/b", JOB], "failed", 1, 1),
        (["job/default/b"], "failed", 1, None),
        ([JOB], "failed", 137, 1),
        ([JOB, "job/default/b"], None, 0, 1),
    ],
)
def test_a_pod_ends_at_once_if_its_job_has_written_the_final_status(
    tmp_path: Path, jobs: list[str], outcome: str | None, exit_code: int, ends_with: int | None
) -> None:
    write(tmp_path, jobs=jobs, outcome=outcome, exit_code=exit_code)
    assert entry.exit_code_of_ended(tmp_path, JOB) == ends_with


def test_the_first_pod_is_found_once_it_answers_despite_an_outdated_file(tmp_path: Path) -> None:
    run, addresses = tmp_path / "run", list[str]()
    with socket.create_server(("127.0.0.2", 0)) as later:
        port = later.getsockname()[1]
        entry._announce(run, "127.0.0.1", port)  # no process listens there any more
        token = entry._token(run)
        looking = threading.Thread(target=lambda: addresses.append(entry._announced(run, [], is_by_file=True)))
        looking.start()
        time.sleep(0.2)
        assert addresses == []
        entry._announce(run, "127.0.0.2", port)
        looking.join(60)
    assert addresses == ["127.0.0.2"]
    assert entry._token(run) == token and len(token) == 64, "the token stays valid for pods that have read it"
    assert (run / entry.LEAD).stat().st_mode & 0o077 == 0


def test_the_first_pod_prints_each_line_of_the_logs_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_logs").mkdir()
    (tmp_path / "rank_logs/runner.out").write_text("the runner prints this by itself\n")
    log = tmp_path / "result_0.txt"
    places = dict[Path, int]()
    log.write_text("one\nhalf")
    assert [*entry.added(tmp_path, places)] == [b"result_0.txt: one\n"]
    log.write_text("one\nhalf of it\n")
    (tmp_path / "rank_logs/0.err").write_text("hf_" + "a" * 34 + "\n")
    second, first = entry.added(tmp_path, places)
    assert first == b"result_0.txt: half of it\n" and second.startswith(b"0.err: [masked: ")
    log.write_text("new\n")  # the next attempt's
    with entry.printed(tmp_path):
        pass
    assert capfd.readouterr().out.splitlines()[-1] == "result_0.txt: new"


ORPHAN, CHILD = 7, 50
STOPS, KILLED = signal.SIGTERM, signal.SIGKILL.value


@dataclass
class Pod:
    """The processes and the clock of a container: runners end one after another, and sleeping takes no real time."""

    run: Path
    ends: list[int]
    """The wait statuses of runners: exit codes times 256, or signals."""
    now_s: float = 1000.0
    started: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)
    reaped: list[tuple[int, int]] = field(default_factory=list)
    killed: list[tuple[int, int]] = field(default_factory=list)
    when_asleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.when_asleep()

    def spawn(self, program: str, argv: list[str], environment: dict[str, str]) -> int:
        assert program == sys.executable
        self.started.append((argv, environment))
        child = CHILD + len(self.started)
        self.reaped = [(0, 0), (ORPHAN, 9), (0, 0), (child, self.ends.pop(0))]
        return child

    def waitpid(self, pid: int, options: int) -> tuple[int, int]:
        assert (pid, options) == (-1, os.WNOHANG)
        return self.reaped.pop(0)

    def words(self, number: int) -> list[str]:
        argv, _ = self.started[number]
        assert argv[:4] == [sys.executable, "-m", "bench.driver", str(self.run)]
        return argv[4:]

    def starts(self, node: int, lead: str, *more: str) -> int:
        """Run the pod of a node and return its exit code."""
        sys.argv = ["entry", str(self.run), "--node", str(node), "--lead", lead, "--limit-s", "7200", *more]
        with pytest.raises(SystemExit) as ended:
            entry.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    fake = Pod(tmp_path / "runs" / "a", [0])
    monkeypatch.setattr(sys, "argv", [])
    clock = SimpleNamespace(monotonic=lambda: fake.now_s, sleep=fake.sleep)
    for name, stand_in in (("time", clock), ("BEGUN_S", 400.0)):
        monkeypatch.setattr(entry, name, stand_in)
    for name, call in (("posix_spawn", fake.spawn), ("waitpid", fake.waitpid)):
        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(os, "kill", lambda pid, signum: fake.killed.append((pid, signum)))
    named = {"RUNSTOP_JOB": JOB, "RUNSTOP_POD_IP": "10.0.0.9", "RUNSTOP_NODE_NAME": "rig9", "MASTER_PORT": "1"}
    for name, value in (named | {"PET_A": "1", "TORCHELASTIC_B": "1", "KUBEFLOW_C": "1", "PETS": "2"}).items():
        monkeypatch.setenv(name, value)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield fake
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def send_signal(signum: int) -> None:
    handler = signal.getsignal(signum)
    assert callable(handler)
    handler(signum, None)


def test_the_first_pod_writes_its_address_and_restarts_its_runner_until_it_is_done(pod: Pod) -> None:
    pod.ends = [RESTART_EXIT_CODE << 8, 3 << 8]
    assert pod.starts(0, "file:29400", "--trial-min", "7") == 3
    common = ["--node", "0", "--lead", "10.0.0.9:29400", "--job", JOB, "--restarts", "--trial-min", "7"]
    plan = ["--plan", pod_template.plan_file(), "--limit-min"]
    assert pod.words(0) == [*common, *plan, "110.00", "--attempt", "0"], "600 s of 7200 are over"
    assert pod.words(1) == [*common, *plan, f"{(6600 - 0.2) / 60:.2f}", "--attempt", "1"]
    assert len(pod.started) == 2 and pod.now_s == pytest.approx(1000.4)
    lead = json.loads((pod.run / entry.LEAD).read_text())
    environment = pod.started[1][1]
    assert lead == {"host": "10.0.0.9", "port": 29400, "token": environment["RUNSTOP_TOKEN"]}
    assert environment["RUNSTOP_NODE"] == "rig9" and environment["PETS"] == "2"
    assert not environment.keys() & {"MASTER_PORT", "PET_A", "TORCHELASTIC_B", "KUBEFLOW_C"}
    assert (pod.run.stat().st_mode & 0o777) == 0o755 and not pod.killed


def test_a_runner_has_at_least_one_minute_and_by_default_no_trial_limit(pod: Pod) -> None:
    pod.now_s = 400.0 + 7200 - 59
    assert pod.starts(0, "a-0.a:29400") == 0
    assert pod.words(0)[-4:] == ["--limit-min", "1.00", "--attempt", "0"] and "--trial-min" not in pod.words(0)
    assert pod.words(0)[2:4] == ["--lead", "a-0.a:29400"]


def test_other_pods_join_the_first_one_for_two_minutes(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    entry._announce(pod.run, "10.0.0.1", 29400)
    connected = list[object]()
    monkeypatch.setattr(
        socket, "create_connection", lambda place, timeout: connected.append((*place, timeout)) or ExitStack()
    )
    for lead, host in (("file:29400", "10.0.0.1"), ("a-0.a:29400", "a-0.a")):
        pod.ends = [0]
        assert pod.starts(3, lead) == 0
        own = ["--node", "3", "--lead", f"{host}:29400", "--job", JOB, "--restarts"]
        assert pod.words(-1) == [*own, "--join-s", "120", "--attempt", "0"]
        assert pod.started[-1][1]["RUNSTOP_TOKEN"] == entry._token(pod.run)
    assert connected == [("10.0.0.1", 29400, 2.0)], "a DNS name is not probed before"


def test_a_pod_that_starts_its_runner_ten_times_is_replaced(pod: Pod) -> None:
    pod.ends = [RESTART_EXIT_CODE << 8] * 11
    assert pod.starts(0, "file:29400") == entry.RETRYABLE == 138
    assert [pod.words(number)[-1] for number in range(len(pod.started))] == [str(number) for number in range(10)]


@pytest.mark.parametrize(
    ("end", "code"),
    [(RESTART_EXIT_CODE << 8, 143), (0, 0), (5 << 8, 5), (KILLED, 137)],
    ids=["again", "well", "5", "killed"],
)
def test_a_pod_forwards_a_signal_to_its_runner_once(pod: Pod, end: int, code: int) -> None:
    signals = iter([STOPS])
    pod.ends, pod.when_asleep = [end], lambda: [send_signal(signum) for signum in signals]
    assert pod.starts(0, "file:29400") == code
    assert pod.killed == [(CHILD + 1, STOPS)] and len(pod.started) == 1


@pytest.mark.parametrize(("node", "end", "status", "code"), [
    (0, 1, None, 1), (1, 1, None, 138), (1, 2, None, 138), (1, 1, 1, 1), (0, 137, 137, 1), (1, 137, 1, 1), (1, 0, 0, 0),
])  # fmt: skip
def test_only_a_run_that_has_ended_ends_its_job(pod: Pod, node: int, end: int, status: int | None, code: int) -> None:
    """A pod's exit code 1 or 2 fails the whole Job, so another node's pod has it only after the run's final status."""
    entry._announce(pod.run, "10.0.0.1", 29400)
    pod.ends = [end << 8]

    def ends() -> None:
        if status is not None:
            write(pod.run, jobs=[JOB], outcome="failed" if status else "valid", exit_code=status)

    pod.when_asleep = ends
    assert pod.starts(node, "a-0.a:29400") == code


def test_a_pod_of_a_finished_run_starts_no_runner(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.run.mkdir(parents=True)
    write(pod.run, jobs=[JOB], outcome="failed", exit_code=2)
    assert pod.starts(1, "file:29400") == 2 and not pod.started
    assert capsys.readouterr().out == "this job has already finished the run with exit code 2: nothing to do\n"


def test_waiting_for_the_first_pod_ends_after_fifteen_minutes(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    assert pod.starts(1, "a-0.a:29400") == entry.RETRYABLE and pod.now_s == 1900.0
    assert capsys.readouterr().out == f"the first pod has not written its address into {pod.run} within 900 s\n"
    pod.when_asleep = lambda: send_signal(signal.SIGINT)
    assert pod.starts(1, "file:29400") == 130 and pod.now_s == 1900.5
    assert not pod.started


def test_the_first_pod_waits_for_the_pod_that_it_replaces(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "WAIT_S", 30.0)
    pod.run.mkdir(parents=True)
    (pod.run / f"{entry.LEAD}.part").touch()  # left by an interrupted write
    with ExitStack() as older:
        older.enter_context(run_lock.driving(pod.run))
        pod.when_asleep = lambda: pod.now_s < 1003 or older.close()
        assert pod.starts(0, "file:29400") == 0
        assert pod.now_s == pytest.approx(1003.2), "and the runner takes 0.2 s"
    with run_lock.driving(pod.run):
        pod.ends, pod.now_s, pod.when_asleep = [0], 1000.0, lambda: None
        assert pod.starts(0, "file:29400") == 0 and pod.now_s == pytest.approx(1030.2)


def test_a_pod_without_an_address_in_its_environment_resolves_its_host_name(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNSTOP_POD_IP")
    monkeypatch.setattr(socket, "gethostname", lambda: "a-0")
    monkeypatch.setattr(socket, "gethostbyname", {"a-0": "10.0.0.4"}.__getitem__)
    assert pod.starts(0, "file:29400") == 0
    assert pod.words(0)[3] == "10.0.0.4:29400"
