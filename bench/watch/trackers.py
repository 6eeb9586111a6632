"""The curves of a log for experiment trackers: TensorBoard's event files, MLflow's file store, W&B's offline runs.

Whoever watches a run writes them, beside its logs; ranks never do. A tracker is written from the log alone, so that it
can be deleted, and is there again after the next `runstop watch`. The only module that imports the trackers' packages.
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
"""The package of each tracker, which is also the extra of ours that installs it."""
FOLDER = "trackers"
"""In the run folder; one folder for each tracker below it."""
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


def require(trackers: Iterable[Tracker]) -> None:
    """Raise ConfigError for a tracker whose package is not installed here."""
    for tracker in trackers:
        if find_spec(EXTRAS[tracker]) is None:
            raise ConfigError(
                f"{EXTRAS[tracker]} is not installed",
                where=f"launch.trackers=[{tracker.name}]",
                fix=f"pip install 'runstop[{EXTRAS[tracker]}]'",
            )


def curves(plan: Plan, folder: Path, *, trial: str) -> "Curves | None":
    """Return what the curves of a trial of this run are written with, or None where nobody asked for them.

    A tracker that is not installed here is left out with a warning: whoever watches a run may not be who started it.
    """
    wanted = list(dict.fromkeys(plan.config.launch.trackers))
    for tracker in wanted.copy():
        try:
            require([tracker])
        except ConfigError as error:
            _LOG.warning("the curves are not written for %s: %s; %s", tracker.name, error.what, error.fix)
            wanted.remove(tracker)
    return Curves(wanted, folder / FOLDER, trial) if wanted else None


def points(event: Event) -> Iterator[Point]:
    """Yield the numbers that a record adds to the curves; a record that counts no samples has no place on them."""
    samples = event.metadata.get("samples_count")
    if not is_number(samples) or samples < 0:
        return
    key = event.key.rstrip()
    if key == mllog.TRAIN_LOSS:
        named = {_LOSS: event.value, "train/learning_rate": event.metadata.get("lr")}
    elif key == mllog.EVAL_ACCURACY:
        metric = event.metadata.get("metric")
        named = {f"eval/{metric}" if isinstance(metric, str) else _EVALUATION: event.value}
    elif key == mllog.TRACKED_STATS and isinstance(event.value, dict):
        named = {f"stats/{name}": value for name, value in event.value.items()}
    else:
        return
    for name, value in named.items():
        if is_number(value):
            yield Point(masking.masked(name), float(value), int(samples), event.time_ms)


@dataclass(slots=True)
class Curves:
    """The curves of one trial, written while its log is read; a log that begins anew has them written anew."""

    trackers: Sequence[Tracker]
    folder: Path
    """The folder of all trackers of this run."""
    trial: str
    _open: list[Curve] = field(default_factory=list)
    _lock: IO[str] | None = None
    _is_off: bool = False
    """Whether nothing is written, because another process writes these curves already or writing has failed."""

    def take(self, events: Iterable[Event]) -> None:
        found = [point for event in events for point in points(event)]
        if not found or self._is_off:
            return
        try:
            self._is_off = self._lock is None and not self._begin()
            for curve in self._open:
                curve.add(found)
        except ConfigError:  # somebody else's files lie there
            raise
        except Exception as error:  # noqa: BLE001 - a full disk, or a tracker's own error: the run goes on all the same
            _warn(error, self.folder)
            self._is_off = True

    def begin_anew(self) -> None:
        """Forget what was written: the next points are the first ones of another log."""
        self.close()
        self._is_off = False

    def close(self) -> None:
        for curve in self._open:
            try:
                curve.close()
            except Exception as error:  # noqa: BLE001 - as in `take`
                _warn(error, self.folder)
        self._open.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _begin(self) -> bool:
        """Return whether this process is the one that writes, with all trackers open and empty."""
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
    _LOG.warning("trackers are not written: %s: %s", where, getattr(error, "strerror", None) or error)


def _emptied(folder: Path) -> Path:
    """Return a new folder; one that we wrote before is removed, and anything else is left alone.

    Raises:
        ConfigError: the folder holds what is not ours.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARK).exists():
            raise ConfigError(
                "this folder is not of our making, and is not overwritten", where=str(folder), fix="move it away"
            )
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)  # in one step, or half of it would be left without the mark that it is ours
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    return folder


class _TensorBoard:
    """An event file; TensorBoard shows the folder while it grows."""

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
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want a database, and still read these
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
    """An offline run: `wandb sync FOLDER/wandb/offline-run-*` uploads it; nothing here talks to a server."""

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
