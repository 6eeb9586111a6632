"""Programs whose lines a regular expression describes: engine.command.patterns, with groups named as in `Reported`.

The first pattern that matches a line is used. A number may have thousands separators: 1,024.
"""

import re

from bench.contract.program import Program
from jobs.command.adapters import Reported, Unreadable

COUNTS = ("step", "resumed")


class Reader:
    """Applies the patterns."""

    def __init__(self, program: Program) -> None:
        self._patterns = [re.compile(pattern) for pattern in program.patterns]

    def read(self, line: str) -> Reported | None:
        for pattern in self._patterns:
            if match := pattern.search(line):
                groups = {name: text for name, text in match.groupdict().items() if text is not None}
                return Reported(**{name: _number(name, text) for name, text in groups.items()})  # type: ignore[arg-type]
        return None

    def finished(self) -> Reported | None:
        return None


def _number(name: str, text: str) -> float | int:
    try:
        number = float(text.replace(",", ""))
        return int(number) if name in COUNTS else number
    except (ValueError, OverflowError) as error:
        raise Unreadable(f"the pattern's group {name} matched {text!r:.40}, which is not a number") from error
