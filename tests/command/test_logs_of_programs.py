"""The whole log that a recorder writes from what a program says, at times that the test sets."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog, plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError
from bench.planning import compose
from helpers import written_records
from jobs.command import records
from jobs.command.adapters import MllogRecord, Reported, Unreadable
from jobs.command.records import MllogRecorder, StepRecorder

DESCRIBED = {"seed": 7, "opt_name": "adamw"}


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    return planned()


@pytest.fixture(scope="module")
def plan_with_target() -> TrainingPlan:
    return planned("task.training.target_eval_loss=2")


def planned(*overrides: str) -> TrainingPlan:
    """Return the plan of a program that trains 8 steps of 4 rows, and logs every third step."""
    words = ("task=my_program", "cluster=local", "cluster.device=cpu", "engine.command.argv=[train]")
    numbers = (
        *("recipe.global_batch_size=4", "recipe.log_every_steps=3"),
        *("task.training.max_steps=8", "data.train_rows=40"),
    )
    return plan_kinds.required(compose.compose([*words, *numbers, *overrides]), TrainingPlan)


def logged(
    plan: TrainingPlan, path: Path, reports: Iterable[tuple[float, Reported]], *, earlier_step: int | None = None
) -> list[str]:
    """Return the records between run_start and the end of the program, which reports at these times."""
    with mllog.Writer(path) as log:
        recorder = StepRecorder(plan, log, lambda: DESCRIBED, earlier_step=earlier_step)
        recorder.start()
        try:
            for at_s, reported in reports:
                recorder.record(reported, at_s)
            recorder.finish()
        finally:
            first, *shown = written_records.of_log(path)[1:]
            assert [first, *shown[:2]] == ['. opt_name "adamw"', "stop init_stop", "start run_start"]
    return shown[2:]


def at(step: int, at_s: float, loss: float | None = None, **others: Any) -> tuple[float, Reported]:
    return at_s, Reported(step=step, loss=loss, **others)


def test_steps_are_timed_by_the_arrival_of_their_lines(plan: TrainingPlan, tmp_path: Path) -> None:
    """A step that is reported twice counts once. Single times are logged only if no step is missing."""
    reports = [
        (9.0, Reported(resumed=0)),
        at(1, 10.0, 5.0),
        at(2, 10.5, tokens=1000.0, step_time_s=0.5),
        at(3, 11.5, 4.0, tokens=1200.0, step_time_s=0.7),
        at(3, 12.0, 9.0, tokens=math.nan),
        at(5, 13.5, 3.5, resumed=4),
        at(6, 14.0),
        (17.0, Reported(eval_loss=3.0, eval_time_s=2.5)),
        at(7, 18.0000043, 3.25),
        at(8, 18.5, tokens=7.0),
    ]
    assert logged(plan, tmp_path / "log", reports) == [
        '. timed_from 1 {"samples_count": 4, "step": 1}',
        'start block_start {"samples_count": 4, "step": 1}',
        '. train_loss 5.0 {"samples_count": 4, "step": 1, "by_program": true}',
        '. train_loss 4.0 {"samples_count": 12, "step": 3, "by_program": true}',
        '. tracked_stats {"train_step_time": 0.75, "throughput": 5.333333333333333, "step_times": [0.5, 1.0]} '
        '{"samples_count": 12, "step": 3, "by_program": {"tokens": 1100.0, "step_time_s": 0.6}}',
        '. train_loss 3.5 {"samples_count": 24, "step": 6, "by_program": true}',
        '. tracked_stats {"train_step_time": 0.8333333333333334, "throughput": 4.8} {"samples_count": 24, "step": 6}',
        'stop block_stop {"samples_count": 24, "step": 6}',
        '. eval_accuracy 3.0 {"samples_count": 24, "step": 6, "epoch_num": 0.6, "by_program": {"eval_time_s": 2.5}}',
        'start block_start {"samples_count": 24, "step": 6}',
        '. train_loss 3.25 {"samples_count": 32, "step": 8, "by_program": true}',
        '. tracked_stats {"train_step_time": 0.75, "throughput": 5.333333333333333, '
        '"step_times": [1.000004, 0.499996]} {"samples_count": 32, "step": 8, "by_program": {"tokens": 7.0}}',
        'stop block_stop {"samples_count": 32, "step": 8}',
        'stop run_stop {"samples_count": 32, "step": 8, "status": "success"}',
    ]


def test_a_program_without_losses_whose_lines_arrive_at_once_has_no_throughput(
    plan: TrainingPlan, tmp_path: Path
) -> None:
    shown = logged(plan, tmp_path / "log", [at(step, 10.0) for step in (1, 2, 3, 8)])
    assert shown[2:] == [
        '. tracked_stats {"train_step_time": 0.0, "step_times": [0.0, 0.0]} {"samples_count": 12, "step": 3}',
        '. tracked_stats {"train_step_time": 0.0} {"samples_count": 32, "step": 8}',
        'stop block_stop {"samples_count": 32, "step": 8}',
        'stop run_stop {"samples_count": 32, "step": 8, "status": "success"}',
    ]


def test_the_target_counts_only_in_evaluations_after_a_step(plan_with_target: TrainingPlan, tmp_path: Path) -> None:
    """Steps since the last record are logged before an evaluation, which may name a later step than any line."""
    reports = [
        (1.0, Reported(eval_loss=1.0)),
        at(1, 10.0, 5.0),
        at(2, 12.0, 4.5),
        (20.0, Reported(step=5, eval_loss=2.125, eval_time_s=math.nan)),
        at(6, 21.0, 4.25),
        (30.0, Reported(step=2, eval_loss=2.0)),
    ]
    assert logged(plan_with_target, tmp_path / "log", reports) == [
        '. eval_accuracy 1.0 {"samples_count": 0, "step": 0, "epoch_num": 0.0, "by_program": true}',
        '. timed_from 1 {"samples_count": 4, "step": 1}',
        'start block_start {"samples_count": 4, "step": 1}',
        '. train_loss 5.0 {"samples_count": 4, "step": 1, "by_program": true}',
        '. train_loss 4.5 {"samples_count": 8, "step": 2, "by_program": true}',
        '. tracked_stats {"train_step_time": 2.0, "throughput": 2.0, "step_times": [2.0]} '
        '{"samples_count": 8, "step": 2}',
        'stop block_stop {"samples_count": 8, "step": 2}',
        '. eval_accuracy 2.125 {"samples_count": 20, "step": 5, "epoch_num": 0.5, "by_program": true}',
        'start block_start {"samples_count": 20, "step": 5}',
        '. train_loss 4.25 {"samples_count": 24, "step": 6, "by_program": true}',
        '. tracked_stats {"train_step_time": 1.0, "throughput": 4.0, "step_times": [1.0]} '
        '{"samples_count": 24, "step": 6}',
        'stop block_stop {"samples_count": 24, "step": 6}',
        '. eval_accuracy 2.0 {"samples_count": 24, "step": 6, "epoch_num": 0.6, "by_program": true}',
        'stop run_stop {"samples_count": 24, "step": 6, "status": "success"}',
    ]


def test_a_program_that_ends_early_is_aborted_and_without_a_target_it_is_an_error(
    plan: TrainingPlan, plan_with_target: TrainingPlan, tmp_path: Path
) -> None:
    aborted = 'stop run_stop {"samples_count": 28, "step": 7, "status": "aborted"}'
    with pytest.raises(BenchError, match="ended after step 7, but the plan has 8 steps") as raised:
        logged(plan, tmp_path / "log", [at(1, 1.0), at(7, 2.0)])
    assert raised.value.rule == "RUN-23" and written_records.of_log(tmp_path / "log")[-1] == aborted
    assert logged(plan_with_target, tmp_path / "other", [at(1, 1.0), at(7, 2.0)])[-1] == aborted
    last = [at(1, 1.0), at(8, 2.0)]
    assert logged(plan_with_target, tmp_path / "complete", last)[-1] == aborted.replace("28", "32").replace("7", "8")
    with pytest.raises(BenchError, match="has found no training step in the program's output") as raised:
        logged(plan, tmp_path / "silent", [(1.0, Reported(eval_loss=1.0))])
    assert raised.value.rule == "RUN-21"


@pytest.mark.parametrize(
    ("earlier_step", "reports", "resumed"),
    [
        (None, [at(41, 1.0)], None),
        (41, [at(41, 1.0)], None),
        (1, [at(41, 1.0)], 41),
        (1, [(0.0, Reported(resumed=40)), at(41, 1.0)], 40),
        (None, [(0.0, Reported(resumed=30)), (0.0, Reported(resumed=40)), at(41, 1.0)], 40),
        (None, [at(41, 1.0), (2.0, Reported(resumed=40))], None),
        (1, [(0.0, Reported(resumed=0)), at(41, 1.0)], None),
    ],
)
def test_the_step_from_which_a_program_resumed(
    plan: TrainingPlan, tmp_path: Path, earlier_step: int | None, reports: list[Any], resumed: int | None
) -> None:
    shown = logged(plan, tmp_path / "log", reports, earlier_step=earlier_step)
    begun = [
        '. timed_from 41 {"samples_count": 164, "step": 41}',
        'start block_start {"samples_count": 164, "step": 41}',
    ]
    place = {} if resumed is None else {"samples_count": 4 * resumed, "step": resumed}
    text = f". resumed {resumed} " + json.dumps(place | {"by_program": True})
    assert shown[:-2] == ([] if resumed is None else [text]) + begun


@pytest.mark.parametrize(
    ("reports", "complaint"),
    [
        ([at(3, 1.0, math.nan)], "the training loss is nan at step 3, but must be a finite number"),
        ([at(3, 1.0), at(4, 2.0, -math.inf)], "the training loss is -inf at step 4,"),
        ([at(3, 1.0), (2.0, Reported(eval_loss=math.inf))], "the evaluation loss is inf at step 3,"),
        ([(2.0, Reported(step=6, eval_loss=math.nan))], "the evaluation loss is nan at step 6,"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_trial(plan: TrainingPlan, reports: list[Any], complaint: str) -> None:
    with mllog.Writer(None) as log:
        recorder = StepRecorder(plan, log, dict)
        for at_s, reported in reports[:-1]:
            recorder.record(reported, at_s)
        with pytest.raises(BenchError, match=complaint) as raised:
            recorder.record(reports[-1][1], reports[-1][0])
    assert raised.value.rule == "RUN-05"


def record(key: str, value: Any = None, event: str = "POINT_IN_TIME", **metadata: Any) -> Reported:
    return Reported(record=MllogRecord(event_type=event, key=key, value=value, metadata=metadata, time_ms=1000.5))


START, STOP = "INTERVAL_START", "INTERVAL_END"


@pytest.mark.parametrize("has_init_stop", [True, False])
def test_records_of_a_program_are_completed_and_taken_over(has_init_stop: bool, tmp_path: Path) -> None:
    """What the program describes itself is not described again; after its run_stop nothing belongs to the trial."""
    own = '"by_program": true, "program_time_ms": 1000.5'
    with mllog.Writer(tmp_path / "log") as log:
        recorder = MllogRecorder(log, lambda: DESCRIBED)
        recorder.start()
        for one in (
            record("init_start", event=START),
            record("seed", 3, monotonic_ms=5, file="train.c"),
            *([record("init_stop", event=STOP)] if has_init_stop else []),
            record("run_start", event=START),
            record("train_loss", 1.5, samples_count=8),
            record("block_stop", event=STOP, samples_count=8),
            record("run_stop", event=STOP, status="success", samples_count=8),
            record("train_loss", math.nan, samples_count=9),
        ):
            assert not recorder.has_stopped or one.record.key == "train_loss"
            recorder.record(one, 0.0)
        recorder.finish()
    assert recorder.has_stopped and recorder.place == "sample 8"
    assert written_records.of_log(tmp_path / "log") == [
        f". seed 3 {{{own}}}",
        '. opt_name "adamw"',
        f"stop init_stop {{{own}}}" if has_init_stop else "stop init_stop",
        f"start run_start {{{own}}}",
        f'. train_loss 1.5 {{"samples_count": 8, {own}}}',
        f'stop block_stop {{"samples_count": 8, {own}}}',
        f'stop run_stop {{"samples_count": 8, {own}, "status": "success"}}',
    ]


def test_records_that_a_program_may_not_log_are_refused() -> None:
    with mllog.Writer(None) as log:
        recorder = MllogRecorder(log, dict)
        for key in sorted(records.OURS):
            with pytest.raises(Unreadable, match=f"only the runner may log {key}"):
                recorder.record(record(key), 0.0)
        for one, complaint in (
            (record("train_loss", math.nan, step=7), "the training loss is nan at step 7,"),
            (record("eval_accuracy", math.inf, samples_count=1234), "the evaluation loss is inf at sample 1,234,"),
        ):
            with pytest.raises(BenchError, match=complaint):
                recorder.record(one, 0.0)
        with pytest.raises(Unreadable, match="the record other = nan .* cannot be logged"):
            recorder.record(record("other", math.nan), 0.0)
        recorder.record(record("eval_accuracy", 3), 0.0)
        for key in ("run_start", "run_stop"):
            with pytest.raises(BenchError, match=f"found no {key} in") as raised:
                recorder.finish()
            assert raised.value.rule == "RUN-21"
            recorder.record(record(key, event=START, status=3), 0.0)
        recorder.finish()
        assert recorder.has_stopped


@pytest.mark.parametrize(
    ("logs", "first"),
    [
        ([], None),
        ([{"key": "seed", "value": 1}, {"key": "timed_from", "value": 12}, {"key": "timed_from", "value": 40}], 12),
        ([{"key": "timed_from", "value": "12"}, {"key": "timed_from"}, {"key": "timed_from", "value": 40}], 40),
    ],
)
def test_the_first_step_of_an_attempt(logs: list[dict[str, Any]], first: int | None) -> None:
    assert records.first_step(logs) == first
