"""Submit runs to a queue: what is printed, which folders are left, and what each error returns."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import backends
from bench.backends.protocol import Job, JobState
from bench.backends.slurm.backend import SlurmBackend
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, SUBMISSION
from bench.errors import SubmitError
from bench.launch import start
from bench.planning import compose
from bench.rules.finding import Finding, broken
from helpers import checked

REFUSED = SubmitError("the queue is closed", where="queue", fix="wait")
WARNING = broken("SLU-09", "the nodes are busy", "sbatch", fix="wait", severity="warning")
FORCED = broken("SLU-02", "there is no partition", "sbatch", fix="set one")


class FakeQueue(SlurmBackend):
    """A queue in memory; `fails` has the error of each folder that cannot be submitted."""

    def __init__(self, groups: list[list[int]] | None = None) -> None:
        self.groups, self.events = groups, list[str]()
        self.fails: dict[str, Callable[[Path], BaseException]] = {}
        self.known: dict[str, Job] = {}

    def _answer(self, folder: Path) -> None:
        if folder.name in self.fails:
            raise self.fails[folder.name](folder)

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        self.events.append(f"submit {folder.name} forced {[one.rule for one in forced]}")
        self._answer(folder)
        (folder / JOB).write_text(json.dumps({"page": "http://queue/7"}))
        return "7"

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        self.events.append(f"prepare {folder.name} forced {[one.rule for one in forced]}")
        (folder / JOB).write_text("{}")

    def submit_array(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        self.events.append(f"array {name} of {[run.name for _, run in runs]} next to them {folder.is_dir()}")
        self._answer(runs[0][1])
        return "40"

    def arrays(self, plans: Sequence[Plan]) -> list[list[int]]:
        assert self.groups is not None
        return self.groups

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return self.known


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    monkeypatch.chdir(tmp_path)
    return compose.compose(["task=lora70b", "cluster=dgx2", "walltime=20"])


def prepared(plan: Plan, folder: Path, *findings: Finding) -> start.Prepared:
    own = checked.changed(plan, {"config.launch.folder": str(folder), "name": folder.name})
    return start.prepare(own, "trials: 1\n", findings)


def lost(folder: Path) -> SubmitError:
    """Leave the file of a submission whose answer was lost."""
    (folder / SUBMISSION).touch()
    return REFUSED


def interrupted(folder: Path) -> KeyboardInterrupt:
    return KeyboardInterrupt()


def interrupted_with_a_job(folder: Path) -> KeyboardInterrupt:
    (folder / JOB).write_text(json.dumps({"jobs": [{"id": "7"}]}))
    return KeyboardInterrupt()


def interrupted_while_unknown(folder: Path) -> KeyboardInterrupt:
    (folder / SUBMISSION).touch()
    return KeyboardInterrupt()


def test_a_submitted_run_shows_its_job_and_the_next_commands(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = FakeQueue()
    assert start.run_queued(queue, prepared(plan, tmp_path / "runs/a", WARNING, FORCED)) == 0
    shown = capsys.readouterr()
    assert shown.out == "job 7: a on 16 ranks, results in runs/a\n"
    assert shown.err.splitlines() == [
        "warning SLU-09: the nodes are busy (sbatch); wait",
        "error SLU-02: there is no partition (sbatch); set one",
        "  runstop watch runs/a   # show its progress",
        "  runstop why runs/a   # explain a failure",
        "  runstop cancel runs/a   # cancel it",
        "  http://queue/7   # web page of the job",
    ]
    assert queue.events == ["submit a forced ['SLU-02']"]


MAY_BE_QUEUED = [
    "interrupted while the job was being submitted: the job may be queued",
    "  runstop runs runs   # show whether the job is queued",
    "  runstop cancel runs/a   # cancel the job",
]


@pytest.mark.parametrize(
    ("fails", "error", "is_kept", "lines"),
    [
        (lambda folder: REFUSED, SubmitError, False, []),
        (lost, SubmitError, True, []),
        (interrupted, KeyboardInterrupt, False, []),
        (interrupted_with_a_job, KeyboardInterrupt, True, MAY_BE_QUEUED),
        (interrupted_while_unknown, KeyboardInterrupt, True, MAY_BE_QUEUED),
    ],
)
def test_a_folder_is_kept_only_if_a_job_may_use_it(
    fails: Callable[[Path], BaseException],
    error: type[BaseException],
    is_kept: bool,
    lines: list[str],
    plan: Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue, folder = FakeQueue(), tmp_path / "runs/a"
    queue.fails["a"] = fails
    run = prepared(plan, folder)
    with pytest.raises(error):
        start.run_queued(queue, run)
    assert folder.exists() == is_kept and capsys.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_runs_are_submitted_as_arrays_and_a_run_alone_as_a_job(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = FakeQueue([[0, 2], [1], [3, 4], [5, 6], [7]])
    queue.fails = {"d": lambda folder: REFUSED, "f": lost, "h": lambda folder: REFUSED}
    runs = [prepared(plan, tmp_path / "runs" / name, WARNING) for name in "abcdefgh"]
    (tmp_path / "runs/c" / JOB).write_text("{}")
    (tmp_path / "runs/e/ledger.json").write_text("[]")
    ids = start.submit_runs(queue, runs)
    assert {folder.name: id if isinstance(id, str) else id.what for folder, id in ids.items()} == {
        "a": "40_0",
        "c": "40_1",
        "b": "7",
        **dict.fromkeys("defgh", "the queue is closed"),
    }
    assert queue.events == [
        *("prepare a forced []", "array a of ['a', 'c'] next to them True", "submit b forced []"),
        *("prepare d forced []", "prepare e forced []", "array d of ['d', 'e'] next to them True"),
        *("prepare f forced []", "prepare g forced []", "array f of ['f', 'g'] next to them True"),
        "submit h forced []",
    ]
    left = {path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith("array")}
    assert left == {*"abcef"}, "a job may use f, and e was started"
    assert len([*(tmp_path / "runs").glob("array-*")]) == 1, "the folders of refused arrays are removed"
    shown = capsys.readouterr().err.splitlines()
    groups = "2 runs and 1 run and 2 runs and 2 runs and 1 run"
    assert shown[0] == f"3 job arrays: {groups}; their nodes, partitions or time limits differ"
    assert shown[1:] == ["warning SLU-09: the nodes are busy (sbatch); wait"] * 8


@pytest.mark.parametrize(
    ("groups", "line"),
    [([[0, 1]], "1 job array: 2 runs\n"), ([[0], [1]], "")],
)
def test_the_number_of_arrays_is_shown(
    groups: list[list[int]], line: str, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start.submit_runs(FakeQueue(groups), [prepared(plan, tmp_path / name) for name in "ab"])
    assert capsys.readouterr().err == line


def test_the_exit_code_of_each_run_tells_whether_it_is_queued(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of several runs is shown once; with launch.wait, runs are followed, except for those refused."""
    queue = FakeQueue([[0, 1], [2, 3]])
    queue.fails["c"] = lambda folder: REFUSED
    monkeypatch.setattr(backends, "for_plan", lambda plan: queue)
    monkeypatch.setattr(start, "check", lambda plan, words: [])
    followed = list[str]()

    def follow(plan: Plan, folder: Path, console: object) -> int:
        followed.append(folder.name)
        return 5

    monkeypatch.setattr(start, "follow", follow)
    created, planned = list[Path](), []
    for name in "abcd":
        settings = {"config.launch.folder": f"runs/{name}", "name": name, "config.launch.wait": name in "bd"}
        planned.append((checked.changed(plan, settings), "trials: 1\n", ()))
    assert start.run_several(planned, created) == [0, 0, 1, 1, 5]
    assert [folder.name for folder in created] == ["a", "b", "c", "d"] and followed == ["b"]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "job 40_0: a on 16 ranks, results in runs/a",
        "job 40_1: b on 16 ranks, results in runs/b",
    ]
    assert shown.err.count("the queue is closed") == 1


def test_a_run_that_is_waited_for_has_the_exit_code_of_its_status(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of which Slurm says that it failed before the run had a status."""
    queue = FakeQueue()
    queue.known = {"7": Job(id="7", state=JobState.failed, native_state="TIMEOUT", reason="TimeLimit")}
    monkeypatch.setattr(backends, "get", lambda name: queue)
    run = prepared(plan, tmp_path / "runs/a")
    own = {"backend": "slurm", "inode": run.folder.stat().st_ino, "jobs": [{"id": "7"}]}
    (run.folder / JOB).write_text(json.dumps(own))
    monkeypatch.setattr(start, "watch", lambda source, how, console: console.print("progress"))
    assert start.follow(run.plan, run.folder, start.sheet.to_stderr()) == 1
    assert capsys.readouterr().err.splitlines() == [
        "job 7: TIMEOUT (TimeLimit)",
        "progress",
        "TIMEOUT: see runs/a/status.json",
    ]
