"""Types of fixtures that many tests ask for."""

from collections.abc import Callable
from pathlib import Path

MakeLog = Callable[..., Path]
"""That of `written_log` (conftest.py)."""
