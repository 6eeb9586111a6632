"""Ten made-up runs of llama31_8b score as MLPerf's result summariser does, and their package passes its checkers."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer

from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.mlperf import package
from bench.mlperf.score import score
from bench.mlperf.system_fields import NEEDED
from helpers import planned_log

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
EVERY = 12_288
NUM_EVALUATIONS = (14, 14, 14, 14, 14, 14, 14, 15, 15, 15)
"""Of each run, until it reaches the target: at GBS 32 a mean of 175,104 samples, a little faster than the reference."""
DESCRIPTION = dict.fromkeys(NEEDED[5:], "example") | {
    "host_processors_per_node": "2",
    "accelerators_per_node": "8",
    "framework": "runstop",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run folder with ten logs of the closed division; later runs have slower steps."""
    planned_log.without_this_machine(monkeypatch)
    plan = planned_log.planned("llama31_8b", "trials=10", "cluster.org=example")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    (folder / "config.yaml").write_text("task: llama31_8b\n")
    for trial, number in enumerate(NUM_EVALUATIONS):
        write(plan, folder, trial, number)
    return folder


def write(plan: TrainingPlan, folder: Path, trial: int, number: int) -> None:
    losses = [3.31 + 0.2 * (number - done) + trial * 1.7e-6 for done in range(1, number)]
    name = f"result_{trial}.txt"
    planned_log.write(plan, folder / name, [*losses, 3.29 + trial * 1.3e-6], trial=trial, step_s=2 + 0.01 * trial)


def reference_mean(ruleset: str) -> float:
    """Return the olympic mean of the reference's samples at GBS 32."""
    path = Path(rcp_checker.__file__).parent / f"training_{ruleset}/rcps_llama31_8b.json"
    samples = sorted(json.loads(path.read_text())["llama31_8b_ref_32"]["Epochs to converge"])
    return fmean(samples[1:-1])


def summarised(submission: Path, ruleset: str, capsys: pytest.CaptureFixture[str]) -> float:
    """Return the minutes by MLPerf's result summariser."""
    summary = result_summarizer.summarize_results(str(submission), "training", ruleset)[0]
    capsys.readouterr()
    (minutes,) = summary["llama31_8b"]
    return float(minutes)


@pytest.mark.long
@pytest.mark.parametrize(
    "ruleset", [pytest.param(name, marks=[] if name == "6.1.0" else pytest.mark.slow) for name in RULESETS]
)
def test_ten_runs_score_and_pack_as_mlperf_does(run: Path, ruleset: str, capsys: pytest.CaptureFixture[str]) -> None:
    scored = score(run, ruleset=ruleset)
    assert scored.valid and [finding for finding in scored.findings if finding.severity == "error"] == []
    assert all(verdict.passed for verdict in scored.compliance)
    samples = sorted(EVERY * number for number in NUM_EVALUATIONS)[1:-1]
    mean = fmean(samples)
    assert scored.olympic_samples == mean and scored.rcp.passed
    assert scored.rcp_factor == pytest.approx(reference_mean(ruleset) / mean) and scored.rcp_factor > 1
    by_hand = run.parent / "box.json"
    by_hand.write_text(json.dumps(DESCRIPTION))
    packed = package.pack(
        package.Request(
            runs=(run,),
            folder=run.parent / "package",
            org="example",
            system="box",
            ruleset=ruleset,
            descriptions=(by_hand,),
        )
    )
    assert {name: check.passed for name, check in packed.checked.checks.items()} == dict.fromkeys(
        ("system_description", "package", "repository"), True
    )
    assert packed.passed and packed.findings == ()
    assert summarised(run.parent / "package/example", ruleset, capsys) == pytest.approx(scored.official_minutes)


@pytest.mark.long
def test_runs_that_converge_faster_than_the_reference_allows_have_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_log.without_this_machine(monkeypatch)
    plan = planned_log.planned("llama31_8b", "trials=10", "cluster.org=example")
    for trial in range(10):
        write(plan, tmp_path, trial, 12)
    scored = score(tmp_path, ruleset="6.1.0")
    assert not scored.valid and scored.official_minutes is None and scored.rcp.passed is False
    assert "147,456" in scored.findings[0].what
