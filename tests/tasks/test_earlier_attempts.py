"""What the restart of a trial has cost, from the logs of its earlier attempts."""

from pathlib import Path

import pytest

from bench.contract import mllog, run_files
from bench.contract.plan import Trial
from helpers import clock
from jobs.tasks import earlier_attempts

TRIAL = Trial(index=1, seed=1, log=run_files.result(1))


def test_the_first_start_the_lost_time_and_the_samples_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt resumed from an older checkpoint, and saved step 10 again."""
    now = clock.turned(monkeypatch)
    began_s = now.now_s
    for number, (first, last) in enumerate(((0, 14), (5, 12)), 1):
        folder = tmp_path / run_files.attempt(1, number)
        folder.mkdir(parents=True)
        with mllog.Writer(folder / TRIAL.log) as log:
            log.start(mllog.RUN_START)
            for step in range(first + 1, last + 1):
                now.now_s += 2
                log.event(mllog.TRAIN_LOSS, 1.0, samples_count=16 * step, step=step)
                if step == 10:
                    saved_s = now.now_s
                    log.event(mllog.CHECKPOINT, 0.5, samples_count=160, step=10)
        with (folder / TRIAL.log).open("a") as file:
            file.write(':::MLLOG {"key": "train_lo')  # cut off when the rank was killed
        now.now_s += 30
    cost = earlier_attempts.cost(tmp_path, TRIAL, step=10, samples=160)
    assert cost == {
        "first_run_start_ms": int(began_s * 1000),
        "lost_s": pytest.approx(now.now_s - saved_s, abs=0.01),
        "replayed_samples": 64,
    }
    assert earlier_attempts.cost(tmp_path, TRIAL, step=14, samples=224) == {}, "no log has this checkpoint"
    assert earlier_attempts.cost(tmp_path, TRIAL, step=10, samples=999)["replayed_samples"] == 0
    assert earlier_attempts.cost(tmp_path / "new", TRIAL, step=10, samples=160) == {}
