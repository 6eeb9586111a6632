"""Whether NeMo's own environment is there, for runs on this machine. Its packages are looked at, not imported."""

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from bench.contract.nemo import NEMO, VERSION
from bench.contract.plan import Plan
from bench.rules.check import CannotTellError, Check, Finding, Subject, broken

FIX = "make it as docs/nemo.md says, then export NEMO_PYTHON=…/bin/python, or choose engine=megatron"


def is_nemo(plan: Plan) -> bool:
    """Return whether NeMo trains."""
    return plan.config.nemo is not None


def environment(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the interpreter of the trials is missing, or has not the NeMo whose recipes are used."""
    assert subject.plan.config.nemo is not None
    python = subject.plan.config.nemo.python
    if python != "python" and not os.access(python, os.X_OK):
        yield broken("RUN-08", "there is no such interpreter", f"engine.nemo.python={python}", fix=FIX)
        return
    found = _here() if python == "python" else _beside(Path(python))
    if found != VERSION:
        what = f"{NEMO} is {found}, and {VERSION} has the recipes" if found else f"{NEMO} is not installed"
        where = f"engine.nemo.python={python}" + (f" ({sys.executable})" if python == "python" else "")
        yield broken("RUN-08", what, where, fix=FIX)
    else:
        yield f"{NEMO} {found} of {python}"


def _here() -> str | None:
    try:
        return metadata.version(NEMO)
    except metadata.PackageNotFoundError:
        return None


def _beside(python: Path) -> str | None:
    """Return the version that is installed in the environment of an interpreter; None if there is none.

    Raises:
        CannotTellError: the interpreter is of no environment whose packages lie where they usually do.
    """
    folders = list(python.parent.parent.glob("lib/python3*/site-packages"))
    if not folders:
        raise CannotTellError(f"{python} has no site-packages beside it")
    pattern = rf"{NEMO.replace('-', '[-_]')}-(.+)\.dist-info"
    names = (re.fullmatch(pattern, path.name) for folder in folders for path in folder.iterdir())
    return next((match[1] for match in names if match), None)


CHECK = Check("environment of NeMo", ("RUN-08",), environment, is_nemo)
