"""Programs that log by MLPerf's rules: each record is a `:::MLLOG {json}` anywhere in a line.

Source: MLCommons' training_policies, "Logging"; mlperf_logging.mllog, format of version 1.
"""

import json
import math
from typing import Any

from bench.contract.program import Program
from jobs.command.adapters import MllogRecord, Reported, Unreadable

TOKEN = ":::MLLOG"
TYPES = ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")


class Reader:
    """Takes over the records of a program."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Reported | None:
        _, token, text = line.partition(TOKEN)
        if not token or text[:1] not in (" ", "\t", "{"):
            return None
        try:
            raw, end = _DECODER.raw_decode(text.strip())
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"a record is not valid JSON: {error}") from error
        if TOKEN in text.strip()[end:]:
            raise Unreadable("a line contains two records")
        return Reported(record=_record(raw))

    def finished(self) -> Reported | None:
        return None


_DECODER = json.JSONDecoder()
"""Python's decoder reads NaN, too: such a loss is recognised later, as of any other program."""


def _record(raw: Any) -> MllogRecord:
    if not isinstance(raw, dict):
        raise Unreadable("a record is not a JSON object")
    key, event_type, metadata, time_ms = (raw.get(name) for name in ("key", "event_type", "metadata", "time_ms"))
    if not isinstance(key, str) or event_type not in TYPES:
        raise Unreadable(
            f"a record has the key {key!r:.40} and the event_type {event_type!r:.40}, but key must be a text, and "
            f"event_type one of {', '.join(TYPES)}"
        )
    if not isinstance(metadata, dict):
        raise Unreadable(f"the metadata of the record {key:.40} is {metadata!r:.40}, but must be an object")
    if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not math.isfinite(time_ms):
        raise Unreadable(f"time_ms of the record {key:.40} is {time_ms!r:.40}, but must be a number")
    return MllogRecord(event_type=event_type, key=key, value=raw.get("value"), metadata=metadata, time_ms=time_ms)
