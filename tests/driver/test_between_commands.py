"""The steps between commands: their exit codes, which job.sh uses, and the files that they write."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.contract import mllog, plan_kinds
from bench.contract.plan import Plan
from bench.driver import between_commands
from bench.planning import compose
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending
from bench.runs.verification import verify
from helpers.types import MakeLog

Step = Callable[..., int]
TWO_TRIALS = ["task=lora70b", "cluster=dgx1", "trials=2"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def step(run: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """Return a function that runs a step in a run folder of two trials, as job.sh does, and returns its exit code."""

    def run_step(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["between_commands", str(run), name, *arguments])
        with pytest.raises(SystemExit) as stop:
            between_commands.main()
        return int(str(stop.value.code))

    started(run)
    return run_step


def started(run: Path, *overrides: str) -> None:
    run.mkdir(exist_ok=True)
    (run / "plan.json").write_text(plan_kinds.dumps(compose.compose([*TWO_TRIALS, *overrides])))


def trained(run: Path, written_log: MakeLog, trial: int, **changes: object) -> None:
    """Write the log of a trial that ran as planned, except for the changes."""
    plan: Plan = plan_kinds.load(run / "plan.json")
    planned = {"seed": plan.trials[trial].seed, "submission_division": plan.submission.division}
    written_log(**planned | changes, binding=mllog.load(run, trial)).rename(run / plan.trials[trial].log)


def outcomes(run: Path) -> list[Outcome]:
    return [entry.outcome for entry in ledger.read(run)]


@pytest.mark.long
def test_a_run_whose_trials_are_all_valid(run: Path, step: Step, written_log: MakeLog) -> None:
    assert [step("open", "--job", "7"), step("open", "--job", "7"), step("open", "--job", "8")] == [0, 0, 0]
    job = json.loads((run / "job.json").read_text())
    assert (job["backend"], [entry["id"] for entry in job["jobs"]]) == ("slurm", ["7", "8"])
    for trial in ("0", "1"):
        assert step("begin", trial, "--job", "8", "--nodes", "dgx-0") == 0
        assert outcomes(run)[int(trial)] is Outcome.running
        trained(run, written_log, int(trial))
        assert step("judge", trial) == 0
        assert step("begin", trial, "--job", "8", "--nodes", "dgx-0") == between_commands.TRIAL_DONE
    assert not (run / "status.json").exists()
    assert step("close", "--exit-code", "0", "--what", "", "--trials", "0 1") == 0
    status = statuses.read(run)
    assert status is not None and (status.outcome, status.exit_code) == (Ending.valid, 0)
    assert step("open", "--job", "9") == 0
    assert statuses.read(run) is None, "the run is reopened"


@pytest.mark.long
def test_a_trial_that_misses_its_target_is_judged_and_fails_the_job(
    run: Path, step: Step, written_log: MakeLog
) -> None:
    step("open", "--job", "7")
    for trial, changes in enumerate(({}, {"evals": (0.95, 0.94)})):
        step("begin", str(trial), "--job", "7", "--nodes", "dgx-0")
        trained(run, written_log, trial, **changes)
    assert [step("judge", "0"), step("judge", "1")] == [0, 1]
    assert step("close", "--exit-code", "0", "--what", "training", "--trials", "0 1") == 1
    status = statuses.read(run)
    assert status is not None and (status.outcome, status.exit_code) == (Ending.invalid, 1)


@pytest.mark.long
def test_a_failed_job_aborts_its_running_trial_and_leaves_the_others_open(run: Path, step: Step) -> None:
    step("open", "--job", "7")
    step("begin", "0", "--job", "7", "--nodes", "dgx-0")
    assert step("close", "--exit-code", "143", "--what", "SLU-10: the time limit is near", "--trials", "0 1") == 1
    assert outcomes(run) == [Outcome.aborted, Outcome.planned]
    status = statuses.read(run)
    assert status is not None
    assert (status.outcome, status.exit_code, status.rule) == (Ending.failed, 143, "SLU-10")


@pytest.mark.long
def test_the_last_array_task_to_end_writes_the_status(run: Path, step: Step, written_log: MakeLog) -> None:
    """Each array task closes its own trial; the trial of a task that failed before it is aborted."""
    started(run, "launch.array=true")
    step("open", "--job", "7")
    step("begin", "0", "--job", "7", "--nodes", "dgx-0")
    trained(run, written_log, 0)
    step("judge", "0")
    assert step("close", "--exit-code", "0", "--what", "", "--trials", "0") == 0
    assert statuses.read(run) is None and outcomes(run) == [Outcome.valid, Outcome.planned]
    assert step("close", "--exit-code", "1", "--what", "node facts", "--trials", "1") == 1
    assert outcomes(run) == [Outcome.valid, Outcome.aborted]
    status = statuses.read(run)
    assert status is not None and (status.outcome, status.exit_code) == (Ending.failed, 1)


STARTS = """\
job 7, restart {restart}, on dgx-[0-1]; all of its output: /runs/1/slurm-7.out
trial 1, seed 2: already finished
trial 0, seed 1: starts
"""
PREEMPTED, NODE_FAILED = (
    f"slurmstepd-dgx-0: error: *** JOB 7 ON dgx-0 CANCELLED AT 2026-11-26T23:16:40 DUE TO {why} ***\n"
    for why in ("PREEMPTION", "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")
)
STEP_ENDED = "slurmstepd-dgx-0: error: *** STEP 7.4 ON dgx-0 CANCELLED AT 2026-11-26T23:16:50 DUE TO TIME LIMIT ***\n"
FIRST, SECOND = STARTS.format(restart=0), STARTS.format(restart=1)
NOW = "job 7, restart 2, on dgx-[0-1]; all of its output: /runs/1/slurm-7.out\n"
BEFORE_TRIAL = NOW.replace("restart 2", "restart 1")


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (FIRST + PREEMPTED + SECOND + NODE_FAILED + NOW, "requeued DUE TO NODE FAILURE"),
        (FIRST + SECOND + PREEMPTED + NODE_FAILED + STEP_ENDED + NOW, "requeued DUE TO NODE FAILURE"),
        ("\udcff" * 3_000_000 + "\n" + SECOND + "\udcff\n" + PREEMPTED + NOW, "requeued DUE TO PREEMPTION"),
        (FIRST + PREEMPTED + SECOND + NOW, "unknown"),  # only an older start was cancelled
        (FIRST + BEFORE_TRIAL + PREEMPTED + NOW, "unknown"),  # only a later start was cancelled, before the trial
        (FIRST + PREEMPTED + BEFORE_TRIAL + NOW, "unknown"),  # the previous start of the job did not begin the trial
        (FIRST + PREEMPTED + SECOND + NODE_FAILED, "unknown"),  # the attempt was begun in this start of the job
        (PREEMPTED + NOW, "unknown"),  # nothing shows which start began the attempt
        (None, "unknown"),
    ],
)
def test_a_cause_that_the_batch_script_did_not_record_is_taken_from_the_output_of_its_job(
    run: Path, step: Step, output: str | None, cause: str
) -> None:
    """bash can lose the SIGTERM of Slurm; slurmstepd still writes why it ended the job."""
    step("open", "--job", "7")
    step("begin", "0", "--job", "7", "--nodes", "dgx-0")
    if output is not None:
        (run / "slurm-7.out").write_bytes(output.encode(errors="surrogateescape"))
    assert step("begin", "0", "--job", "7", "--nodes", "dgx-0") == 0
    assert str(ledger.read(run)[0].attempts[0].cause).partition(":")[0] == cause


def test_no_cause_is_taken_through_a_symbolic_link(run: Path, step: Step) -> None:
    step("open", "--job", "7")
    step("begin", "0", "--job", "7", "--nodes", "dgx-0")
    (run / "other.out").write_text(FIRST + PREEMPTED + NOW)
    (run / "slurm-7.out").symlink_to("other.out")
    assert step("begin", "0", "--job", "7", "--nodes", "dgx-0") == 0
    assert str(ledger.read(run)[0].attempts[0].cause).startswith("unknown")


def test_a_recorded_cause_and_the_output_of_an_array_task(run: Path, step: Step) -> None:
    """The cause that the batch script recorded is more exact than the output."""
    output = (FIRST + PREEMPTED + NOW).replace("job 7", "job 7_0").replace("/slurm-7.", "/slurm-7_0.")
    step("open", "--job", "7")
    step("begin", "0", "--job", "7_0", "--nodes", "dgx-0")
    (run / "slurm-7_0.out").write_text(output)
    (run / "interrupted.txt").write_text("SLU-10: preempted\n")
    step("begin", "0", "--job", "7_0", "--nodes", "dgx-0")
    step("begin", "0", "--job", "7_0", "--nodes", "dgx-0")
    causes = [attempt.cause for attempt in ledger.read(run)[0].attempts]
    assert causes == ["SLU-10: preempted", "requeued DUE TO PREEMPTION", None]


@pytest.mark.parametrize(("force", "code"), [("false", 2), ("true", 0)])
def test_an_unfit_node_ends_the_job_unless_forced(
    run: Path, step: Step, capsys: pytest.CaptureFixture[str], force: str, code: int
) -> None:
    started(run, f"launch.force={force}")
    assert step("check") == code
    assert "NCC-05: 8 of 8 ranks wrote no file about their node" in capsys.readouterr().out


def test_an_unreadable_plan_is_an_error_without_a_traceback(
    run: Path, step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "plan.json").write_text("{")
    assert step("open", "--job", "7") == 2
    assert "the plan cannot be read" in capsys.readouterr().err


def test_a_run_whose_ledger_is_damaged_has_failed(run: Path, step: Step) -> None:
    """No command of the script failed; a run without trials has the same arguments, and succeeds."""
    assert step("open", "--job", "7") == 0
    (run / "slurm-7.out").write_text(
        "the ledger cannot be read: JSONDecodeError('half')\n  where: ledger.json\n  fix:   start a new run\n"
    )
    damaged = (run / "ledger.json").read_text()[:50]
    (run / "ledger.json").write_text(damaged)
    assert step("close", "--exit-code", "0", "--what", "every trial ended", "--trials", "0 1") == 1
    status = statuses.read(run)
    assert status is not None and (status.outcome, status.exit_code, status.rule) == (Ending.failed, 1, "RUN-10")
    assert status.during == "every trial ended; the ledger cannot be read"
    assert str(status.evidence).startswith("the ledger cannot be read") and status.fix == "start a new run"
    assert (run / "ledger.json").read_text() == damaged


@pytest.mark.long
def test_the_last_array_task_writes_the_manifest(tmp_path: Path, written_log: MakeLog) -> None:
    """Array tasks share a folder, so only the last one can list its files."""
    plan = compose.compose(["task=lora70b", "cluster=dgx1", "trials=2", "launch.array=true"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(run, plan)
    for trial in plan.trials:
        assert between_commands.begin_trial(run, plan, trial, job="7", nodes="dgx-0")
        written_log(name=f"run/{trial.log}", seed=trial.seed, binding=mllog.load(run, trial.index))
        what = "a rank was killed after run_stop"
        assert between_commands.close_run(run, plan, exit_code=1, what=what, of_job=[trial.index]) == 1
        assert (manifest.read(run) is not None) == (trial.index == 1) == (run / "status.json").exists()
    assert [str(entry.outcome) for entry in ledger.read(run)] == ["valid", "valid"]
    assert verify(run).passed


def test_a_log_of_another_run_is_reported_as_the_cause(tmp_path: Path, written_log: MakeLog) -> None:
    plan = compose.compose(["task=lora70b", "cluster=dgx1"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(run, plan)
    written_log(name="run/result_0.txt", seed=plan.trials[0].seed)
    assert between_commands.begin_trial(run, plan, plan.trials[0], job="7", nodes="dgx-0")
    assert between_commands.close_run(run, plan, exit_code=2, what="trial 0 failed", of_job=[0]) == 1
    status = (run / "status.json").read_text()
    assert '"rule": "LOG-17"' in status and "result_0.txt was not written by this attempt" in status
