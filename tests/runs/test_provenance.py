"""A trial is judged only by the log of its own attempt, not by one of another run, a copy, an edited or a cut log."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.contract import mllog
from bench.contract.plan import Plan
from bench.diagnosis import explain
from bench.errors import ConfigError, LogError
from bench.planning import compose
from bench.runs import ledger
from bench.runs import trial as trials
from bench.runs.ledger import Outcome

MakeLog = Callable[..., Path]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compose.compose(["task=lora70b", "cluster=dgx1", "trials=2"])


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    """A run folder whose first trial has started."""
    folder = tmp_path / "run"
    folder.mkdir()
    ledger.create(folder, plan)
    begin(folder, plan)
    return folder


def begin(run: Path, plan: Plan, trial: int = 0) -> None:
    assert ledger.begin(run, plan.trials[trial], attempts=9, job="7")


@pytest.fixture
def trained(written_log: MakeLog, plan: Plan) -> MakeLog:
    """Write the log of a trial as its rank 0 does."""

    def write(run: Path, trial: int = 0, **changes: object) -> Path:
        seed, binding = plan.trials[trial].seed, mllog.load(run, trial)
        return written_log(name=f"{run.name}/result_{trial}.txt", seed=seed, **({"binding": binding} | changes))

    return write


def outcome(run: Path, trial: int = 0) -> tuple[str, str]:
    """Return the outcome of a trial, and its first difference from the plan."""
    entry = ledger.read(run)[trial]
    return str(entry.outcome), (entry.not_as_planned or [""])[0]


def test_the_log_of_the_attempt_is_valid_and_its_checksum_kept(run: Path, plan: Plan, trained: MakeLog) -> None:
    log = trained(run)
    judged = trials.close(run, plan, plan.trials[0], failed=False)
    assert judged is not None and judged.valid
    entry = ledger.read(run)[0]
    assert entry.official == {"5.1.0": True, "6.1.0": True}
    assert (entry.log_sha256, entry.log_bytes) == (sha256sum(log), log.stat().st_size)
    assert len(str(entry.nonce)) == 32 and str(entry.nonce) in log.read_text().splitlines()[0]
    assert not {mllog.RUN_ATTEMPT, mllog.LOG_SHA256} & judged.result.hyperparameters.keys(), "they are not settings"


def sha256sum(path: Path) -> str:
    return subprocess.check_output(["sha256sum", path], text=True).split()[0]


def test_a_log_that_was_in_the_folder_before_the_trial_is_refused(
    tmp_path: Path, plan: Plan, written_log: MakeLog, trained: MakeLog
) -> None:
    """The log of another run with the same config and seed, copied in before the trial starts."""
    folder = tmp_path / "run"
    folder.mkdir()
    ledger.create(folder, plan)
    other_log = written_log(name="run/result_0.txt", seed=plan.trials[0].seed).read_bytes()
    begin(folder, plan)
    with pytest.raises(ConfigError, match="CFG-05"):
        trained(folder)
    assert trials.close(folder, plan, plan.trials[0], failed=True) is None
    ended, why = outcome(folder)
    assert ended == "aborted" and why.startswith(
        "LOG-17: result_0.txt was not written by this attempt: its first record"
    )
    (folder / "rank_logs/trial_0_rank_0.error").write_text(json.dumps({"rule": "CFG-05", "what": "a log", "time": 1}))
    (folder / "status.json").write_text('{"outcome": "failed", "exit_code": 1}')
    explained = explain([folder])
    assert explained.rule == "LOG-17" and "its first record is 'init_start'" in str(explained.evidence)
    ledger.reopen(folder)
    begin(folder, plan)
    assert (folder / "attempts/0.1/result_0.txt").read_bytes() == other_log
    trained(folder)
    assert trials.close(folder, plan, plan.trials[0], failed=False) is not None
    assert outcome(folder) == ("valid", "")


def test_a_log_of_another_attempt_is_refused_after_the_ranks_succeeded(run: Path, plan: Plan, trained: MakeLog) -> None:
    log = trained(run)
    begin(run, plan)  # the log of the first attempt is moved away; the next line moves it back
    (run / "attempts/0.1/result_0.txt").rename(log)
    with pytest.raises(LogError, match=r"LOG-17: .* the nonce of another attempt: attempt 1 of trial 0 of this run"):
        trials.close(run, plan, plan.trials[0], failed=False)
    assert outcome(run)[0] == "aborted"


def test_swapped_logs_are_refused(run: Path, plan: Plan, trained: MakeLog) -> None:
    begin(run, plan, 1)
    first, second = trained(run, 0), trained(run, 1)
    first.rename(run / "away")
    second.rename(first)
    (run / "away").rename(second)
    for trial, other in ((0, 1), (1, 0)):
        assert trials.close(run, plan, plan.trials[trial], failed=True) is None
        ended, why = outcome(run, trial)
        assert ended == "aborted" and why.endswith(
            f"the nonce of another attempt: attempt 1 of trial {other} of this run"
        )


def copied(log: Path) -> None:
    shutil.copy2(log, log.with_name("copy"))
    log.with_name("copy").replace(log)


def linked(log: Path) -> None:
    log.rename(log.with_name("elsewhere"))
    log.symlink_to("elsewhere")


def with_other_owner(log: Path) -> None:
    os.chown(log, 12345, -1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (copied, "it is a copy: its inode is"),
        (linked, "it is a link"),
        pytest.param(
            with_other_owner,
            "it is a copy: its uid is 12345",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners"),
        ),
    ],
)
def test_another_file_with_the_same_content_is_a_copy(
    run: Path, plan: Plan, trained: MakeLog, change: Callable[[Path], None], why: str
) -> None:
    change(trained(run))
    assert trials.close(run, plan, plan.trials[0], failed=True) is None
    assert outcome(run)[0] == "aborted" and why in outcome(run)[1]
    assert trials.unowned_log(run, plan.trials[0], may_have_moved=True) is None, "the folder may have been copied"


def one_loss_lower(log: Path) -> None:
    with log.open("r+b") as file:
        at = file.read().index(b'"eval_accuracy", "value": 0.92') + 29
        file.seek(at)
        file.write(b"1")


def cut_off(log: Path) -> None:
    whole = log.read_bytes()
    os.truncate(log, whole.rindex(b":::MLLOG"))


def added_to(log: Path) -> None:
    with log.open("a") as file:
        file.write("done\n")


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (one_loss_lower, "was changed: its SHA-256 differs"),
        (cut_off, "the end of the log is missing"),
        (added_to, "text was added after line"),
    ],
)
def test_a_changed_log_is_invalid(
    run: Path, plan: Plan, trained: MakeLog, change: Callable[[Path], None], why: str, failed: bool
) -> None:
    change(trained(run))
    judged = trials.close(run, plan, plan.trials[0], failed=failed)
    assert judged is not None
    assert [(f.rule, why in f.what) for f in judged.result.findings if f.severity == "error"] == [("LOG-18", True)]
    assert outcome(run)[0] == "invalid"
    (run / "status.json").write_text('{"outcome": "invalid", "exit_code": 1}')
    assert explain([run]).rule == "LOG-18"


@pytest.mark.parametrize(("what", "why"), [("changed", "was changed"), ("gone", "is missing")])
def test_a_changed_or_missing_attached_file_makes_the_trial_invalid(
    run: Path, plan: Plan, trained: MakeLog, what: str, why: str
) -> None:
    requests = run / "rank_logs/trial_0.requests"
    requests.write_text("0.1 0.2\n")
    trained(run, attached=[requests])
    if what == "changed":
        requests.write_text("0.1 0.3\n")
    else:
        requests.unlink()
    judged = trials.close(run, plan, plan.trials[0], failed=False)
    assert judged is not None and not judged.valid
    problems = [*list(judged.differences), *(finding.titled for finding in judged.result.findings)]
    assert any(
        text.startswith("LOG-18: the attached file rank_logs/trial_0.requests") and why in text for text in problems
    )


def test_a_log_of_an_interrupted_job_is_judged_only_if_it_is_its_own(
    run: Path, plan: Plan, trained: MakeLog, written_log: MakeLog
) -> None:
    written_log(name="run/result_0.txt", seed=plan.trials[0].seed)
    trials.settle(run, plan, plan.trials[0])
    assert outcome(run)[0] == "interrupted"
    begin(run, plan)
    assert str(ledger.read(run)[0].attempts[0].cause).startswith("LOG-17: result_0.txt was not written by this attempt")
    trained(run)
    trials.settle(run, plan, plan.trials[0])
    assert outcome(run)[0] == "valid"


@pytest.mark.parametrize("has_nonce", [False, True])
def test_a_log_without_a_nonce_is_judged_only_for_attempts_of_earlier_versions(
    run: Path, plan: Plan, trained: MakeLog, has_nonce: bool
) -> None:
    if not has_nonce:
        raw = json.loads((run / "ledger.json").read_text())
        del raw[0]["attempts"][0]["nonce"]
        (run / "ledger.json").write_text(json.dumps(raw))
    trained(run, binding=None)
    trials.close(run, plan, plan.trials[0], failed=True)
    assert ledger.read(run)[0].outcome is (Outcome.aborted if has_nonce else Outcome.valid)
