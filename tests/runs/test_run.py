"""Where a run stands, from its folder and what its backend knows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import backends
from bench.backends.protocol import Job, JobState
from bench.backends.slurm.backend import SlurmBackend
from bench.console import runs as run_sheets
from bench.console import sheet
from bench.contract import mllog, plan_kinds
from bench.contract.schema import BackendName
from bench.diagnosis import explain
from bench.errors import BenchError, ConfigError, SubmitError
from bench.launch import resume, start
from bench.planning import compose
from bench.runs import run as runs
from bench.studies import session

PLAN = compose.compose(["task=lora_tiny", "cluster=local"])


def with_job(folder: Path, monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Job]) -> Path:
    """Write the folder of a run whose last job was 7, and let its backend know the jobs."""
    (folder / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "6"}, {"id": "7"}]}))
    backend = SimpleNamespace(is_here=lambda: True, states=lambda ids: known)
    monkeypatch.setattr(runs.backends, "get", lambda name: backend)
    return folder


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [
        ({"7": JobState.completed}, 0),
        ({"7": JobState.failed}, 1),
        ({"6": JobState.completed}, 1),
        ({}, 1),
        ({"7_0": JobState.completed, "7_1": JobState.completed}, 0),
        ({"7_0": JobState.completed, "7_1": JobState.cancelled}, 1),
    ],
)
def test_without_a_last_word_the_job_itself_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, JobState], exit_code: int
) -> None:
    known = {id: Job(id=id, state=state, word=state.name.upper()) for id, state in states.items()}
    assert runs.exit_code(with_job(tmp_path, monkeypatch, known)) == exit_code


def test_the_last_word_of_the_run_comes_before_what_its_backend_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_job(tmp_path, monkeypatch, {"7": Job(id="7", state=JobState.completed, word="COMPLETED")})
    (folder / "status.json").write_text('{"outcome": "failed", "exit_code": 143, "what": "cancelled"}')
    assert runs.exit_code(folder) == 143


DONE = '{"outcome": "proven", "exit_code": 0, "what": "every trial did what was asked"}'


def test_a_job_is_waited_for_after_its_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container is still being removed: it ends when its backend says so."""
    known = {"7": Job(id="7", state=JobState.running, word="RUNNING")}
    folder, words = with_job(tmp_path, monkeypatch, known), iter(["COMPLETING", "COMPLETED"])
    (folder / "status.json").write_text(DONE)

    def later(seconds: float) -> None:
        word = next(words)
        state = JobState.completed if word == "COMPLETED" else JobState.running
        known["7"] = Job(id="7", state=state, word=word)

    monkeypatch.setattr(runs.time, "sleep", later)
    assert [job.word for job in runs.wait(folder)] == ["RUNNING", "COMPLETING", "COMPLETED"]
    assert [job.word for job in runs.wait(folder, started=True)] == ["COMPLETED"]


@pytest.mark.parametrize(("left", "said"), [("COMPLETING", " (job 7 still is COMPLETING)"), (None, "")])
def test_whoever_follows_a_job_is_told_what_came_of_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: str | None,
    said: str,
) -> None:
    """One that does not come to its end is named; one that its backend has forgotten has ended."""
    known = {"7": Job(id="7", state=JobState.running, word=left)} if left else {}
    folder = with_job(tmp_path, monkeypatch, known)
    (folder / "status.json").write_text(DONE)
    (folder / "plan.json").write_text(plan_kinds.dumps(PLAN))
    monkeypatch.setattr(runs, "ENDS_S", 0.0)
    assert start.follow(PLAN, folder, sheet.to_stderr()) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"proven: every trial did what was asked{said}"


def ledger_of(folder: Path, outcome: str) -> None:
    (folder / "ledger.json").write_text(json.dumps([{"trial": 0, "seed": 1, "outcome": outcome}]))


def test_of_a_job_that_its_backend_has_forgotten_only_the_ledger_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    folder = with_job(tmp_path / "run", monkeypatch, {})
    ledger_of(folder, "running")
    (folder / ".reserve").touch()
    run_sheets.show(tmp_path, active=False, again=False, as_json=True)
    row = json.loads(capsys.readouterr().out)
    assert (row["state"], row["trials"], row["active"]) == ("unknown to slurm", ["interrupted"], False)
    assert "no last word: its batch script was killed" in row["reason"]


