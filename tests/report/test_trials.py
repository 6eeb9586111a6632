"""Reports of tasks without training: their logs are found in the same folders as training logs."""

from pathlib import Path

import pytest

from bench import cli
from bench.contract.plan_kinds import GenerationPlan
from bench.errors import ConfigError
from bench.planning import compose
from bench.report import kinds
from bench.report.kinds import TrialsReport
from bench.results.serving import ServingResult
from helpers import answers_log, planted_runs, serving, serving_log
from helpers.clock import Clock

H200 = ("engine=huggingface", "cluster=dgxh200", "model.weights=random")


def generation() -> GenerationPlan:
    plan = compose.compose(["task=generate_7b", *H200, "cluster.ranks_per_node=1", "task.generation.order=one_by_one"])
    assert isinstance(plan, GenerationPlan)
    return plan


def test_folder_of_run_folders_has_the_verdicts_of_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log with 26 of 31 answers is invalid, for the run folder and for its parent."""
    (run := tmp_path / "runs/short").mkdir(parents=True)
    plan = generation()
    answers_log.write(plan, run / "result_0.txt", answers_log.rows(plan)[:26], run_s=77.5)
    for folder in (run, run.parent):
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", str(folder)])
        assert (ended.value.code, "valid trial: no" in capsys.readouterr().out) == (1, True), folder


def test_every_run_of_a_folder_is_one_trial_and_other_kinds_are_refused(tmp_path: Path) -> None:
    plan = serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        serving_log.write(plan, tmp_path / name / "result_0.txt", {"burst": [1.0] * 200})
    report = kinds.load([tmp_path])
    assert isinstance(report, TrialsReport)
    assert [one.name for one in report.trials] == ["first/result_0", "second/result_0"]
    assert {type(one.kind_result) for one in report.trials} == {ServingResult}
    planted_runs.plant(tmp_path / "third", Clock(), 100.0)
    with pytest.raises(ConfigError, match=r"one report cannot have runs that .*\n  where: .*/third\n"):
        kinds.load([tmp_path])
