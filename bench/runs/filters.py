"""Select runs by task, cluster, time of launch and tag."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

from bench.errors import ConfigError
from bench.runs import names, tags
from bench.runs.folder import plan_in

_AGE = re.compile(r"(\d{1,6})\s*(min|h|d|w)")
_SECONDS = {"min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_FORMS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What a run must have to be selected; None selects every run. Names may be patterns, such as lora_*."""

    task: str | None = None
    cluster: str | None = None
    tag: str | None = None
    since: str | None = None
    """An age (36h, 7d) or a local time (2026-11-20, "2026-11-20 14:00")."""

    def __str__(self) -> str:
        return " ".join(f"--{each.name} {value}" for each in fields(self) if (value := getattr(self, each.name)))

    def selected(self, folders: Sequence[Path]) -> list[Path]:
        """Return the selected run folders.

        Raises:
            ConfigError: `since` is no time.
        """
        since_s = 0.0 if self.since is None else seconds(self.since)
        return [folder for folder in folders if names.launched_s(folder) >= since_s and self._has(folder)]

    def _has(self, folder: Path) -> bool:
        if self.tag is not None and not any(fnmatchcase(tag, self.tag) for tag in tags.read(folder).tags):
            return False
        if self.task is None and self.cluster is None:
            return True
        plan = plan_in(folder)
        if plan is None:
            return False
        given = ((self.task, plan.config.task.name), (self.cluster, plan.config.cluster.name))
        return all(pattern is None or fnmatchcase(name, pattern) for pattern, name in given)


def seconds(text: str) -> float:
    """Return a time in seconds since 1970: an age before now, or a local time.

    Raises:
        ConfigError: it is neither.
    """
    if match := _AGE.fullmatch(text):
        return time.time() - int(match[1]) * _SECONDS[match[2]]
    for form in _FORMS:
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    fix = "give an age, such as 36h or 7d (min, h, d or w), or a local time: 2026-11-20 or '2026-11-20 14:00'"
    raise ConfigError(f"{text!r} is not a time", where="--since", fix=fix)
