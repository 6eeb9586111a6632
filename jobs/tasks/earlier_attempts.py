"""Read from the logs of a trial's earlier attempts when it began, and what its restart has cost."""

import json
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from bench.contract import mllog, regular_files, run_files
from bench.contract.plan import Trial

_MARK = b":::MLLOG "


def cost(run: Path, trial: Trial, *, step: int, samples: int) -> dict[str, Any]:
    """Return metadata of the record `resumed`, for an attempt that resumes after a step with so many samples.

    {first_run_start_ms}: run_start of the first attempt. {lost_s}: seconds from the checkpoint until now.
    {replayed_samples}: samples that earlier attempts trained after the checkpoint, in the records of their logs. Empty
    if no earlier log has these records.
    """
    every = [record for log in _logs(run, trial) for record in records(log)]
    starts = [record["time_ms"] for record in every if record.get("key") == mllog.RUN_START]
    saved = [record["time_ms"] for record in every if _is_of(record, mllog.CHECKPOINT, step)]
    if not starts or not saved:
        return {}
    trained = [count for record in every if isinstance(count := _metadata(record).get("samples_count"), int)]
    return {
        mllog.FIRST_RUN_START_MS: starts[0],
        "lost_s": (mllog.clocks_ms()[0] - saved[-1]) / 1000,
        "replayed_samples": max(0, max(trained, default=0) - samples),
    }


def _logs(run: Path, trial: Trial) -> Iterator[Path]:
    """Yield the logs of earlier attempts, the oldest first."""
    for number in range(1, 10_000):
        folder = run / run_files.attempt(trial.index, number)
        if not folder.exists():
            return
        yield folder / trial.log


def records(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log; a killed attempt may have cut its last line, or have left no log."""
    limit = regular_files.MAX_LOG_BYTES
    with suppress(OSError), BufferedReader(regular_files.opened(log, max_bytes=limit)) as lines:
        for line in lines:
            with suppress(ValueError):
                record = json.loads(line.partition(_MARK)[2])
                if isinstance(record, dict) and isinstance(record.get("time_ms"), int):
                    yield record


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    metadata = record.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _is_of(record: dict[str, Any], key: str, step: int) -> bool:
    return record.get("key") == key and _metadata(record).get("step") == step
