"""What a job asks between its commands: the exit codes its script goes by, and what stands in the run folder then."""

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

Ask = Callable[..., int]
TWO_TRIALS = ["task=lora70b", "cluster=dgx1", "trials=2"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ask(run: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask in a run folder of two trials, as job.sh does, and return the exit code."""

    def asked(question: str, *words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["between_commands", str(run), question, *words])
        with pytest.raises(SystemExit) as ended:
            between_commands.main()
        return int(str(ended.value.code))

    started(run)
    return asked


def started(run: Path, *overrides: str) -> None:
    run.mkdir(exist_ok=True)
    (run / "plan.json").write_text(plan_kinds.dumps(compose.compose([*TWO_TRIALS, *overrides])))


def trained(run: Path, written_log: MakeLog, trial: int, **changes: object) -> None:
    """Leave the log of a trial that went as planned, but for the changes."""
    plan: Plan = plan_kinds.load(run / "plan.json")
    planned = {"seed": plan.trials[trial].seed, "submission_division": plan.submission.division}
    written_log(**planned | changes, binding=mllog.load(run, trial)).rename(run / plan.trials[trial].log)


def outcomes(run: Path) -> list[Outcome]:
    return [entry.outcome for entry in ledger.read(run)]


@pytest.mark.long
def test_a_run_whose_trials_all_prove_what_was_asked(run: Path, ask: Ask, written_log: MakeLog) -> None:
    assert [ask("open", "--job", "7"), ask("open", "--job", "7"), ask("open", "--job", "8")] == [0, 0, 0]
    job = json.loads((run / "job.json").read_text())
    assert (job["backend"], [entry["id"] for entry in job["jobs"]]) == ("slurm", ["7", "8"])
    for trial in ("0", "1"):
        assert ask("begin", trial, "--job", "8", "--nodes", "dgx-0") == 0
        assert outcomes(run)[int(trial)] is Outcome.running
        trained(run, written_log, int(trial))
        assert ask("judge", trial) == 0
        assert ask("begin", trial, "--job", "8", "--nodes", "dgx-0") == between_commands.DONE
    assert not (run / "status.json").exists()
    assert ask("close", "--exit-code", "0", "--what", "", "--trials", "0 1") == 0
    said = statuses.read(run)
    assert said is not None and (said.outcome, said.exit_code) == (Ending.proven, 0)
    assert ask("open", "--job", "9") == 0
    assert statuses.read(run) is None, "the run goes on"


@pytest.mark.long
def test_a_trial_that_misses_its_target_is_judged_and_fails_the_job(run: Path, ask: Ask, written_log: MakeLog) -> None:
    ask("open", "--job", "7")
    for trial, changes in enumerate(({}, {"evals": (0.95, 0.94)})):
        ask("begin", str(trial), "--job", "7", "--nodes", "dgx-0")
        trained(run, written_log, trial, **changes)
    assert [ask("judge", "0"), ask("judge", "1")] == [0, 1]
    assert ask("close", "--exit-code", "0", "--what", "training", "--trials", "0 1") == 1
    said = statuses.read(run)
    assert said is not None and (said.outcome, said.exit_code) == (Ending.not_proven, 1)


def test_a_job_that_dies_aborts_the_trial_under_way_and_leaves_the_others_open(run: Path, ask: Ask) -> None:
    ask("open", "--job", "7")
    ask("begin", "0", "--job", "7", "--nodes", "dgx-0")
    assert ask("close", "--exit-code", "143", "--what", "SLU-10: the time limit is near", "--trials", "0 1") == 1
    assert outcomes(run) == [Outcome.aborted, Outcome.planned]
    said = statuses.read(run)
    assert said is not None
    assert (said.outcome, said.exit_code, said.rule) == (Ending.failed, 143, "SLU-10")


@pytest.mark.long
def test_the_last_element_of_an_array_to_end_writes_the_status(run: Path, ask: Ask, written_log: MakeLog) -> None:
    """Each element closes its own trial; one that failed before it came to its trial has none to wait for."""
    started(run, "launch.array=true")
    ask("open", "--job", "7")
    ask("begin", "0", "--job", "7", "--nodes", "dgx-0")
    trained(run, written_log, 0)
    ask("judge", "0")
    assert ask("close", "--exit-code", "0", "--what", "", "--trials", "0") == 0
    assert statuses.read(run) is None and outcomes(run) == [Outcome.proven, Outcome.planned]
    assert ask("close", "--exit-code", "1", "--what", "node facts", "--trials", "1") == 1
    assert outcomes(run) == [Outcome.proven, Outcome.aborted]
    said = statuses.read(run)
    assert said is not None and (said.outcome, said.exit_code) == (Ending.failed, 1)


@pytest.mark.parametrize(("force", "code"), [("false", 2), ("true", 0)])
def test_a_node_that_is_unfit_ends_the_job_unless_forced(
    run: Path, ask: Ask, capsys: pytest.CaptureFixture[str], force: str, code: int
) -> None:
    started(run, f"launch.force={force}")
    assert ask("check") == code
    assert "NCC-05: no facts of" in capsys.readouterr().out


def test_a_plan_that_cannot_be_read_is_said_without_a_traceback(
    run: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "plan.json").write_text("{")
    assert ask("open", "--job", "7") == 2
    assert "not a plan that can be read" in capsys.readouterr().err


def test_a_run_whose_ledger_is_damaged_has_failed(run: Path, ask: Ask) -> None:
    """The script has seen no command fail; a run without trials ends in the same words, and is fine."""
    assert ask("open", "--job", "7") == 0
    (run / "slurm-7.out").write_text(
        "the ledger cannot be read: JSONDecodeError('half')\n  where: ledger.json\n  fix:   start a new run\n"
    )
    damaged = (run / "ledger.json").read_text()[:50]
    (run / "ledger.json").write_text(damaged)
    assert ask("close", "--exit-code", "0", "--what", "every trial ended", "--trials", "0 1") == 1
    status = statuses.read(run)
    assert status is not None and (status.outcome, status.exit_code, status.rule) == (Ending.failed, 1, "RUN-10")
    assert status.during == "every trial ended, and the ledger cannot be read"
    assert str(status.evidence).startswith("the ledger cannot be read") and status.fix == "start a new run"
    assert (run / "ledger.json").read_text() == damaged


def test_the_last_element_of_an_array_writes_the_manifest(tmp_path: Path, written_log: MakeLog) -> None:
    """Elements share a folder, and none but the last can say what it holds."""
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
    assert [str(entry.outcome) for entry in ledger.read(run)] == ["proven", "proven"]
    assert verify(run).passed


def test_a_log_that_was_not_the_trials_own_is_the_reason_that_the_job_gives(
    tmp_path: Path, written_log: MakeLog
) -> None:
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
