"""A trial is proven by a log of its own plan, which both rulesets pass, and a job's late failure does not undo it."""

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
def made() -> Plan:
    return compose.compose(["task=lora70b", "cluster=dgx1"])


def planned_log(written_log: MakeLog, plan: Plan, **changes: object) -> Path:
    """Return a log as the plan's first trial would leave it."""
    said = plan.submission
    planned = {
        "seed": plan.trials[0].seed,
        "submission_benchmark": said.benchmark,
        "submission_division": said.division,
        "target_accuracy": plan.config.task.training.target_eval_loss,
        "global_batch_size": plan.batch.global_batch_size,
    }
    return written_log(**(planned | changes))


def test_the_log_of_the_plan_proves_the_trial(written_log: MakeLog, made: Plan) -> None:
    judged = trials.judge(planned_log(written_log, made), made, made.trials[0])
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
def test_the_log_of_another_plan_does_not(
    written_log: MakeLog, made: Plan, changes: dict[str, object], differing: str
) -> None:
    judged = trials.judge(planned_log(written_log, made, **changes), made, made.trials[0])
    assert not judged.valid
    (only,) = list(judged.differences)
    assert only.startswith(differing)


def test_one_ruleset_that_passes_is_not_enough(written_log: MakeLog, made: Plan) -> None:
    judged = trials.judge(planned_log(written_log, made, micro_batch_size=None), made, made.trials[0])
    assert judged.result.valid and list(judged.differences) == []
    assert [v.passed for v in judged.verdicts] == [True, False] and not judged.valid


@pytest.mark.parametrize(
    ("status", "failed", "outcome"),
    [
        ("success", False, Outcome.proven),
        ("success", True, Outcome.proven),
        ("aborted", True, Outcome.aborted),
        ("aborted", False, Outcome.not_proven),
    ],
)
def test_a_failure_after_the_end_of_a_trial_does_not_undo_it(
    written_log: MakeLog, tmp_path: Path, made: Plan, status: str, failed: bool, outcome: Outcome
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    ledger.create(folder, made)
    planned_log(written_log, made, status=status).rename(folder / made.trials[0].log)
    judged = trials.close(folder, made, made.trials[0], failed=failed)
    assert (judged is None) == (outcome is Outcome.aborted)
    entry = ledger.read(folder)[0]
    assert entry.outcome is outcome
    if judged is not None:
        assert entry.official == {"5.1.0": True, "6.1.0": True}
        assert entry.minutes == judged.result.minutes


def test_a_trial_that_failed_without_a_log_is_aborted(tmp_path: Path, made: Plan) -> None:
    ledger.create(tmp_path, made)
    assert trials.close(tmp_path, made, replace(made.trials[0]), failed=True) is None
    assert ledger.read(tmp_path)[0].outcome is Outcome.aborted
