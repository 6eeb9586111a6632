"""The state of a run, from its folder and its backend."""

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
from helpers import answers

PLAN = compose.compose(["task=lora_tiny", "cluster=local"])


def with_job(folder: Path, monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Job]) -> Path:
    """Write the folder of a run whose newest job is 7, with a backend that has the given jobs."""
    (folder / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "6"}, {"id": "7"}]}))
    backend = SimpleNamespace(is_available=lambda: True, states=lambda ids: known)
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
def test_without_a_final_status_the_exit_code_follows_from_the_job_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, JobState], exit_code: int
) -> None:
    known = {id: Job(id=id, state=state, native_state=state.name.upper()) for id, state in states.items()}
    assert runs.exit_code(with_job(tmp_path, monkeypatch, known)) == exit_code


def test_the_final_status_takes_precedence_over_the_job_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_job(tmp_path, monkeypatch, {"7": Job(id="7", state=JobState.completed, native_state="COMPLETED")})
    (folder / "status.json").write_text('{"outcome": "failed", "exit_code": 143, "what": "cancelled"}')
    assert runs.exit_code(folder) == 143


DONE = '{"outcome": "valid", "exit_code": 0, "what": "every trial completed the requested work"}'


def test_a_job_is_waited_for_after_its_final_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container is still being removed: it has ended once its backend reports so."""
    known = {"7": Job(id="7", state=JobState.running, native_state="RUNNING")}
    folder, native_states = with_job(tmp_path, monkeypatch, known), iter(["COMPLETING", "COMPLETED"])
    (folder / "status.json").write_text(DONE)

    def later(seconds: float) -> None:
        native_state = next(native_states)
        state = JobState.completed if native_state == "COMPLETED" else JobState.running
        known["7"] = Job(id="7", state=state, native_state=native_state)

    monkeypatch.setattr(runs.time, "sleep", later)
    assert [job.native_state for job in runs.wait(folder)] == ["RUNNING", "COMPLETING", "COMPLETED"]
    assert [job.native_state for job in runs.wait(folder, started=True)] == ["COMPLETED"]


@pytest.mark.parametrize(("left", "suffix"), [("COMPLETING", " (job 7 is still COMPLETING)"), (None, "")])
def test_following_a_job_ends_with_its_outcome(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: str | None,
    suffix: str,
) -> None:
    """A job that does not end is reported; a job that its backend does not know has ended."""
    known = {"7": Job(id="7", state=JobState.running, native_state=left)} if left else {}
    folder = with_job(tmp_path, monkeypatch, known)
    (folder / "status.json").write_text(DONE)
    (folder / "plan.json").write_text(plan_kinds.dumps(PLAN))
    monkeypatch.setattr(runs, "ENDS_S", 0.0)
    assert start.follow(PLAN, folder, sheet.to_stderr()) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"valid: every trial completed the requested work{suffix}"


def ledger_of(folder: Path, outcome: str) -> None:
    (folder / "ledger.json").write_text(json.dumps([{"trial": 0, "seed": 1, "outcome": outcome}]))


def test_a_job_unknown_to_its_backend_is_shown_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    folder = with_job(tmp_path / "run", monkeypatch, {})
    ledger_of(folder, "running")
    (folder / ".reserve").touch()
    run_sheets.show(tmp_path, active=False, watch=False, as_json=True)
    row = answers.one(capsys.readouterr().out)
    assert (row["state"], row["outcomes"], row["is_active"]) == ("unknown to slurm", ["interrupted"], False)
    assert "no final status: the batch script was killed" in row["reason"]


def test_a_killed_run_of_this_machine_names_its_process_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    ledger_of(folder, "running")
    (folder / ".reserve").touch()
    run_sheets.show(tmp_path, active=False, watch=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["reason"] == (
        "no final status: the process that drove the run was killed, or its machine failed; to continue: "
        f"runstop resume '{folder}'"
    )


@pytest.mark.parametrize(
    ("status", "reserve", "state", "died"),
    [
        (None, True, "NODE_FAIL", True),
        (None, True, "RUNNING", False),
        (None, False, "CANCELLED", False),
        (DONE, True, "COMPLETED", False),
    ],
)
def test_a_killed_batch_script_is_detected_by_its_reserve_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None, reserve: bool, state: str, died: bool
) -> None:
    states = {"RUNNING": JobState.running, "COMPLETED": JobState.completed}
    folder = with_job(
        tmp_path, monkeypatch, {"7": Job(id="7", state=states.get(state, JobState.failed), native_state=state)}
    )
    if status:
        (folder / "status.json").write_text(status)
    if reserve:
        (folder / ".reserve").touch()
    assert runs.find(folder).has_died == died


def test_without_its_backend_a_run_does_not_count_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a laptop to which the folders were copied."""
    folder = with_job(tmp_path, monkeypatch, {})
    monkeypatch.setattr(runs.backends, "get", lambda name: SimpleNamespace(is_available=lambda: False))
    ledger_of(folder, "running")
    (folder / ".reserve").touch()
    run = runs.find(folder)
    assert run.state_name == "unknown: slurm cannot be queried here" and not run.has_died


