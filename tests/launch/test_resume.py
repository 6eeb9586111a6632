"""Resume and cancel: after any failure the run folder is unchanged."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench import diagnosis
from bench.backends import run_lock
from bench.backends.local import LocalBackend
from bench.backends.slurm import jobs as slurm_jobs
from bench.backends.slurm.backend import SlurmBackend
from bench.contract import plan_kinds
from bench.contract.run_files import DISK_RESERVE, JOB, LEDGER, MANIFEST, STATUS, SUBMISSION
from bench.driver import between_commands, drive
from bench.errors import BenchError, ConfigError, Stopped, SubmitError
from bench.launch import resume, start
from bench.planning import compose
from bench.runs import folder as folders
from bench.runs import ledger, manifest
from bench.runs import run as runs
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from helpers.failing_disk import contents, failing
from helpers.ranks import mounted
from helpers.slurm_stubs import Slurm

PLAN = compose.compose(["task=lora_tiny", "cluster=local", "trials=2"])
Screen = pytest.CaptureFixture[str]
MAX_OPERATIONS = 60
"""More than any command needs; reached only by an endless loop."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name in ("DATADIR", "MODEL", "LOGDIR", "CONT"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    slurm = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{slurm.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(runs, "POLL_S", 0.01)
    return slurm


@pytest.fixture
def ended(tmp_path: Path, slurm: Slurm) -> Path:
    """A run of two trials on Slurm whose job 7 has ended: one trial is valid, the other aborted."""
    folder = tmp_path / "runs" / "run"
    (folder / "rank_logs").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(PLAN))
    (folder / "job.sbatch").write_text("#!/bin/bash\n")
    (folder / JOB).write_text('{"backend": "slurm", "jobs": [{"id": "7", "submitted": 1.0}], "arguments": ["-A", "x"]}')
    ledger.create(folder, PLAN)
    for trial, outcome in ((0, Outcome.valid), (1, Outcome.aborted)):
        ledger.begin(folder, PLAN.trials[trial], attempts=3, job="7")
        ledger.end(folder, trial, outcome)
    (folder / LEDGER).write_text((folder / LEDGER).read_text() + "\n")  # as another version might format it
    (folder / "result_0.txt").write_text("a result")
    statuses.write(folder, Status(outcome=Ending.failed, exit_code=1, what="trial 1 failed"))
    return folder


def recorded_jobs(folder: Path) -> list[str]:
    return [entry["id"] for entry in json.loads((folder / JOB).read_text())["jobs"]]


def at_each_operation(root: Path, verb: Callable[[], object]) -> Iterator[tuple[str, BenchError | None]]:
    """Let each file operation of a command fail, one after another; yield the operation and the command's error.

    The folder is restored before the next one.
    """
    kept = root.with_name(f"{root.name}.kept")
    shutil.copytree(root, kept, symlinks=True)
    for number in range(MAX_OPERATIONS):
        ended = None
        with failing(root, number) as disk:
            try:
                verb()
            except BenchError as error:
                ended = error
        if not disk.failed:
            assert ended is None and number > 0
            return
        yield disk.failed, ended
        shutil.rmtree(root)
        shutil.copytree(kept, root, symlinks=True)
    raise AssertionError("the command never succeeded")


@pytest.mark.long
def test_a_resume_with_a_failing_disk_changes_nothing_or_reports_the_job(ended: Path, slurm: Slurm) -> None:
    (ended / DISK_RESERVE).write_bytes(b"\0")
    before, submitted = contents(ended), 0
    for failed, error in at_each_operation(ended, lambda: resume.resume(ended)):
        if error is None:  # only the cleanup failed
            assert recorded_jobs(ended) == ["7", "100"], failed
        elif "job 100 was submitted" in str(error):
            submitted += 1
            assert runs.find(ended).is_active and runs.find(ended).id == "100"
            (ended / SUBMISSION).unlink()
            assert contents(ended) == before, failed
        else:
            assert "No space left" in str(error) and contents(ended) == before, failed
            assert not list(slurm.queue.iterdir()), failed
        slurm.clear_queue()
    assert submitted == 3, "opening, syncing and renaming job.json"
    assert recorded_jobs(ended) == ["7", "100"] and statuses.read(ended) is None
    assert [entry.outcome for entry in ledger.read(ended)] == [Outcome.valid, Outcome.interrupted]
    assert not {SUBMISSION, DISK_RESERVE, f"{DISK_RESERVE}.old"} & {path.name for path in ended.iterdir()}


