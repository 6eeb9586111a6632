"""A trial is valid if its log matches the plan and passes both rulesets, even if the job fails afterwards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract.plan import Plan
from bench.planning import compose
from bench.runs import ledger
from bench.runs import trial as trials
from bench.runs.ledger import Outcome

MakeLog = Callable[..., Path]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compose.compose(["task=lora70b", "cluster=dgx1"])


def planned_log(written_log: MakeLog, plan: Plan, **changes: object) -> Path:
    """Return a log as the first trial of the plan writes it."""
    submission = plan.submission
    planned = {
        "seed": plan.trials[0].seed,
        "submission_benchmark": submission.benchmark,
        "submission_division": submission.division,
        "target_accuracy": plan.config.task.training.target_eval_loss,
        "global_batch_size": plan.batch.global_batch_size,
    }
    return written_log(**(planned | changes))


def test_a_log_that_matches_the_plan_is_valid(written_log: MakeLog, plan: Plan) -> None:
    judged = trials.judge(planned_log(written_log, plan), plan, plan.trials[0])
    assert judged.valid and list(judged.differences) == []
    assert [(v.ruleset, v.passed) for v in judged.verdicts] == [("5.1.0", True), ("6.1.0", True)]


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"seed": 99}, "seed is 99, planned "),
        ({"submission_division": "open"}, "submission_division is open, planned closed"),
        ({"global_batch_size": 16}, "global_batch_size is 16, planned 8"),
        ({"target_accuracy": 0.924}, "target_accuracy is 0.924, planned 0.925"),
    ],
)
def test_a_log_of_another_plan_is_invalid(
    written_log: MakeLog, plan: Plan, changes: dict[str, object], differing: str
) -> None:
    judged = trials.judge(planned_log(written_log, plan, **changes), plan, plan.trials[0])
    assert not judged.valid
    (only,) = list(judged.differences)
    assert only.startswith(differing)


def test_a_trial_must_pass_both_rulesets(written_log: MakeLog, plan: Plan) -> None:
    judged = trials.judge(planned_log(written_log, plan, micro_batch_size=None), plan, plan.trials[0])
    assert judged.result.valid and list(judged.differences) == []
    assert [v.passed for v in judged.verdicts] == [True, False] and not judged.valid


@pytest.mark.parametrize(
    ("status", "failed", "outcome"),
    [
        ("success", False, Outcome.valid),
        ("success", True, Outcome.valid),
        ("aborted", True, Outcome.aborted),
        ("aborted", False, Outcome.invalid),
    ],
)
def test_a_failure_after_run_stop_does_not_change_the_outcome(
    written_log: MakeLog, tmp_path: Path, plan: Plan, status: str, failed: bool, outcome: Outcome
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    ledger.create(folder, plan)
    planned_log(written_log, plan, status=status).rename(folder / plan.trials[0].log)
    judged = trials.close(folder, plan, plan.trials[0], failed=failed)
    assert (judged is None) == (outcome is Outcome.aborted)
    entry = ledger.read(folder)[0]
    assert entry.outcome is outcome
    if judged is not None:
        assert entry.official == {"5.1.0": True, "6.1.0": True}
        assert entry.minutes == judged.result.minutes


def test_a_trial_that_failed_without_a_log_is_aborted(tmp_path: Path, plan: Plan) -> None:
    ledger.create(tmp_path, plan)
    assert trials.close(tmp_path, plan, replace(plan.trials[0]), failed=True) is None
    assert ledger.read(tmp_path)[0].outcome is Outcome.aborted
