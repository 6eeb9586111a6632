"""A kind of task that this project does not have is added to a copy of the tree, and every tool takes it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.starts, pytest.mark.long]

ROOT, ECHO = Path(__file__).parents[2], Path(__file__).parent / "echo"
MAX_HUNKS = 8
LOCAL = ("task=echo_tiny", "cluster=local", "launch.health=false")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree with the echo kind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("bench", "jobs", "conf"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ECHO / "files", tree, dirs_exist_ok=True)
    subprocess.run(["git", "apply", "--whitespace=error", ECHO / "hooks.patch"], cwd=tree, check=True)
    return tree


@pytest.fixture(scope="module")
def run(tree: Path) -> Path:
    """Return the folder of a run that echoed."""
    folder = tree / "runs" / "echo"
    runstop(tree, "launch", *LOCAL, f"launch.folder={folder}")
    return folder


def runstop(tree: Path, *words: object, status: int = 0) -> str:
    """Return what a command printed to standard output; it must end with this exit code."""
    first, *rest = map(str, words)
    argv = [sys.executable, "-m", *(["bench.launch"] if first == "launch" else ["bench", first]), *rest]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(argv, cwd=tree, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_new_kind_changes_few_existing_files() -> None:
    patch = (ECHO / "hooks.patch").read_text()
    hunks = re.findall(r"^@@ ", patch, re.MULTILINE)
    assert 0 < len(hunks) <= MAX_HUNKS
    for path in re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE):
        assert f"`{path}`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_it_is_planned(tree: Path) -> None:
    shown = runstop(tree, "plan", *LOCAL)
    assert "one one two two" in shown
    assert json.loads(runstop(tree, "plan", *LOCAL, "--json"))["words"] == ["one", "one", "two", "two"]


def test_wrong_input_is_refused(tree: Path) -> None:
    runstop(tree, "plan", *LOCAL, "task.echo.repeats=0", status=2)


def test_a_run_is_judged_and_reported(tree: Path, run: Path) -> None:
    assert "word_rate" in runstop(tree, "parse", run / "result_0.txt", "--json")
    runstop(tree, "verify", run)
    runstop(tree, "report", run, "-o", tree / "page")
    assert "echo" in (tree / "page" / "report.html").read_text()
    assert (tree / "page" / "words.csv").read_text().count("two") == 2


def test_missing_records_are_problems(tree: Path) -> None:
    failed, problem = tree / "failed" / "echo", "two was not echoed"
    runstop(tree, "launch", *LOCAL, "task.echo.loses=two", f"launch.folder={failed}", status=1)
    assert problem in runstop(tree, "parse", failed / "result_0.txt", status=1)
    assert problem in (failed / "ledger.json").read_text()
    assert problem in runstop(tree, "why", failed, status=1)


def test_two_arms_are_compared_and_recorded(tree: Path, run: Path) -> None:
    runstop(tree, "study", "echo", "cluster=local", "-o", tree / "study")
    assert "words/s" in (tree / "study" / "index.html").read_text()
    assert "word_rate" in runstop(tree, "history", "echo_tiny", "--folder", run.parent, "--json")
