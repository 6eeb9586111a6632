"""Runs of a study in turn: each once a call, and none while a job of another one is under way."""

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
    """Where a run stands."""

    folder: Path
    has_job: bool = False


@dataclass
class Study:
    """A session of runs that take notes; those in `queues` are handed to Slurm, and have a job once they were."""

    runs: dict[str, One]
    queues: set[str]
    notes: list[str] = field(default_factory=list)
    announced: list[list[str]] = field(default_factory=list)

    def standings(self) -> Any:
        self.notes.append("?")
        return self

    def left(self, standings: object) -> list[One]:
        assert standings is self
        return [one for one in self.runs.values() if not one.has_job]

    def backend_of(self, one: One) -> BackendName:
        return BackendName.slurm if one.folder.name in self.queues else BackendName.local


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    made = Study({name: One(tmp_path / "[bold]" / name) for name in ("a.1", "b.1", "a.2")}, queues={"b.1"})
    made.runs["a.2"].has_job = True

    def announce(session: object, todo: One, standings: object) -> None:
        assert session is made and standings is made
        made.announced.append([name for name, one in made.runs.items() if one.has_job])

    def attempt(session: object, todo: One, work: object) -> None:
        made.notes.append(f"{'submits' if work is run_missing.submit_one else 'begins'} {todo.folder.name}")
        assert work in (run_missing.submit_one, run_missing.begin_or_resume)
        todo.has_job = work is run_missing.submit_one

    def wait(folder: Path) -> Iterator[Job]:
        made.notes.append(f"waits for {folder.name}")
        yield Job(id="7", state=JobState.queued, word="pending", reason="Priority [1]")
        yield Job(id="7", state=JobState.running, word="running")
        made.runs[folder.name].has_job = False
        made.runs[folder.name].folder = folder

    monkeypatch.setattr(run_missing, "announce", announce)
    monkeypatch.setattr(run_missing, "attempt", attempt)
    monkeypatch.setattr(runs, "wait", wait)
    return made


def test_a_job_is_followed_to_its_end_before_the_next_run_begins(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    run_missing.run_sequentially(cast(Session, study))
    assert study.notes == [
        *("?", "waits for a.2", "?", "begins a.1"),
        *("?", "submits b.1", "?", "waits for b.1", "?", "begins a.2", "?"),
    ], "each at most once, whatever came of it"
    assert study.announced == [[]] * 3
    said = [f"{name}: {what}" for name in ("a.2", "b.1") for what in ("pending: Priority [1]", "running")]
    assert capsys.readouterr().err.splitlines() == said


def test_who_stops_the_call_does_not_stop_the_job(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(folder: Path) -> Iterator[Job]:
        raise Stopped(2)

    monkeypatch.setattr(runs, "wait", stopped)
    with pytest.raises(Stopped):
        run_missing.run_sequentially(cast(Session, study))
    assert study.notes == ["?"] and not study.announced
    said = capsys.readouterr().err
    assert said.startswith("the job goes on; python -m bench cancel ") and said.endswith("/[bold]/a.2 ends it\n")


def test_a_job_that_nobody_knows_any_more_has_ended(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(folder: Path) -> Iterator[Job]:
        study.runs[folder.name].has_job = False
        raise SubmitError("no such job", where="squeue", fix="look")

    monkeypatch.setattr(runs, "wait", unknown)
    run_missing.run_sequentially(cast(Session, study))
    assert [note for note in study.notes if note != "?"] == ["begins a.1", "submits b.1", "begins a.2"]
    assert capsys.readouterr().err == "no such job\n  where: squeue\n  fix:   look\n" * 2
