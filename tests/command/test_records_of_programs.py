"""Records that a program logs by MLPerf's rules: what they count, and what is judged of them."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog
from bench.results import kind
from jobs.command.adapters import MllogRecord, Reported
from jobs.command.records import MllogRecorder


def record(key: str, value: Any = None, *, event_type: str = "POINT_IN_TIME", **metadata: Any) -> Reported:
    return Reported(record=MllogRecord(event_type=event_type, key=key, value=value, metadata=metadata, time_ms=1000.0))


@pytest.mark.parametrize(
    ("records", "place"),
    [
        ([record("train_loss", 1.5, samples_count=0)], "sample 0"),
        (
            [record("tracked_stats", {"throughput": 2.5}, step=1536)],
            "step 1,536 of tracked_stats, which may count samples",
        ),
        (
            [record("block_stop", samples_count=1536), record("tracked_stats", {"throughput": 2.5}, step=1536)],
            "sample 1,536",
        ),
        ([record("tracked_stats", {"throughput": 2.5}, step=192, samples_count=1536)], "sample 1,536"),
        ([record("train_loss", 1.5, step=12), record("train_loss", 1.5, step=11)], "step 12"),
        ([record("train_loss", 1.5, step=True), record("train_loss", 1.5, step="7")], "step 0"),
    ],
)
def test_a_message_says_what_a_program_counts(records: list[Reported], place: str) -> None:
    """In tracked_stats of NVIDIA's llama2_70b_lora `step` counts samples, in those of others optimizer steps."""
    with mllog.Writer(None) as log:
        recorder = MllogRecorder(log, dict)
        for one in records:
            recorder.record(one, 0.0)
    assert recorder.place == place


@pytest.mark.parametrize(("is_program", "rules"), [(True, []), (False, ["LOG-04"])])
def test_a_program_may_repeat_a_count_as_published_logs_do(is_program: bool, rules: list[str], tmp_path: Path) -> None:
    """As NVIDIA's program of v5.0: several tracked_stats at step 0. In records of our own engines it is an error."""
    path, seconds = tmp_path / "result_0.txt", count(1_790_000_000)
    with mllog.Writer(path, clocks=lambda: (1000 * next(seconds), 0)) as log:
        log.event(mllog.INITIAL_WEIGHTS, "checkpoint")
        if is_program:
            recorder = MllogRecorder(log, dict)
            for one in (record("run_start", event_type="INTERVAL_START"), *[record("tracked_stats", {}, step=0)] * 2):
                recorder.record(one, 0.0)
        else:
            log.start(mllog.RUN_START)
            for _ in range(2):
                log.event(mllog.TRACKED_STATS, {}, step=0)
    rising = [item.rule for item in kind.read(path).result.findings if "does not increase" in item.what]
    assert rising == rules
