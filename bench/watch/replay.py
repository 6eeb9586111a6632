"""Replay a finished log: the state and forecast of the trial after each record."""

from collections.abc import Iterator
from pathlib import Path

from bench.errors import LogError
from bench.mlperf import reader
from bench.watch import prediction
from bench.watch.lines import View
from bench.watch.prediction import Planned
from bench.watch.tracker import Tracker


def replay(path: Path | str, *, planned: Planned | None = None) -> Iterator[View]:
    """Yield the view of a trial after each record of its log, with the forecast at that moment.

    All views share one progress object, which the next record changes.

    Raises:
        LogError: the file cannot be read, or has no record.
    """
    events, _ = reader.read(path)
    if not events:
        raise LogError(
            "the file cannot be replayed, because it has no MLLOG line",
            where=str(path),
            fix="give the result_K.txt of a trial",
        )
    known, tracker, name = planned or Planned(), Tracker(), Path(path).name
    for event in events:
        tracker.update([event])
        outlook = prediction.look(tracker.progress, known, event.time_ms)
        yield View(name=name, progress=tracker.progress, planned=known, outlook=outlook)