def test_a_run_without_a_job_does_not_hide_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is not a job id, and squeue refuses a query with an invalid id."""
    for name in ("lost", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text('{"backend": "slurm", "jobs": []}')
    with_job(tmp_path / "other", monkeypatch, {})
    queried: list[str] = []

    def states(self: SlurmBackend, ids: Sequence[str]) -> dict[str, Job]:
        queried.extend(ids)
        return {}

    monkeypatch.setattr(SlurmBackend, "states", states)
    monkeypatch.setattr(SlurmBackend, "is_available", lambda self: True)
    monkeypatch.setattr(runs.backends, "get", lambda name: SlurmBackend())
    assert [run.state_name for run in runs.below(tmp_path)] == ["no job", "unknown to slurm"]
    assert queried == ["7"]


@pytest.mark.parametrize(("native_state", "rule"), [("NODE_FAIL", "RUN-07"), ("RUNNING", None)])
def test_why_does_not_take_a_fresh_log_for_a_running_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_state: str, rule: str | None
) -> None:
    state = JobState.running if native_state == "RUNNING" else JobState.failed
    folder = with_job(tmp_path, monkeypatch, {"7": Job(id="7", state=state, native_state=native_state)})
    (folder / ".reserve").touch()
    with mllog.Writer(folder / "result_0.txt") as log:
        log.start(mllog.INIT_START)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        log.event(mllog.TRAIN_LOSS, 1.5, samples_count=8, lr=1e-4)
    assert explain([folder]).rule == rule


@pytest.mark.parametrize(
    ("job", "native_state"),
    [
        ('{"backend": "flux", "jobs": []}', "unknown: flux cannot be queried here"),
        ('{"backend": ["slurm"], "jobs": [{"id": "7"}]}', "unknown: ['slurm'] cannot be queried here"),
        ('{"backend": "local", "jobs": [{"nr": 1}, "x", {"id": null}]}', "ended"),
        ('{"backend": "local", "jobs": null}', "ended"),
        ('{"backend": "local", "jobs": 5}', "ended"),
    ],
)
def test_a_malformed_job_json_does_not_hide_other_runs(tmp_path: Path, job: str, native_state: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "job.json").write_text(job)
    ledger_of(tmp_path / "b", "valid")
    assert [run.state_name for run in runs.below(tmp_path)] == [native_state, "ended"]


def test_a_run_of_an_unknown_backend_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"backend": "flux", "jobs": []}')
    with pytest.raises(
        ConfigError, match="the run uses the backend flux, but this version of runstop has only the backends local, "
    ):
        resume.resume(tmp_path)


@pytest.mark.parametrize("kind", [ConfigError, SubmitError])
def test_a_backend_that_cannot_be_queried_does_not_hide_other_runs(
    kind: type[BenchError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its context is not in the kubeconfig, or its server is down. Only calls that need its answer fail."""

    def states(ids: Sequence[str]) -> dict[str, Job]:
        raise kind("no API server", where="the kubeconfig", fix="set KUBECONFIG", rule="KUB-12")

    gone, local = SimpleNamespace(is_available=lambda: True, states=states), backends.get(BackendName.local)
    monkeypatch.setattr(runs.backends, "get", lambda name: local if name is BackendName.local else gone)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "job.json").write_text('{"backend": "kubernetes", "jobs": [{"id": "job/default/r-x-1@prod"}]}')
    ledger_of(tmp_path / "b", "valid")
    assert [run.state_name for run in runs.below(tmp_path)] == ["unknown: kubernetes cannot be queried here", "ended"]
    assert "the states of runs are unknown, because kubernetes cannot be queried: KUB-12: no API server" in caplog.text
    codes = [run_sheets.show(tmp_path, active=active, watch=False, as_json=False) for active in (False, True)]
    assert codes == [1, 1]
    listed, active = capsys.readouterr().out.split("runs in ")[1:]
    assert "queued or running: 0, not known: 1" in listed and "runs: 1, queued or running: 0, not known: 1" in active
    (tmp_path / "a" / "status.json").write_text('{"outcome": "valid", "exit_code": 0}')
    assert run_sheets.show(tmp_path, active=False, watch=False, as_json=False) == 0, (
        "this run has ended, whatever its backend says"
    )
    for query in (lambda: runs.below(tmp_path, must_answer=True), lambda: runs.find(tmp_path / "a")):
        with pytest.raises(kind, match="no API server"):
            query()
    assert session._known(tmp_path, must_query=False) == runs.below(tmp_path)
    with pytest.raises(kind):
        session._known(tmp_path, must_query=True)
