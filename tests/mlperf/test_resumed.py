"""Test the log of an attempt that was resumed from a checkpoint: speeds are valid, but there is no time to train."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.contract import mllog
from bench.mlperf.reader import read
from bench.mlperf.result import parse
from bench.results.training import TrainingResult
from bench.watch.tracker import Tracker
from helpers import clock

WriteLog = Callable[..., Path]
GBS, STEP_S, SAVE_S, EVAL_S = 16, 2.0, 30.0, 7.0
DONE = 500


@pytest.fixture
def resumed_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteLog:
    """Write steps 501 to 520: a checkpoint after 510, an evaluation and a checkpoint after 515."""

    def write(cost: dict[str, object] | None = None, **described: object) -> Path:
        path, now = tmp_path / "result_0.txt", clock.turned(monkeypatch)
        with mllog.Writer(path) as log:
            log.start(mllog.INIT_START)
            facts = {mllog.INITIAL_WEIGHTS: "checkpoint", mllog.DATA_SOURCE: "prepared", mllog.GLOBAL_BATCH_SIZE: GBS}
            for key, value in (facts | described).items():
                log.event(key, value)
            log.stop(mllog.INIT_STOP)
            log.start(mllog.RUN_START)
            now.now_s += 3
            log.event(mllog.RESUMED, DONE, **place(DONE), **(cost or {}))
            log.start(mllog.BLOCK_START, **place(DONE))
            for step in range(DONE + 1, DONE + 21):
                now.now_s += STEP_S
                if step % 5 == 0:
                    log.event(mllog.TRAIN_LOSS, 1.5, **place(step))
                    log.event(mllog.TRACKED_STATS, {mllog.STEP_TIMES: [STEP_S] * 5}, **place(step))
                if step in (510, 515, 520):
                    log.stop(mllog.BLOCK_STOP, **place(step))
                if step in (515, 520):
                    log.start(mllog.EVAL_START, **place(step))
                    now.now_s += EVAL_S
                    log.event(mllog.EVAL_ACCURACY, 0.9, **place(step))
                    log.stop(mllog.EVAL_STOP, **place(step))
                if step in (510, 515):
                    now.now_s += SAVE_S
                    log.event(mllog.CHECKPOINT, SAVE_S, **place(step))
                    log.start(mllog.BLOCK_START, **place(step))
            log.finish(mllog.SUCCESS, **place(DONE + 20))
        return path

    return write


def place(step: int) -> dict[str, int]:
    return {"samples_count": GBS * step, "step": step}


def test_speeds_are_of_this_attempt_without_saving(resumed_log: WriteLog) -> None:
    result = parse(resumed_log())
    assert result.throughput_samples_s == pytest.approx(GBS / STEP_S)
    assert [time_ms for _, time_ms in result.step_times_ms] == [1000 * STEP_S] * 20
    assert [samples for samples, _ in result.step_times_ms] == [GBS * step for step in range(501, 521)]
    assert [e.samples for e in result.evaluations] == [GBS * 515, GBS * 520]
    assert result.eval_times_s == (EVAL_S, EVAL_S)
    assert result.resumed_samples == GBS * DONE
    assert set(result.hyperparameters) == {"initial_weights", "data_source", "global_batch_size"}


def test_resumed_log_has_no_minutes_and_a_reason(resumed_log: WriteLog) -> None:
    result = parse(resumed_log())
    assert result.minutes is None and result.trials[0].minutes is None
    assert [(f.rule, f.severity) for f in result.findings] == [("LOG-21", "warning")]
    assert "resumed from a checkpoint after step 500 (8000 samples)" in result.findings[0].what
    assert result.valid
    assert not {"run_time", "time_to_train"} & {
        measured.name for measured in TrainingResult(result=result).measurements
    }


def test_minutes_begin_with_the_first_attempt_and_include_the_lost_time(resumed_log: WriteLog) -> None:
    alone = parse(resumed_log())
    assert alone.run_start_ms is not None and alone.run_stop_ms is not None
    first_ms = alone.run_start_ms - 600_000
    Path(alone.file).unlink()
    result = parse(resumed_log({mllog.FIRST_RUN_START_MS: first_ms, "lost_s": 42.25, "replayed_samples": 64}))
    assert result.minutes == pytest.approx(10 + (alone.run_stop_ms - alone.run_start_ms) / 60_000)
    assert "the minutes include 42.2 s that were lost; 64 samples were trained again" in result.findings[0].what
    Path(alone.file).unlink()
    later = parse(resumed_log({mllog.FIRST_RUN_START_MS: alone.run_start_ms + 1}))
    assert later.minutes is None, "the first attempt cannot begin after this one"


@pytest.mark.parametrize(
    "named",
    [{mllog.TARGET_ACCURACY: 0.925}, {mllog.SUBMISSION_BENCHMARK: "llama2_70b_lora", mllog.TARGET_ACCURACY: 0.925}],
)
def test_resumed_log_with_a_target_is_invalid(resumed_log: WriteLog, named: dict[str, object]) -> None:
    result = parse(resumed_log(**named))
    assert ("LOG-21", "error") in [(f.rule, f.severity) for f in result.findings]
    assert (result.valid, result.minutes) == (False, None)


def test_watch_shows_progress_and_pace(resumed_log: WriteLog) -> None:
    events, _ = read(resumed_log())
    resumed = next(n for n, event in enumerate(events) if event.key == mllog.RESUMED)
    tracker = Tracker()
    tracker.update(events[: resumed + 1])
    assert (tracker.progress.samples, tracker.progress.step_times_ms) == (GBS * DONE, ())
    tracker.update(events[resumed + 1 :])
    assert tracker.progress.samples == GBS * 520
    assert set(tracker.progress.step_times_ms) == {1000 * STEP_S}
