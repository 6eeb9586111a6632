"""The curves of a log in each tracker's format, read back with the tracker's own reader if it is installed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import watch
from bench.contract import mllog, plan_kinds
from bench.contract.schema import Tracker
from bench.errors import ConfigError
from bench.mlperf import reader
from bench.planning import compose
from bench.watch import How, sources, trackers
from helpers.failing_disk import contents, failing

MakeLog = Callable[..., Path]
LOSSES = (0.95, 0.93, 0.92)
EVALUATIONS = [(1536, 0.95), (1920, 0.93), (2304, 0.92)]
"""The points that `written_log` writes for these losses, by the official schedule."""


def run_folder(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    plan = compose.compose([f"launch.trackers=[{','.join(names)}]"])
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    return folder


def watched(folder: Path) -> None:
    watch.watch(sources.run_folder(folder), How(once=True, show_json=lambda *_: None))


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@pytest.mark.long
def test_tensorboard_reads_what_watch_wrote(tmp_path: Path, written_log: MakeLog) -> None:
    pytest.importorskip("tensorboard")
    folder = run_folder(tmp_path, "tensorboard")
    written_log(name="run/result_0.txt", evals=LOSSES)
    watched(folder)
    curves = folder / "trackers" / "tensorboard" / "result_0"
    scalars = tensorboard_scalars(curves)
    assert scalars["eval/value"] == EVALUATIONS
    assert scalars["train/loss"] == [(samples, loss + 0.1) for samples, loss in EVALUATIONS]
    assert scalars["train/learning_rate"] == [(samples, 4e-4) for samples, _ in EVALUATIONS]
    assert scalars["stats/train_step_time"] == [(samples, 3.2) for samples, _ in EVALUATIONS]
    watched(folder)  # watching again writes the same curve, not a second one
    assert tensorboard_scalars(curves) == scalars
    assert not list(tmp_path.rglob("rank_logs"))


def test_growing_log_is_written_once_and_a_new_log_again(tmp_path: Path, written_log: MakeLog) -> None:
    pytest.importorskip("tensorboard")
    whole = written_log(name="whole.txt", evals=LOSSES).read_bytes()
    log, curves = tmp_path / "log.txt", trackers.Curves([Tracker.tensorboard], tmp_path / "trackers", "log")
    follower = sources.Watched("log", reader.Follower(log), curves=curves)
    with log.open("wb", buffering=0) as growing:
        growing.write(whole[: len(whole) // 2])
        follower.poll()
        growing.write(whole[len(whole) // 2 :])
    follower.poll()
    assert tensorboard_scalars(tmp_path / "trackers/tensorboard/log")["eval/value"] == EVALUATIONS
    log.write_bytes(written_log(name="other.txt", evals=(0.9,)).read_bytes())
    follower.poll()
    curves.close()
    assert tensorboard_scalars(tmp_path / "trackers/tensorboard/log")["eval/value"] == [(1536, 0.9)]


def test_two_watchers_do_not_write_every_point_twice(tmp_path: Path, written_log: MakeLog) -> None:
    pytest.importorskip("tensorboard")
    events, _ = reader.read(written_log(evals=LOSSES))
    first, second = (trackers.Curves([Tracker.tensorboard], tmp_path / "t", "trial") for _ in range(2))
    first.update(events[:-8])
    second.update(events)
    first.update(events[-8:])
    first.close()
    second.update(events[-8:])  # it stays off, since it has not seen the whole curve
    second.close()
    assert tensorboard_scalars(tmp_path / "t/tensorboard/trial")["eval/value"] == EVALUATIONS


def test_other_folder_is_kept(tmp_path: Path, written_log: MakeLog) -> None:
    events, _ = reader.read(written_log())
    taken = tmp_path / "trackers" / "tensorboard" / "result_0"
    taken.mkdir(parents=True)
    (taken / "thesis.txt").write_text("not ours")
    with pytest.raises(ConfigError, match="does not overwrite its files"):
        trackers.Curves([Tracker.tensorboard], tmp_path / "trackers", "result_0").update(events)
    assert (taken / "thesis.txt").read_text() == "not ours"


def test_unwritable_folder_does_not_end_watch(
    tmp_path: Path, written_log: MakeLog, caplog: pytest.LogCaptureFixture
) -> None:
    events, _ = reader.read(written_log())
    (tmp_path / "trackers").write_text("a file where a folder should be")
    curves = trackers.Curves([Tracker.tensorboard], tmp_path / "trackers", "result_0")
    curves.update(events)
    curves.update(events)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no more curves are written for the trackers"
    ]


class FileTracker:
    """Writes each point as a line."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "points.txt"
        self.path.write_text("")

    def add(self, points: Sequence[trackers.Point]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{point.name} {point.samples} {point.value}\n" for point in points)

    def close(self) -> None:
        self.path.with_name("closed").touch()


def test_failed_tracker_does_not_end_watch_and_the_next_writes_all(
    tmp_path: Path, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Existing curves are replaced; other files in the run folder are not touched."""
    monkeypatch.setitem(trackers._OPEN, Tracker.tensorboard, FileTracker)
    events, _ = reader.read(written_log(name="result_0.txt"))
    root = tmp_path / "trackers"

    def write() -> None:
        curves = trackers.Curves([Tracker.tensorboard], root, "result_0")
        curves.update(events)
        curves.close()

    write()
    whole, number, warned = contents(tmp_path), 0, 0
    while True:
        with failing(root, number) as disk:
            write()
        if not disk.failed:
            break
        warned += "No space left" in caplog.text
        caplog.clear()
        write()
        assert contents(tmp_path) == whole, disk.failed
        number += 1
    assert warned >= 6 and number >= 8


def test_tracker_error_does_not_end_a_run(
    tmp_path: Path, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(FileTracker):
        def add(self, points: Sequence[trackers.Point]) -> None:
            raise RuntimeError("the server is away")

        def close(self) -> None:
            raise RuntimeError("still away")

    monkeypatch.setitem(trackers._OPEN, Tracker.tensorboard, Failing)
    curves = trackers.Curves([Tracker.tensorboard], tmp_path / "trackers", "result_0")
    curves.update(reader.read(written_log())[0])
    curves.close()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "the server is away",
        "still away",
    ]


def test_records_without_samples_or_numbers_are_no_points(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with mllog.Writer(path) as log:
        log.event(mllog.TRAIN_LOSS, 1.5, samples_count=8, lr="high")
        log.event(mllog.TRAIN_LOSS, 1.5)
        log.event(mllog.TRAIN_LOSS, 1.5, samples_count=-8)
        log.event(mllog.TRACKED_STATS, {"throughput": 2.5, "note": "warm", "ok": True}, samples_count=16)
        log.event(mllog.EVAL_ACCURACY, 0.5, samples_count=16, metric="FID")
        log.event(mllog.SEED, 7, samples_count=16)
    curve = [point[:3] for event in reader.read(path)[0] for point in trackers.points(event)]
    assert curve == [("train/loss", 1.5, 8), ("stats/throughput", 2.5, 16), ("eval/FID", 0.5, 16)]


def test_missing_tracker_is_refused_before_the_start(
    tmp_path: Path, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bench.launch import start

    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    plan = compose.compose(["launch.trackers=[tensorboard]", f"cluster.paths.logs={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match=r"tensorboard is not installed[\s\S]*pip install 'runstop\[tensorboard\]'"):
        start.run(plan, "", [])
    assert not (tmp_path / "runs").exists()
    folder = run_folder(tmp_path, "tensorboard")  # but an existing run can be watched without it
    written_log(name="run/result_0.txt")
    watched(folder)
    assert "pip install 'runstop[tensorboard]'" in caplog.text and not (folder / "trackers").exists()


def test_mlflow_reads_what_was_written(tmp_path: Path, written_log: MakeLog) -> None:
    mlflow = pytest.importorskip("mlflow")
    curves = trackers.Curves([Tracker.mlflow], tmp_path / "t", "result_0")
    curves.update(reader.read(written_log(evals=LOSSES))[0])
    curves.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "t/mlflow/result_0").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "runstop"]
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(mlflow_run.info.run_id, "eval/value")
    assert sorted((point.step, point.value) for point in history) == EVALUATIONS
    assert mlflow_run.info.status == "FINISHED"


def test_wandb_keeps_an_offline_run(tmp_path: Path, written_log: MakeLog) -> None:
    """Its records are in the run's file, and nothing is sent over the network."""
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    curves = trackers.Curves([Tracker.wandb], tmp_path / "t", "result_0")
    curves.update(reader.read(written_log(evals=LOSSES))[0])
    curves.close()
    wandb.teardown()
    (path,) = (tmp_path / "t/wandb/result_0").rglob("*.wandb")
    data, at, values = path.read_bytes(), 7, []
    assert len(data) < 32768, "records of one block: no record is cut"
    while at < len(data):  # LevelDB's log format: checksum, length, type
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        if "eval/value" in row:
            values.append((row["samples"], row["eval/value"]))
    assert values == EVALUATIONS
