"""Describe where logs come from: runs, dates, hardware, software and settings, the same for all kinds of pages."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bench.mlperf.result import Result
from bench.results.measurement import MACHINE_KEYS
from bench.texts import short_commits

_MOST_NAMES, _MOST_LETTERS = 4, 120


def date(time_ms: int | None) -> str:
    """Return a time of a log as UTC, such as 2026-11-26 07:59 UTC; empty for none, or one out of range."""
    try:
        return "" if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def identity(results: Sequence[Result], names: Sequence[str]) -> str:
    """Return the runs of a page and when they started, in one line."""
    runs = list(dict.fromkeys(names))
    more = f" and {len(runs) - _MOST_NAMES} more" if len(runs) > _MOST_NAMES else ""
    started = sorted(text for result in results if (text := date(result.run_start_ms)))
    when = "no date in the log"
    if started:
        when = started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"
    commits = dict.fromkeys(str(one.hyperparameters["commit"]) for one in results if one.hyperparameters.get("commit"))
    parts = (f"run{'s' if len(runs) > 1 else ''} {', '.join(runs[:_MOST_NAMES])}{more}", when)
    return " · ".join([*parts, *(f"commit {short_commits(commit)}" for commit in commits)])


def system(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the hardware and software in a log."""
    yield from machine(result.hyperparameters)
    yield from result.software.items()


def machine(logged: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what hyperparameters say about hardware and software."""
    yield from ((key.replace("_", " "), str(logged[key])[:200]) for key in MACHINE_KEYS if key in logged)


def settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return the settings in some logs; one that differs between them has all values."""
    names = dict.fromkeys(key for r in results for key in r.hyperparameters if key not in MACHINE_KEYS)
    logged = {key: [str(r.hyperparameters.get(key, "not logged")) for r in results] for key in names}
    return [(key, " | ".join(dict.fromkeys(values))[:_MOST_LETTERS]) for key, values in sorted(logged.items())]
