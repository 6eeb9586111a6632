"""Sequential runs of a study: each at most once per call, and none while another job is active."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from bench.backends.protocol import Job, JobState
from bench.contract.schema import BackendName
from bench.errors import Stopped, SubmitError
from bench.runs import run as runs
from bench.studies import run_missing
from bench.studies.session import Session


@dataclass
class One:
    """The state of a run."""

    folder: Path
    has_job: bool = False


@dataclass
class Study:
    """A session that records calls; the runs in `queues` are submitted to Slurm and then have a job."""

    runs: dict[str, One]
    queues: set[str]
    notes: list[str] = field(default_factory=list)
    announced: list[list[str]] = field(default_factory=list)

    def statuses(self) -> Any:
        self.notes.append("?")
        return self

    def left(self, statuses: object) -> list[One]:
        assert statuses is self
        return [one for one in self.runs.values() if not one.has_job]

    def backend_of(self, one: One) -> BackendName:
        return BackendName.slurm if one.folder.name in self.queues else BackendName.local


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    session_stub = Study({name: One(tmp_path / "[bold]" / name) for name in ("a.1", "b.1", "a.2")}, queues={"b.1"})
    session_stub.runs["a.2"].has_job = True

    def announce(session: object, todo: One, statuses: object) -> None:
        assert session is session_stub and statuses is session_stub
        session_stub.announced.append([name for name, one in session_stub.runs.items() if one.has_job])

    def attempt(session: object, todo: One, work: object) -> None:
        session_stub.notes.append(f"{'submits' if work is run_missing.submit_one else 'begins'} {todo.folder.name}")
        assert work in (run_missing.submit_one, run_missing.begin_or_resume)
        todo.has_job = work is run_missing.submit_one

    def wait(folder: Path) -> Iterator[Job]:
        session_stub.notes.append(f"waits for {folder.name}")
        yield Job(id="7", state=JobState.queued, native_state="pending", reason="Priority [1]")
        yield Job(id="7", state=JobState.running, native_state="running")
        session_stub.runs[folder.name].has_job = False
        session_stub.runs[folder.name].folder = folder

    monkeypatch.setattr(run_missing, "announce", announce)
    monkeypatch.setattr(run_missing, "attempt", attempt)
    monkeypatch.setattr(runs, "wait", wait)
    return session_stub


def test_a_job_is_waited_for_before_the_next_run_starts(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    run_missing.run_sequentially(cast(Session, study))
    assert study.notes == [
        *("?", "waits for a.2", "?", "begins a.1"),
        *("?", "submits b.1", "?", "waits for b.1", "?", "begins a.2", "?"),
    ], "each at most once, whatever its outcome"
    assert study.announced == [[]] * 3
    output = [f"{name}: {what}" for name in ("a.2", "b.1") for what in ("pending: Priority [1]", "running")]
    assert capsys.readouterr().err.splitlines() == output


def test_stopping_the_call_does_not_stop_the_job(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(folder: Path) -> Iterator[Job]:
        raise Stopped(2)

    monkeypatch.setattr(runs, "wait", stopped)
    with pytest.raises(Stopped):
        run_missing.run_sequentially(cast(Session, study))
    assert study.notes == ["?"] and not study.announced
    output = capsys.readouterr().err
    assert output.startswith("the job keeps running; to cancel it: runstop cancel ") and output.endswith(
        "/[bold]/a.2'\n"
    )


def test_a_job_that_its_backend_does_not_know_has_ended(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(folder: Path) -> Iterator[Job]:
        study.runs[folder.name].has_job = False
        raise SubmitError("no such job", where="squeue", fix="look")

    monkeypatch.setattr(runs, "wait", unknown)
    run_missing.run_sequentially(cast(Session, study))
    assert [note for note in study.notes if note != "?"] == ["begins a.1", "submits b.1", "begins a.2"]
    assert capsys.readouterr().err == "no such job\n  where: squeue\n  fix:   look\n" * 2
