"""Results of local SGD from a log: averagings, efficiency, groups that left; and odd content."""

from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog
from bench.mlperf.result import Result, parse
from bench.report.training import speed_rows
from bench.results.training import TrainingResult

CASES: dict[str, dict[str, Any]] = {"complete": {}, "left": {"left": 20}, "unexplained": {"averagings": False}}
STEP_S, EVERY, STEPS, STOPPED_S = 0.5, 10, 40, 30.0


def written(
    path: Path, *, averagings: bool = True, left: int | None = None, joined: int | None = None, **more: Any
) -> Result:
    """Return the result of 40 steps of half a second, with four weight averagings of 30 s each."""
    now_ms = 1_700_000_000_000

    def clocks() -> tuple[int, int]:
        return now_ms, now_ms - 1_000_000_000_000

    with mllog.Writer(path, clocks=clocks) as log:
        log.start(mllog.INIT_START)
        for key, value in ((mllog.INITIAL_WEIGHTS, "random"), (mllog.DATA_SOURCE, "grammar")):
            log.event(key, value)
        log.event(mllog.GLOBAL_BATCH_SIZE, 8)
        if averagings:
            log.event(mllog.LOCAL_SGD, 2, every_steps=EVERY, group=0)
        log.stop(mllog.INIT_STOP)
        log.start(mllog.RUN_START)
        log.start(mllog.BLOCK_START, samples_count=0)
        for step in range(EVERY, STEPS + 1, EVERY):
            now_ms += round(1000 * (EVERY * STEP_S + STOPPED_S))
            place = {"samples_count": 8 * step, "step": step}
            about = {
                "merge_step": step,
                "groups": [0, 1],
                "losses": {"0": 2.0 - step / 100, "1": 2.5 - step / 100},
                "step_times_s": {"0": STEP_S, "1": 0.4},
                "rank_bytes": 4_000_000,
                "exchange_s": 29.0,
                "waited_for_groups_s": 0.75,
                "training_stopped_s": STOPPED_S,
            }
            if left == step:
                log.event(mllog.GROUP_LEFT, 1, **place, merge_step=step, time_limit_s=30.0)
            if averagings:
                log.event(mllog.OUTER_STEP, step // EVERY, **place, **(about | more))
            if joined == step:
                log.event(mllog.GROUP_JOINED, 1, **place, rank_bytes=12_000_000, seconds=1.5)
            times = [*[STEP_S] * (EVERY - 1), STEP_S + STOPPED_S]
            log.event(mllog.TRACKED_STATS, {mllog.STEP_TIMES: times}, **place)
        log.stop(mllog.BLOCK_STOP, **place)
        log.start(mllog.EVAL_START, **place)
        log.event(mllog.EVAL_ACCURACY, 1.25, **place)
        log.stop(mllog.EVAL_STOP, **place)
        log.finish("success", **place)
    return parse(path)


def test_speed_and_loss_of_the_averaged_model_are_shown(tmp_path: Path) -> None:
    result = written(tmp_path / "result_0.txt", left=30)
    values = {measured.name: measured.value for measured in TrainingResult(result=result).measurements}
    assert values["efficiency_local_sgd"] == pytest.approx(20 / (20 + 4 * STOPPED_S))
    assert (values["inner_step_time"], values["averaging_time"], values["averaging_bytes"]) == (400.0, 29.0, 4e6)
    assert values["evaluation_loss"] == 1.25
    assert (
        result.local_sgd is not None
        and result.local_sgd.left == {"1": 30}
        and result.local_sgd.losses == {"0": 1.6, "1": 2.1}
    )
    rows = {name: (value, remark) for name, value, remark in speed_rows(result)}
    assert rows["local SGD groups"] == ("2", "weights averaged every 10 steps, 4 times; group 1 LEFT after step 30")
    assert rows["loss of the averaged model"] == ("1.2500", "training: group 0 1.6000, group 1 2.1000")
    assert rows["local SGD efficiency (%)"][0] == "14.3"


def test_a_group_that_left_is_a_warning_and_a_long_averaging_is_not(tmp_path: Path) -> None:
    rules = {name: [f.rule for f in written(tmp_path / name, **words).findings] for name, words in CASES.items()}
    assert "RUN-19" in rules["left"] and "RUN-19" not in rules["complete"]
    assert "RUN-18" not in rules["complete"], "30 s of weight averaging are not a stall"
    assert "RUN-18" in rules["unexplained"]


def test_a_group_that_rejoined_is_reported(tmp_path: Path) -> None:
    result = written(tmp_path / "result_0.txt", left=20, joined=30)
    assert result.local_sgd is not None and (result.local_sgd.left, result.local_sgd.joined) == ({"1": 20}, {"1": 30})
    (warning,) = (finding for finding in result.findings if finding.rule == "RUN-19")
    assert warning.what.endswith("the other groups trained on its rows until it rejoined after step 30")
    (row,) = (remark for name, _, remark in speed_rows(result) if name == "local SGD groups")
    assert row.endswith("group 1 LEFT after step 20; group 1 rejoined after step 30")


@pytest.mark.parametrize("odd", [None, "x", -1, 10**400, {"0": "y"}, [1], {"0": {"1": 2}}])
def test_no_content_makes_reading_fail(tmp_path: Path, odd: Any) -> None:
    names = ("losses", "step_times_s", "rank_bytes", "exchange_s", "training_stopped_s", "merge_step", "step")
    result = written(tmp_path / "result_0.txt", **{name: odd for name in names if name != "step"})
    assert result.local_sgd is not None and result.local_sgd.averagings == 4
    assert speed_rows(result)
