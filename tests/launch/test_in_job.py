"""What a job asks between its commands, without a job."""

from argparse import Namespace
from pathlib import Path

from bench.contract import attempt
from bench.contract import plan as plans
from bench.launch import in_job
from bench.planning import compose
from bench.runs import ledger, manifest
from bench.runs.verification import verify
from helpers.types import MakeLog


def test_the_last_element_of_an_array_writes_the_manifest(tmp_path: Path, written_log: MakeLog) -> None:
    """Elements share a folder, and none but the last can say what it holds."""
    plan = compose.compose(["task=lora70b", "cluster=dgx1", "trials=2", "launch.array=true"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text(plans.dumps(plan))
    ledger.create(run, plan)
    for trial in plan.trials:
        asked = {"trial": trial.index, "job": "7", "nodes": "dgx-0", "trials": str(trial.index)}
        assert in_job.begin(run, plan, Namespace(**asked)) == 0
        written_log(name=f"run/{trial.log}", seed=trial.seed, binding=attempt.load(run, trial.index))
        assert in_job.close(run, plan, Namespace(**asked, exit_code=1, what="a rank was killed behind run_stop")) == 1
        assert (manifest.read(run) is not None) == (trial.index == 1) == (run / "status.json").exists()
    assert [str(entry.outcome) for entry in ledger.read(run)] == ["proven", "proven"]
    assert verify(run).passed


def test_a_log_that_was_not_the_trials_own_is_the_reason_that_the_job_gives(
    tmp_path: Path, written_log: MakeLog
) -> None:
    plan = compose.compose(["task=lora70b", "cluster=dgx1"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text(plans.dumps(plan))
    ledger.create(run, plan)
    written_log(name="run/result_0.txt", seed=plan.trials[0].seed)
    asked = {"trial": 0, "job": "7", "nodes": "dgx-0", "trials": "0"}
    assert in_job.begin(run, plan, Namespace(**asked)) == 0
    assert in_job.close(run, plan, Namespace(**asked, exit_code=2, what="trial 0 failed")) == 1
    status = (run / "status.json").read_text()
    assert '"rule": "LOG-17"' in status and "result_0.txt was not written by this attempt" in status
