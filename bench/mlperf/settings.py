"""Read the settings and software versions of a run from its log."""

from typing import Any

from bench.contract import mllog
from bench.mlperf.log import Log
from bench.mlperf.reader import is_number

_SERIES = (
    *("submission_", mllog.CACHE_CLEAR, mllog.SEED, mllog.TRACKED_STATS, mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS),
    *(mllog.RUN_ATTEMPT, mllog.LOG_SHA256, mllog.INPUT_SHA256, mllog.ATTACHED_FILE),
    *(mllog.PROGRAM, mllog.PROGRAM_OUTPUT, mllog.TIMED_FROM),
    *(mllog.RESUMED, mllog.CHECKPOINT, mllog.DAMAGED_CHECKPOINT),
)
"""Keys, or prefixes of keys, that are not settings."""


def software(log: Log) -> dict[str, str]:
    """Return the version of each program that the log names."""
    versions = log.value("software")
    return {str(name): str(v) for name, v in versions.items()} if isinstance(versions, dict) else {}


def inputs(log: Log) -> dict[str, str]:
    """Return the checksum of each input that the log names: its rows, its checkpoint, its tokenizer."""
    return {str(record.metadata.get("input")): str(record.value) for record in log.all(mllog.INPUT_SHA256)}


def hyperparameters(log: Log) -> dict[str, Any]:
    """Return the settings with one value in the whole log, because some logs record them after run_start."""
    points = (key for key, records in log.by_key.items() if records[0].event_type == "POINT_IN_TIME")
    values = {key: log.value(key) for key in points if not key.startswith(_SERIES)}
    return {key: value for key, value in values.items() if is_number(value) or isinstance(value, str | bool)}