REFUSALS = {
    "refused": ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", "Invalid account"),
    "a bad argument": ("echo 'sbatch: unrecognized option --exclud' >&2; exit 1", "unrecognized option"),
    "killed": ("kill -9 $$", "sbatch"),
    "no program": ("exit 127", "sbatch"),
}


@pytest.mark.long
@pytest.mark.parametrize("how", REFUSALS)
def test_a_refused_resume_changes_nothing_and_can_be_tried_again(
    ended: Path, slurm: Slurm, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, message = REFUSALS[how]
    (ended / DISK_RESERVE).write_bytes(b"\0")
    before = contents(ended)
    slurm.stub("sbatch", script)
    if how == "killed":  # on a file system without hard links
        monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    with pytest.raises(SubmitError, match=message if how != "killed" else None):
        resume.resume(ended, walltime_min=7, arguments=["--exclud=dgx-7"])
    assert contents(ended) == before
    slurm.stub("sbatch", "echo 100", queues=True)
    assert resume.resume(ended) == 0 and recorded_jobs(ended) == ["7", "100"]
    (arguments,) = (slurm.queue / "100").read_text().splitlines()
    assert arguments == f"--parsable -A x {ended}/job.sbatch {ended}"


LOST = {
    "no answer in time": "exec sleep 30",
    "the controller's answer is lost": "echo 'Batch job submission failed: Socket timed out on send/recv' >&2; exit 1",
    "garbage": "echo 'Welcome to the cluster!'",
    "fails after it has submitted": "echo 'a plugin failed' >&2; exit 1",
}


def _answer_soon(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Wait a short time for an sbatch that never answers; one that answers has the usual time."""
    if how == "no answer in time":
        monkeypatch.setattr(slurm_jobs, "SBATCH_S", 0.3)


@pytest.mark.parametrize("how", LOST)
def test_a_job_whose_id_is_lost_is_found_in_the_queue(
    ended: Path, slurm: Slurm, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answer_soon(monkeypatch, how)
    slurm.stub("sbatch", LOST[how], queues=True)
    assert resume.resume(ended) == 0
    assert recorded_jobs(ended) == ["7", "100"] and not (ended / SUBMISSION).exists()


@pytest.mark.long
@pytest.mark.parametrize("how", list(LOST)[:3])
def test_a_job_that_may_exist_is_looked_up_whenever_the_run_is(
    ended: Path, slurm: Slurm, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is lost, and the job appears in the queue later."""
    slurm.stub("sbatch", LOST[how])
    before = contents(ended)
    with monkeypatch.context() as patched:
        _answer_soon(patched, how)
        with pytest.raises(SubmitError, match="the job may exist anyway"):
            resume.resume(ended)
    (note,) = contents(ended).keys() - before.keys()
    assert note == SUBMISSION and contents(ended).items() >= before.items()
    assert not runs.find(ended).is_active
    (slurm.queue / "100").write_text(f"--parsable {ended}/job.sbatch {ended}")
    (slurm.queue / "101").write_text(f"--parsable {ended}/job.sbatch {ended}-of-another-name")
    run = runs.find(ended)
    assert (run.id, run.is_active) == ("100", True)
    with pytest.raises(ConfigError, match="job 100 is PENDING"):
        resume.resume(ended)
    assert resume.cancel(ended) == "100" and (slurm.queue / "101").exists()
    slurm.stub("sbatch", "echo 102")
    assert resume.resume(ended) == 0 and recorded_jobs(ended) == ["7", "102"] and not (ended / SUBMISSION).exists()


@pytest.mark.starts
def test_of_two_resumes_at_once_one_submits(ended: Path, slurm: Slurm, spawn: Callable[..., object]) -> None:
    """The second one is refused while the first one submits; it does not wait for the lock."""
    slurm.stub("sbatch", f"until [[ -e {slurm.bin}/go ]]; do read -rt 0.05 <> <(:); done; echo 100", queues=True)
    first = spawn([sys.executable, "-m", "bench", "resume", str(ended)], {"PATH": os.environ["PATH"]})
    assert isinstance(first, subprocess.Popen)
    while not slurm.num_calls("sbatch"):
        assert first.poll() is None, first.communicate()[0]
    slurm.clear_queue()
    during = contents(ended)
    with pytest.raises(ConfigError, match="another process is resuming this run"):
        resume.resume(ended)
    assert contents(ended) == during
    (slurm.bin / "go").touch()
    assert first.wait(60) == 0
    assert recorded_jobs(ended) == ["7", "100"] and slurm.num_calls("sbatch") == 1


@pytest.mark.parametrize("how", ["exit 1", "echo 'scancel: error: Access denied' >&2; exit 1"])
def test_a_cancel_that_slurm_refuses_changes_nothing(ended: Path, slurm: Slurm, how: str) -> None:
    resume.resume(ended)
    before = contents(ended)
    slurm.stub("scancel", how)
    with pytest.raises(SubmitError, match="scancel failed" if how == "exit 1" else "Access denied"):
        resume.cancel(ended)
    assert contents(ended) == before and runs.find(ended).is_active


@pytest.mark.long
def test_a_cancel_with_a_failing_disk_reports_that_the_job_was_cancelled(ended: Path, slurm: Slurm) -> None:
    resume.resume(ended)
    before, queued = contents(ended), (slurm.queue / "100").read_text()
    for failed, error in at_each_operation(ended, lambda: resume.cancel(ended)):
        assert "job 100 was cancelled, but its status could not be written" in str(error), failed
        assert contents(ended) == before, failed
        (slurm.queue / "100").write_text(queued)
    assert statuses.read(ended) is not None


@pytest.mark.long
def test_a_cancelled_run_cannot_be_cancelled_again(ended: Path, slurm: Slurm) -> None:
    resume.resume(ended)
    assert resume.cancel(ended) == "100"
    before = contents(ended)
    with pytest.raises(ConfigError, match="nothing to cancel: the run has ended .interrupted"):
        resume.cancel(ended)
    assert contents(ended) == before and slurm.num_calls("scancel") == 1


def test_a_run_whose_job_is_completing_cannot_be_resumed(ended: Path, slurm: Slurm) -> None:
    before = contents(ended)
    slurm.stub("squeue", "echo '7|COMPLETING|None|dgx-0|0|0:10|1:00:00|N/A|'")
    with pytest.raises(ConfigError, match="job 7 is COMPLETING"):
        resume.resume(ended)
    assert contents(ended) == before and not slurm.num_calls("sbatch")


@pytest.fixture
def finished(ended: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, but both trials are valid."""
    ledger.end(ended, 1, Outcome.valid)
    between_commands.finish_run(ended, PLAN)
    return ended


@pytest.mark.parametrize("lacks", [[MANIFEST], [MANIFEST, STATUS]], ids=["manifest", "status"])
def test_a_run_that_was_killed_at_its_very_end_is_finished_without_a_job(
    finished: Path, slurm: Slurm, lacks: list[str]
) -> None:
    for name in lacks:
        (finished / name).unlink()
    assert resume.resume(finished) == 0 and not slurm.num_calls("sbatch")
    status = statuses.read(finished)
    assert status is not None and status.outcome is Ending.valid and manifest.read(finished) is not None
    with pytest.raises(ConfigError, match="all trials have finished; there is nothing to resume"):
        resume.resume(finished)


def test_a_run_without_its_ledger_is_refused_before_a_job(ended: Path, slurm: Slurm) -> None:
    (ended / LEDGER).unlink()
    before = contents(ended)
    with pytest.raises(
        ConfigError, match="ledger.json is missing, so runstop cannot find out which trials have finished"
    ):
        resume.resume(ended)
    assert contents(ended) == before and not slurm.num_calls("sbatch")


def test_a_launch_that_was_killed_before_its_run_began(ended: Path, slurm: Slurm) -> None:
    """With its plan a run here continues; before that, and before a job, resume says that nothing was started."""
    for name in (JOB, LEDGER, "status.json", "result_0.txt", "job.sbatch", ".ledger.lock"):
        (ended / name).unlink()
    shutil.rmtree(ended / "rank_logs")
    (ended / "rank_logs").mkdir()
    assert runs.find(ended).backend.name == "local", "as in the plan"
    queued = compose.compose(["task=lora_tiny", "cluster=slurm_test"])
    (ended / "plan.json").write_text(plan_kinds.dumps(queued))
    with pytest.raises(
        ConfigError, match="there is nothing to resume, because the launch was killed before it submitted a job"
    ):
        resume.resume(ended)
    (ended / "plan.json").unlink()
    with pytest.raises(
        ConfigError, match="the launch was killed before it wrote plan.json, so the run has not started"
    ):
        resume.resume(ended)


def test_commands_in_a_fix_name_the_folder_where_it_is_and_quote_it(ended: Path, slurm: Slurm) -> None:
    resume.resume(ended)
    resume.cancel(ended)
    moved = ended.rename(ended.with_name("the run's new name"))
    status = statuses.read(moved)
    assert status is not None and status.fix == f"to continue: runstop resume {shlex.quote(str(moved))}"
    assert diagnosis.explain([moved]).fix == status.fix


def test_ctrl_c_during_sbatch_says_that_a_job_may_be_queued(
    tmp_path: Path, slurm: Slurm, launched: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    def interrupted(*words: object, **more: object) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(slurm_jobs.client, "run", interrupted)
    with pytest.raises(Stopped):
        launched()
    folder, printed = tmp_path / "runs/new", capsys.readouterr().err
    assert "interrupted while the job was being submitted: the job may be queued" in printed
    assert f"runstop runs {folder.parent} " in printed and f"runstop cancel {folder} " in printed
    monkeypatch.setattr(slurm_jobs, "prepare", interrupted)
    shutil.rmtree(folder)
    with pytest.raises(Stopped):
        launched()
    assert not folder.exists(), "nothing was submitted"


def test_an_unreachable_queue_changes_nothing(ended: Path, slurm: Slurm) -> None:
    before = contents(ended)
    slurm.stub("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    for verb in (resume.resume, resume.cancel):
        with pytest.raises(SubmitError, match="Unable to contact"):
            verb(ended)
    assert contents(ended) == before and not slurm.num_calls("sbatch")


# launch


@pytest.fixture
def launched(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that submits a run in the folder `new`, next to another run's folder."""
    (tmp_path / "runs" / "other").mkdir(parents=True)
    plan = replace(PLAN, config=replace(PLAN.config, launch=replace(PLAN.config.launch, folder=f"{tmp_path}/runs/new")))
    monkeypatch.setattr(slurm_jobs.script, "script", lambda plan: "#!/bin/bash\n")

    def launch() -> int:
        return start.run_queued(
            SlurmBackend(), start.Prepared(plan=plan, folder=folders.make(plan, "trials: 2\n"), findings=[])
        )

    return launch


@pytest.mark.long
def test_a_launch_with_a_failing_disk_leaves_no_folder(
    tmp_path: Path, slurm: Slurm, launched: Callable[[], int]
) -> None:
    root, submitted = tmp_path / "runs", 0
    before = contents(root)
    for failed, error in at_each_operation(root, launched):
        if error is None or "job 100 was submitted" in str(error):
            assert runs.find(root / "new").id == "100", failed
            submitted += 1
        else:
            assert "No space left" in str(error) and contents(root) == before, failed
            assert not list(slurm.queue.iterdir()), failed
        slurm.clear_queue()
    assert submitted == 4 and recorded_jobs(root / "new") == ["100"]


@pytest.mark.parametrize("how", REFUSALS)
def test_a_refused_launch_leaves_no_folder(tmp_path: Path, slurm: Slurm, launched: Callable[[], int], how: str) -> None:
    before = contents(tmp_path / "runs")
    slurm.stub("sbatch", REFUSALS[how][0])
    with pytest.raises(SubmitError):
        launched()
    assert contents(tmp_path / "runs") == before
    slurm.stub("sbatch", "echo 100", queues=True)
    assert launched() == 0 and runs.find(tmp_path / "runs/new").id == "100"


def test_a_launch_whose_answer_is_lost_keeps_its_folder(
    tmp_path: Path, slurm: Slurm, launched: Callable[[], int]
) -> None:
    slurm.stub("sbatch", LOST["garbage"])
    with pytest.raises(SubmitError, match="may exist anyway"):
        launched()
    folder = tmp_path / "runs/new"
    assert runs.find(folder).state_name == "no job"
    slurm.stub("sbatch", "echo 100")
    assert resume.resume(folder) == 0 and recorded_jobs(folder) == ["100"]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_changes_nothing(ended: Path, slurm: Slurm, tmp_path: Path) -> None:
    """A real disk, with more and more free space: from none to the few blocks that are needed."""
    kept, refused = tmp_path / "kept", 0
    ended.rename(kept)
    for free in range(0, 40 * 1024, 4096):
        shutil.rmtree(ended.parent)
        with mounted(ended.parent, "size=256k"):
            shutil.copytree(kept, ended)
            before = contents(ended)
            with (ended.parent / "filler").open("wb", buffering=0) as filler, suppress(OSError):
                while True:
                    filler.write(bytes(4096))
            os.truncate(ended.parent / "filler", (ended.parent / "filler").stat().st_size - free)
            try:
                resume.resume(ended)
            except BenchError as error:
                refused += 1
                assert "No space left" in str(error)
                (ended / SUBMISSION).unlink(missing_ok=True)
                assert contents(ended) == before, free
            else:
                assert recorded_jobs(ended) == ["7", "100"]
        slurm.clear_queue()
    assert 1 < refused < 10


# on this machine


def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver run no command of a plan."""
    monkeypatch.setattr(LocalBackend, "nodes", lambda backend, plan, folder: nullcontext())
    for name in ("_before_trials", "_trial"):
        monkeypatch.setattr(drive, name, lambda *ignored: None)


@pytest.mark.long
def test_a_local_run_is_reopened_completely_or_not_at_all(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only until its ranks start."""
    (ended / JOB).unlink()
    before = contents(ended)
    nothing_runs(monkeypatch)
    for failed, error in at_each_operation(ended, lambda: resume.resume(ended)):
        printed = capsys.readouterr().err
        if contents(ended) != before:
            status = statuses.read(ended)
            assert status or "CFG-08: cannot write status.json" in printed, failed
            assert status is None or status.outcome is Ending.failed, failed
            assert [entry.outcome for entry in ledger.read(ended)] == [Outcome.valid, Outcome.interrupted], failed
        else:
            assert "No space left" in str(error), failed
    assert ledger.read(ended)[1].outcome is Outcome.interrupted


@pytest.mark.parametrize("place", [None, "/mnt/full/part"])
def test_a_write_error_names_the_file(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str | None
) -> None:
    """The file if the OSError names it, else the run folder."""

    def full(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", place)

    (ended / JOB).unlink()
    nothing_runs(monkeypatch)
    monkeypatch.setattr(drive, "_trial", full)
    assert resume.resume(ended) == 1
    assert f"CFG-08: cannot write: No space left on device\n  where: {place or ended}\n" in capsys.readouterr().err


def test_a_second_local_resume_changes_nothing(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ended / JOB).unlink()
    before = contents(ended)
    monkeypatch.setattr(resume, "_check_ended", lambda run: None)  # the first one started after this check
    with run_lock.driving(ended), pytest.raises(ConfigError, match="another process is already working on this run"):
        resume.resume(ended)
    assert contents(ended) == before
