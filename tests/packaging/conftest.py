"""The wheel, built once for all tests that install it."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ranks import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `pip install runstop` would download."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    return next(folder.glob("runstop-*.whl"))
