"""The records of a log as short texts: `event key value {metadata}`, without times and places in the code."""

import json
from pathlib import Path

from bench.contract import mllog

EVENTS = {"POINT_IN_TIME": ".", "INTERVAL_START": "start", "INTERVAL_END": "stop"}
LEFT_OUT = {"file", "lineno", mllog.MONOTONIC_MS}


def of_log(path: Path) -> list[str]:
    """Return the records of a log that our writer has written; a missing value and empty metadata are left out."""
    shown = []
    for line in path.read_text().splitlines():
        record = json.loads(line.removeprefix(":::MLLOG "))
        words = [EVENTS[record["event_type"]], record["key"]]
        words += [] if record["value"] is None else [json.dumps(record["value"])]
        metadata = {name: value for name, value in record["metadata"].items() if name not in LEFT_OUT}
        shown.append(" ".join([*words, *([json.dumps(metadata)] if metadata else [])]))
    return shown
