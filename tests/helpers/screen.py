"""What a terminal of a given width shows."""

import io
import re

import pytest


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """What was printed, without colours and blanks at line ends."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
        return "\n".join(line.rstrip() for line in plain.splitlines())


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """Return a terminal that is so many letters wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()
