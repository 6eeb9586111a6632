"""A finished log as it was watched: what could be said of the trial after each of its records."""

from collections.abc import Iterator
from pathlib import Path

from bench.errors import LogError
from bench.mlperf import reader
from bench.watch import prediction
from bench.watch.lines import View
from bench.watch.prediction import Planned
from bench.watch.tracker import Tracker


def replay(path: Path | str, *, planned: Planned | None = None) -> Iterator[View]:
    """Yield the view of a trial after each record of its log, with the forecast as it was at that moment.

    A view's progress is one object that the next record changes: take from it what is needed before going on.

    Raises:
        LogError: the file cannot be read, or holds no record.
    """
    events, _ = reader.read(path)
    if not events:
        raise LogError("nothing to replay: no MLLOG line", where=str(path), fix="name the result_K.txt of a trial")
    known, tracker, name = planned or Planned(), Tracker(), Path(path).name
    for event in events:
        tracker.take([event])
        outlook = prediction.look(tracker.progress, known, event.time_ms)
        yield View(name=name, progress=tracker.progress, planned=known, outlook=outlook)
