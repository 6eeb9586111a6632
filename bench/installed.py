"""Refuse a Python that is too old for runstop, or in which runstop is not installed, in one sentence.

The code until this check also runs on Python 3.8: `bench/__init__.py`, both `__main__.py`, and this file.
"""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = (3, 11)
MODULES = ("hydra", "omegaconf", "msgspec", "rich", "numpy", "submitit")
"""Some of the packages that an installation has; a system's Python lacks at least one of them."""


def require() -> None:
    """Exit with code 2 if this Python cannot run runstop's commands."""
    problem = ""
    if sys.version_info < OLDEST:
        version = "{}.{}.{}".format(*sys.version_info[:3])  # noqa: UP032
        problem = "runstop needs Python {}.{} or later, but {} is Python {}".format(*OLDEST, _python(), version)
    elif any(find_spec(name) is None for name in MODULES):
        problem = "runstop is not installed for {}".format(_python())  # noqa: UP032
    if problem:
        print("{}: {}".format(problem, _fix()), file=sys.stderr)  # noqa: UP032
        sys.exit(2)


def _python() -> str:
    return sys.executable or "this Python"


def _fix() -> str:
    """Return what to type: the command of the clone's own environment, or how to create it."""
    root = Path(__file__).absolute().parent.parent
    script = root / ".venv" / "bin" / "runstop"
    if script.is_file():
        return "use {}".format(shlex.quote(str(script)))  # noqa: UP032
    if (root / "Makefile").is_file():
        return "to install it, run: cd {} && make run".format(shlex.quote(str(root)))  # noqa: UP032
    return "install it in an environment with Python {}.{} or later".format(*OLDEST)
