"""A trial is valid if its log matches the plan and passes both rulesets, even if the job fails afterwards."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract import mllog, plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from bench.runs import ledger
from bench.runs import trial as trials
from bench.runs.ledger import Outcome
from helpers.written_log import INPUTS

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
        ({"seed": 99}, "seed is 99 in the log, but "),
        ({"submission_division": "open"}, "submission_division is open in the log, but closed in the plan"),
        ({"global_batch_size": 16}, "global_batch_size is 16 in the log, but 8 in the plan"),
        ({"target_accuracy": 0.924}, "target_accuracy is 0.924 in the log, but 0.925 in the plan"),
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


@pytest.fixture
def begun(tmp_path: Path, plan: Plan) -> Path:
    """A run of two trials, the first of which has begun."""
    two = compose.compose(["task=lora70b", "cluster=dgx1", "trials=2"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_kinds.dumps(two))
    ledger.create(folder, two)
    ledger.begin(folder, two.trials[0], attempts=1)
    return folder


def closed(folder: Path, written_log: MakeLog, number: int, **inputs: str) -> list[str]:
    """Write the log of a trial that read these inputs, and judge it; return its differences from the plan."""
    plan = plan_kinds.load(folder / "plan.json")
    trial, bound = plan.trials[number], mllog.load(folder, number)
    written_log(name=f"run/{trial.log}", seed=trial.seed, binding=bound, inputs=INPUTS | inputs)
    judged = trials.close(folder, plan, trial, failed=False)
    assert judged is not None and judged.valid is not bool(judged.differences)
    return list(judged.differences)


@pytest.mark.long
@pytest.mark.parametrize("name", INPUTS)
def test_trials_of_a_run_read_the_same_inputs(begun: Path, written_log: MakeLog, name: str) -> None:
    assert closed(begun, written_log, 0) == []
    plan = plan_kinds.load(begun / "plan.json")
    assert ledger.begin(begun, plan.trials[1], attempts=1)
    (other,) = closed(begun, written_log, 1, **{name: "4" * 64})
    assert other == f"CFG-12: the SHA-256 of the {name} is {'4' * 12}…, but {INPUTS[name][:12]}… in trial 0"
    assert [entry.outcome for entry in ledger.read(begun)] == [Outcome.valid, Outcome.invalid]


@pytest.mark.long
def test_a_log_must_name_its_inputs(begun: Path, written_log: MakeLog, plan: Plan) -> None:
    bound = mllog.load(begun, 0)
    written_log(name="run/result_0.txt", seed=plan.trials[0].seed, binding=bound, inputs={})
    judged = trials.close(begun, plan, plan.trials[0], failed=False)
    assert judged is not None
    assert [what[:39] for what in judged.differences] == ["CFG-12: the log has no checksum of the " for _ in INPUTS]


@pytest.mark.long
def test_a_log_of_an_earlier_version_names_none(begun: Path, written_log: MakeLog, plan: Plan) -> None:
    """The ledger of its attempt has no plan; the next attempt is bound to the plan that it finds."""
    path = begun / "ledger.json"
    old = [{key: x for key, x in entry.items() if key != "plan_sha256"} for entry in json.loads(path.read_text())]
    path.write_text(json.dumps(old))
    bound = replace(mllog.load(begun, 0), plan_sha256=None)
    written_log(name="run/result_0.txt", seed=plan.trials[0].seed, binding=bound, inputs={})
    judged = trials.close(begun, plan, plan.trials[0], failed=False)
    assert judged is not None and judged.valid
    two = plan_kinds.load(begun / "plan.json")
    ledger.begin(begun, two.trials[1], attempts=1)
    assert [entry.plan_sha256 is None for entry in ledger.read(begun)] == [True, False]


@pytest.mark.long
def test_a_plan_that_was_edited_between_trials_is_refused(begun: Path, written_log: MakeLog) -> None:
    assert closed(begun, written_log, 0) == []
    path, plan = begun / "plan.json", plan_kinds.load(begun / "plan.json")
    text = path.read_text()
    path.write_text(text.replace('"lr": 0.0004', '"lr": 0.0005'))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"plan.json was changed since the run started") as refused:
            ledger.begin(begun, plan.trials[1], attempts=1)
        assert refused.value.rule == "CFG-12"
    path.write_text(text.replace("$DATADIR", "/moved/data"))
    assert ledger.begin(begun, plan.trials[1], attempts=1), "data may be moved: it has checksums of its own"


def test_a_plan_that_was_edited_during_a_trial_makes_it_invalid(begun: Path, written_log: MakeLog, plan: Plan) -> None:
    path = begun / "plan.json"
    path.write_text(path.read_text().replace('"clip_grad": 0.3', '"clip_grad": 0.4'))
    assert closed(begun, written_log, 0) == ["CFG-12: plan.json was changed since the run started"]