@pytest.mark.parametrize(
    ("status", "reserve", "state", "died"),
    [
        (None, True, "NODE_FAIL", True),
        (None, True, "RUNNING", False),
        (None, False, "CANCELLED", False),
        (DONE, True, "COMPLETED", False),
    ],
)
def test_a_batch_script_that_was_killed_is_known_by_what_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None, reserve: bool, state: str, died: bool
) -> None:
    states = {"RUNNING": JobState.running, "COMPLETED": JobState.completed}
    folder = with_job(tmp_path, monkeypatch, {"7": Job(id="7", state=states.get(state, JobState.failed), word=state)})
    if status:
        (folder / "status.json").write_text(status)
    if reserve:
        (folder / ".reserve").touch()
    assert runs.find(folder).has_died == died


def test_without_its_backend_a_run_is_not_said_to_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the laptop that the folders were copied to."""
    folder = with_job(tmp_path, monkeypatch, {})
    monkeypatch.setattr(runs.backends, "get", lambda name: SimpleNamespace(is_here=lambda: False))
    ledger_of(folder, "running")
    (folder / ".reserve").touch()
    run = runs.find(folder)
    assert run.word == "unknown: slurm cannot be asked here" and not run.has_died


def test_a_run_that_never_had_a_job_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is no number of a job, and squeue refuses a question that holds one."""
    for name in ("lost", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text('{"backend": "slurm", "jobs": []}')
    with_job(tmp_path / "other", monkeypatch, {})
    asked: list[str] = []

    def states(self: SlurmBackend, ids: Sequence[str]) -> dict[str, Job]:
        asked.extend(ids)
        return {}

    monkeypatch.setattr(SlurmBackend, "states", states)
    monkeypatch.setattr(SlurmBackend, "is_here", lambda self: True)
    monkeypatch.setattr(runs.backends, "get", lambda name: SlurmBackend())
    assert [run.word for run in runs.below(tmp_path)] == ["no job", "unknown to slurm"]
    assert asked == ["7"]


@pytest.mark.parametrize(("word", "rule"), [("NODE_FAIL", "RUN-07"), ("RUNNING", None)])
def test_why_does_not_take_a_fresh_log_for_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, rule: str | None
) -> None:
    state = JobState.running if word == "RUNNING" else JobState.failed
    folder = with_job(tmp_path, monkeypatch, {"7": Job(id="7", state=state, word=word)})
    (folder / ".reserve").touch()
    with mllog.Writer(folder / "result_0.txt") as log:
        log.start(mllog.INIT_START)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        log.event(mllog.TRAIN_LOSS, 1.5, samples_count=8, lr=1e-4)
    assert explain([folder]).rule == rule


@pytest.mark.parametrize(
    ("job", "word"),
    [
        ('{"backend": "flux", "jobs": []}', "unknown: flux cannot be asked here"),
        ('{"backend": ["slurm"], "jobs": [{"id": "7"}]}', "unknown: ['slurm'] cannot be asked here"),
        ('{"backend": "local", "jobs": [{"nr": 1}, "x", {"id": null}]}', "ended"),
        ('{"backend": "local", "jobs": null}', "ended"),
        ('{"backend": "local", "jobs": 5}', "ended"),
    ],
)
def test_an_odd_job_json_does_not_hide_other_runs(tmp_path: Path, job: str, word: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "job.json").write_text(job)
    ledger_of(tmp_path / "b", "proven")
    assert [run.word for run in runs.below(tmp_path)] == [word, "ended"]


def test_a_run_of_a_backend_that_does_not_exist_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"backend": "flux", "jobs": []}')
    with pytest.raises(ConfigError, match="there is no backend flux; there are local, "):
        resume.resume(tmp_path)


@pytest.mark.parametrize("kind", [ConfigError, SubmitError])
def test_a_backend_that_cannot_be_asked_does_not_hide_the_runs_of_others(
    kind: type[BenchError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its context is gone from the kubeconfig, or its server is down. Only who must know is refused."""

    def states(ids: Sequence[str]) -> dict[str, Job]:
        raise kind("no API server to ask", where="the kubeconfig", fix="set KUBECONFIG")

    gone, local = SimpleNamespace(is_here=lambda: True, states=states), backends.get(BackendName.local)
    monkeypatch.setattr(runs.backends, "get", lambda name: local if name is BackendName.local else gone)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "job.json").write_text('{"backend": "kubernetes", "jobs": [{"id": "job/default/r-x-1@prod"}]}')
    ledger_of(tmp_path / "b", "proven")
    assert [run.word for run in runs.below(tmp_path)] == ["unknown: kubernetes cannot be asked here", "ended"]
    assert "kubernetes cannot be asked where its runs stand: no API server to ask" in caplog.text
    for ask in (lambda: runs.below(tmp_path, must_answer=True), lambda: runs.find(tmp_path / "a")):
        with pytest.raises(kind, match="no API server to ask"):
            ask()
    assert session._known(tmp_path, ask=False) == runs.below(tmp_path)
    with pytest.raises(kind):
        session._known(tmp_path, ask=True)
