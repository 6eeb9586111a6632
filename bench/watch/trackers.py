"""Write the curves of a log for experiment trackers: TensorBoard event files, MLflow file store, W&B offline runs.

The process that watches a run writes them into its run folder; ranks never do. They are written from the log alone:
after deletion, the next `runstop watch` writes them again. No other module imports the trackers' packages.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from bench import masking
from bench.contract import mllog
from bench.contract.plan import Plan
from bench.contract.schema import Tracker
from bench.errors import ConfigError
from bench.mlperf.reader import Event, is_number

EXTRAS = {Tracker.tensorboard: "tensorboard", Tracker.mlflow: "mlflow", Tracker.wandb: "wandb"}
"""The package of each tracker, which is also the name of runstop's extra that installs it."""
FOLDER = "trackers"
"""Folder in the run folder, with a subfolder for each tracker."""
_LOG = logging.getLogger(__name__)
_LOSS, _EVALUATION = "train/loss", "eval/value"
_MARK = "written_by_runstop"


class Point(NamedTuple):
    """One number of a curve, over samples trained on."""

    name: str
    value: float
    samples: int
    time_ms: int


class Curve(Protocol):
    """One trial in one tracker."""

    def add(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


def uninstalled(trackers: Iterable[Tracker]) -> list[ConfigError]:
    """Return the errors of the trackers whose packages are not installed here."""
    return [
        ConfigError(
            f"{EXTRAS[tracker]} is not installed",
            where=f"launch.trackers=[{tracker.name}]",
            fix=f"pip install 'runstop[{EXTRAS[tracker]}]'",
        )
        for tracker in trackers
        if find_spec(EXTRAS[tracker]) is None
    ]


def curves(plan: Plan, folder: Path, *, trial: str) -> "Curves | None":
    """Return the writer of a trial's curves, or None if the config has no trackers.

    A tracker that is not installed here is left out with a warning: another user may have started the run.
    """
    trackers = list(dict.fromkeys(plan.config.launch.trackers))
    for tracker in trackers.copy():
        for error in uninstalled([tracker]):
            _LOG.warning("%s gets no curves: %s; %s", tracker.name, error.what, error.fix)
            trackers.remove(tracker)
    return Curves(trackers, folder / FOLDER, trial) if trackers else None


def points(event: Event) -> Iterator[Point]:
    """Yield the points that a record adds to the curves; records without a sample count have none."""
    samples = event.metadata.get("samples_count")
    if not is_number(samples) or samples < 0:
        return
    key = event.key.rstrip()
    if key == mllog.TRAIN_LOSS:
        values = {_LOSS: event.value, "train/learning_rate": event.metadata.get("lr")}
    elif key == mllog.EVAL_ACCURACY:
        metric = event.metadata.get("metric")
        values = {f"eval/{metric}" if isinstance(metric, str) else _EVALUATION: event.value}
    elif key == mllog.TRACKED_STATS and isinstance(event.value, dict):
        values = {f"stats/{name}": value for name, value in event.value.items()}
    else:
        return
    for name, value in values.items():
        if is_number(value):
            yield Point(masking.masked(name), float(value), int(samples), event.time_ms)


@dataclass(slots=True)
class Curves:
    """Writes the curves of one trial while its log is read; if the log restarts, they are written again."""

    trackers: Sequence[Tracker]
    folder: Path
    """The folder of all trackers of this run."""
    trial: str
    _open: list[Curve] = field(default_factory=list)
    _lock: IO[str] | None = None
    _is_off: bool = False
    """Whether writing is off, because another process writes these curves or writing has failed."""

    def update(self, events: Iterable[Event]) -> None:
        new_points = [point for event in events for point in points(event)]
        if not new_points or self._is_off:
            return
        try:
            self._is_off = self._lock is None and not self._begin()
            for curve in self._open:
                curve.add(new_points)
        except ConfigError:  # the folder has files of another program
            raise
        except Exception as error:  # noqa: BLE001 - a full disk or an error of the tracker must not end the run
            _warn(error, self.folder)
            self._is_off = True

    def restart(self) -> None:
        """Prepare for another log: the next points are its first ones."""
        self.close()
        self._is_off = False

    def close(self) -> None:
        for curve in self._open:
            try:
                curve.close()
            except Exception as error:  # noqa: BLE001 - as in `update`
                _warn(error, self.folder)
        self._open.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _begin(self) -> bool:
        """Open all trackers with empty folders; return False if another process writes these curves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / f".{self.trial}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        try:
            for tracker in self.trackers:
                self._open.append(_OPEN[tracker](_emptied(self.folder / tracker.name / self.trial)))
        except BaseException:
            self.close()
            raise
        return True


def _warn(error: Exception, folder: Path) -> None:
    where = getattr(error, "filename", None) or folder
    _LOG.warning(
        "no more curves are written for the trackers: %s: %s", where, getattr(error, "strerror", None) or error
    )


def _emptied(folder: Path) -> Path:
    """Return an empty folder; one that runstop wrote before is removed first.

    Raises:
        ConfigError: the folder has files that runstop did not write.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARK).exists():
            raise ConfigError(
                "runstop did not create this folder and does not overwrite its files",
                where=str(folder),
                fix="rename the folder",
            )
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)  # atomic, so that no partly removed folder without our mark remains
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    return folder


class _TensorBoard:
    """A TensorBoard event file."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        self._record: Callable[..., Any] = Record
        self._summary: Any = Summary

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            value = self._summary.Value(tag=point.name, simple_value=point.value)
            summary = self._summary(value=[value])
            self._writer.add_event(self._record(wall_time=point.time_ms / 1000, step=point.samples, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    """A run in a file store: `mlflow ui --backend-store-uri FOLDER`."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # newer versions default to a database, but still read file stores
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=folder.as_uri())
        experiment = self._client.create_experiment("runstop")
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            self._client.log_metric(self._run, point.name, point.value, timestamp=point.time_ms, step=point.samples)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _WandB:
    """An offline run, without network access: `wandb sync FOLDER/wandb/offline-run-*` uploads it."""

    def __init__(self, folder: Path) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        self._run: Any = wandb.init(
            mode="offline", project="runstop", name=folder.name, dir=str(folder), settings=settings, reinit="create_new"
        )
        self._run.define_metric("*", step_metric="samples")

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({point.name: point.value, "samples": point.samples, "time_ms": point.time_ms})

    def close(self) -> None:
        with suppress(OSError):
            self._run.finish()


_OPEN: dict[Tracker, Callable[[Path], Curve]] = {
    Tracker.tensorboard: _TensorBoard,
    Tracker.mlflow: _MLflow,
    Tracker.wandb: _WandB,
}
