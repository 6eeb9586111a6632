"""Clocks of logs under test: one that a test turns, and records that are moved by both of their clocks."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.contract import mllog


@dataclass
class Clock:
    """What our emitter reads instead of the machine's clocks; `set_s` is how far the wall clock was set."""

    now_s: float = 1.8e9
    set_s: float = 0.0
    boot_s: float = 1.7e9

    def read_ms(self) -> tuple[int, int]:
        return round((self.now_s + self.set_s) * 1000), round((self.now_s - self.boot_s) * 1000)


def turned(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock of its own for every log that is written from here on."""
    clock = Clock()
    monkeypatch.setattr(mllog, "clocks_ms", clock.read_ms)
    return clock


@contextmanager
def in_zone(name: str) -> Iterator[None]:
    """Use a time zone for local times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


def move(path: Path, key: str, by_ms: int) -> None:
    """Move the records of one key by both clocks, as if they had been written at another time."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(_moved(line, by_ms) if f'"key": "{key}"' in line else line for line in lines))


def _moved(line: str, by_ms: int) -> str:
    return re.sub(r'("(?:time|monotonic)_ms": )(-?\d+)', lambda match: f"{match[1]}{int(match[2]) + by_ms}", line)


def time_ms(path: Path, key: str) -> int:
    """Return the wall clock of the one record of a key."""
    (match,) = re.findall(rf'"time_ms": (\d+), "event_type": "\w+", "key": "{key}"', path.read_text())
    return int(match)
