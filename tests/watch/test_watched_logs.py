"""Which logs are watched for which paths, how trials are named, and what their plans say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.errors import ConfigError, LogError
from bench.planning import compose
from bench.watch import sources
from bench.watch.prediction import Planned
from helpers import checked
from helpers.types import MakeLog


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    for name in ("a", "b", "empty"):
        Path(name).mkdir()


@pytest.mark.parametrize(
    ("paths", "options", "what", "where", "fix"),
    [
        ([], {}, "no run folder or log is given", "command line", "give a run folder or the logs of trials"),
        (
            ["a", "b"],
            {},
            "a run folder is given together with other paths",
            "a, b",
            "give only the run folder, or only logs",
        ),
        (
            ["a"],
            {"trials": 2},
            "a run folder is given together with --trials or --walltime, which are only for logs",
            "a",
            "remove --trials and --walltime",
        ),
        (
            ["a"],
            {"walltime_min": 1.0},
            "a run folder is given together with --trials or --walltime, which are only for logs",
            "a",
            "remove --trials and --walltime",
        ),
        (
            ["empty"],
            {},
            "there is nothing to watch: the folder has no plan.json, result_*.txt or slurm-*.out",
            "empty",
            "give a run folder, or the log of a trial",
        ),
        (
            ["nosuch"],
            {},
            "no run or file has this name: nosuch",
            "this path, and runs (LOGDIR), which does not exist",
            "give the path of a run folder, or set LOGDIR",
        ),
        (
            ["no/such.txt"],
            {},
            "no run or file has this name: no/such.txt",
            "this path, and runs (LOGDIR), which does not exist",
            "give the path of a run folder, or set LOGDIR",
        ),
    ],
)
def test_paths_that_cannot_be_watched_are_refused(
    paths: list[str], options: dict[str, float], what: str, where: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        sources.find([Path(path) for path in paths], **options)  # type: ignore[arg-type]
    assert (refused.value.what, refused.value.where, refused.value.fix) == (what, where, fix)


def test_logs_are_named_by_their_files_or_paths_and_trials() -> None:
    def named(*paths: str, trials: int = 1) -> list[str]:
        return [one.name for one in sources.find([Path(path) for path in paths], trials=trials).trials]

    assert named("a/x.txt", "b/y.txt") == ["x.txt", "y.txt"] and named("a/x.txt", "b/x.txt") == ["a/x.txt", "b/x.txt"]
    for name in ("result_10.txt", "result_2.txt", "slurm-7.out"):
        Path("a", name).touch()
    Path("b/slurm-12.out").touch()
    Path("b/slurm-7_1.out").touch()
    assert named("a") == ["result_2.txt", "result_10.txt"] and named("b") == ["slurm-7_1.out", "slurm-12.out"]
    job = sources.find([Path("a/x.txt")], trials=3, walltime_min=20.0)
    job.poll()
    (view,) = job.views()
    waits = "waiting for the first line of its log"
    assert (view.name, view.note, view.planned) == ("x.txt trial 1 of 3", waits, Planned(limit_min=20.0))
    assert not job.is_over() and not job.has_stopped() and not job.is_reached()


def test_several_trials_of_a_log_are_counted(written_log: MakeLog) -> None:
    log = written_log(evals=(0.95, 0.92))
    job = sources.find([log], trials=2)
    job.poll()
    (view,) = job.views()
    assert (view.name, view.state, view.note) == ("result_0.txt trial 1 of 2", "target reached", None)
    assert not job.has_stopped() and not job.is_reached(), "the second one has not begun"
    one = sources.find([log])
    one.poll()
    assert one.views()[0].name == "result_0.txt" and one.has_stopped() and one.is_reached()
    log.write_text(log.read_text() * 2)
    both, short = sources.find([log], trials=2), sources.find([log])
    both.poll()
    short.poll()
    assert both.views()[0].name == "result_0.txt trial 2 of 2" and both.has_stopped() and both.is_reached()
    assert short.views()[0].name == "result_0.txt trial 2"
    log.write_text(written_log(name="other.txt", evals=()).read_text()[:2000])
    one.poll()
    assert one.views()[0].note == "the log was restarted"


def test_a_trial_without_run_stop_ends_with_the_outcome_of_its_ledger(written_log: MakeLog) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local", "trials=2", "walltime=9"])
    Path("a/plan.json").write_text(plan_kinds.dumps(plan))
    text = written_log(evals=(0.95,)).read_text().partition('"run_stop"')[0].rpartition("\n")[0] + "\n"
    Path("a/result_0.txt").write_text(text)
    Path("a/ledger.json").write_text(
        json.dumps([{"trial": 0, "outcome": "interrupted"}, {"trial": 1, "outcome": "aborted"}])
    )
    job = sources.find([Path("a")])
    job.poll()
    first, second = job.views()
    assert [first.name, second.name] == ["trial 0 (1 of 2)", "trial 1 (2 of 2)"]
    assert (first.state, second.state) == ("training", "stopped: aborted") and not job.has_stopped()
    Path("a/ledger.json").write_text(
        json.dumps([{"trial": 0, "outcome": "aborted"}, {"trial": 1, "outcome": "aborted"}])
    )
    job.poll()
    first, second = job.views()
    assert (first.state, second.state, second.note) == (
        *("stopped: aborted", "stopped: aborted", "the trial ended before it started"),
    )
    assert job.has_stopped() and not job.is_reached() and not job.is_over()
    Path("a/status.json").write_text("{}")
    assert job.is_over()


@pytest.mark.long
def test_what_is_planned_for_a_trial_is_that_of_its_plan() -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local", "walltime=9"])
    trained = plan_kinds.required(plan, plan_kinds.TrainingPlan)
    (trial,) = plans.trial_commands(plan)
    batch, target = trained.batch.global_batch_size, trained.config.training.target_eval_loss
    expected = Planned(
        title="lora_tiny",
        max_samples=1024 * batch,
        eval_samples=tuple(step * batch for step in trained.evaluation.at_steps),
        target=target,
        is_published=False,
        limit_min=9,
        stall=plan.config.launch.stall,
    )
    assert sources.planned(plan, trial) == expected and target is not None
    before = plans.command(plan, plans.PREPARE)
    assert before is not None and trained.base is not None
    base = sources.planned(plan, before)
    assert (base.title, base.max_samples, base.stall) == (trained.base.config.task.name, trained.base.max_samples, None)
    published = checked.changed(plan, {"config.task.submittable": True})
    assert sources.planned(published, trial) == replace(expected, is_published=True)
    kernels = compose.compose(["task=kernels_tiny", "cluster=local", "walltime=7"])
    (trial,) = plans.trial_commands(kernels)
    assert sources.planned(kernels, trial) == Planned(title="kernels_tiny", is_published=False, limit_min=7)
    only_check = checked.changed(plan, {"trials": ()})
    Path("b/plan.json").write_text(plan_kinds.dumps(only_check))
    with pytest.raises(ConfigError) as refused:
        sources.find([Path("b")])
    assert refused.value.what == "this run only checks its nodes, so there is no trial to watch"
    assert refused.value.fix == "to see the result of the check: runstop why b"


def test_a_log_without_records_cannot_be_replayed(written_log: MakeLog) -> None:
    Path("a/x.txt").write_text("text\n")
    with pytest.raises(LogError) as refused:
        sources.replay(Path("a/x.txt"), speed=1)
    assert refused.value.what == "the file is not a log that can be replayed: it has no MLLOG line"
    log = written_log()
    job = sources.replay(log, speed=1, from_end=True, walltime_min=3.0)
    job.poll()
    assert job.is_over() and job.has_stopped() and job.views()[0].planned.limit_min == 3.0
