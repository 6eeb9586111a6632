"""Commands in messages work in the user's shell, and a Python without runstop is refused in one sentence."""

import ast
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench import cli, hints, installed
from bench.errors import ConfigError
from bench.runs import folder
from helpers.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REACHED = ("__init__", "__main__", "installed", "launch/__init__", "launch/__main__")
"""Files that run before the check of the installation."""


@pytest.mark.parametrize("name", REACHED)
def test_what_runs_before_the_check_parses_on_python_3_8(name: str) -> None:
    ast.parse((ROOT / "bench" / f"{name}.py").read_text(), feature_version=(3, 8))


@pytest.mark.long
def test_the_check_knows_what_an_installation_has() -> None:
    oldest = ".".join(map(str, installed.OLDEST))
    assert PROJECT["requires-python"] == f">={oldest}"
    needed = {Requirement(line).name for line in PROJECT["dependencies"]}
    owners = packages_distributions()
    assert [name for name in installed.MODULES if not needed & {*owners[name]}] == []


@pytest.mark.starts
@pytest.mark.parametrize("words", [["bench"], ["bench", "plan"], ["bench.launch", "task=lora_tiny"]])
def test_a_python_without_the_packages_gets_one_sentence(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith(f"runstop is not installed for {sys.executable}: ") and str(ROOT) in line


OLD = [*Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.[89].*/bin/python")]
OLD += [*Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.10.*/bin/python")]


@pytest.mark.starts
@pytest.mark.skipif(not OLD, reason="pyenv has no Python 3.8 to 3.10 here")
@pytest.mark.parametrize("python", OLD, ids=lambda path: path.parts[-3])
def test_an_old_python_gets_one_sentence(python: Path, tmp_path: Path) -> None:
    for words in (["bench"], ["bench.launch"]):
        env = {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([python, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert line.startswith(f"runstop needs Python 3.11 or later, but {python} is Python 3.")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that is not activated; its path has a space and a letter outside of ASCII."""
    scripts = tmp_path / "sp ace" / "ünï" / "bin"
    scripts.mkdir(parents=True)
    for name in ("runstop", "python", "pip"):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    monkeypatch.setattr(hints, "_STARTED_AS", None)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme="": str(scripts if not scheme else tmp_path / "no"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return scripts


FORMS = {
    "to see why: runstop why runs/a": "to see why: {b}/runstop' why runs/a",
    "  fix:   runstop fetch --check F": "  fix:   {b}/runstop' fetch --check F",
    "runstop watch a   # show it": "{b}/runstop' watch a   # show it",
    "free disk space; `runstop runs` lists all": "free disk space; `{b}/runstop' runs` lists all",
    "run it: env -u HF_HUB_OFFLINE runstop fetch m": "run it: env -u HF_HUB_OFFLINE {b}/runstop' fetch m",
    "pip install 'runstop[data]'": "{b}/python' -m pip install 'runstop[data]'",
    "run `python -m jobs.tasks.convert rows`": "run `{b}/python' -m jobs.tasks.convert rows`",
}


@pytest.mark.parametrize("text", FORMS)
def test_a_command_has_the_path_of_its_environment(text: str, environment: Path) -> None:
    assert hints.in_this_shell(text) == FORMS[text].format(b=f"'{environment}")


PROSE = (
    "runstop has no rules for the benchmark x",
    "the folder has files that runstop did not write",
    "the shell says: runstopper why",
    "as runstop launch does",
    "python -m http.server",
    "apt-get and pip install nothing",
)


@pytest.mark.parametrize("text", PROSE)
def test_a_sentence_about_runstop_stays_as_it_is(text: str, environment: Path) -> None:
    assert hints.in_this_shell(text) == text and not hints.has_command(text)


def test_commands_stay_short_if_the_shell_finds_them(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin")
    assert [hints.in_this_shell(text) for text in FORMS] == list(FORMS)
    other = environment.parent / "other"
    other.mkdir()
    (other / "runstop").write_text("#!/bin/sh\n")
    (other / "runstop").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{environment}")
    assert hints.program() == f"'{environment}/runstop'", "another installation comes first"
    monkeypatch.setenv("PATH", str(other))
    (other / "runstop").unlink()
    (other / "runstop").symlink_to(environment / "runstop")
    assert hints.program() == "runstop", "a link to this installation"


def test_the_script_that_was_started_comes_before_that_of_the_environment(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, program in (("runstop", tmp_path / "runstop"), ("pytest", f"'{environment}/runstop'")):
        (tmp_path / name).write_text("#!/bin/sh\n")
        monkeypatch.setattr(hints, "_STARTED_AS", tmp_path / name)
        assert hints.program() == str(program)


def test_an_installation_without_a_script_has_its_python(environment: Path) -> None:
    (environment / "runstop").unlink()
    assert hints.in_this_shell("runstop why a") == f"'{environment}/python' -m bench why a"


def test_every_verb_is_known_as_a_command() -> None:
    (verbs,) = (action.choices for action in cli._parser()._actions if isinstance(action.choices, dict))
    assert verbs.keys() - {*hints.VERBS} == set(), "add the verb to VERBS in bench/hints.py"


def test_a_printed_error_has_a_command_that_works(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hints.print_error(ConfigError("it failed", where="a", fix="runstop why 'a b'"))
    assert capsys.readouterr().err == f"it failed\n  where: a\n  fix:   '{environment}/runstop' why 'a b'\n"
    secret = "hf_" + "aB3dEfGh" * 4
    hints.print_error(ConfigError(f"HF_TOKEN={secret} is refused", where="a", fix="b"))
    assert secret not in capsys.readouterr().err


def test_the_fix_of_a_run_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fix = "to continue with MIN minutes per trial: runstop resume RUN --walltime MIN"
    assert folder.named(fix, tmp_path / "a b").endswith("runstop resume 'a b' --walltime MIN")


def blocks(page: str) -> list[str]:
    """Return the indented blocks of a page, without their indentation, with long lines joined."""
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    matches = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE)
    return [textwrap.dedent(block).strip("\n") for block in matches]


OF_THIS_MACHINE = ("HW-03\t", "RUN-03\t", "CFG-11\t")
"""What a plan for GPUs lacks on the machine of the tests: GPUs, their memory, and a user who is not root."""


@pytest.mark.long
@pytest.mark.parametrize("page", ["start-gpu.md", "start-slurm.md", "start-kubernetes.md"])
def test_plans_and_scripts_of_the_first_pages(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a page plans and renders: with its own cluster file, and on this machine where it needs no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNSTOP_PYTHON", raising=False)
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "site" / "cluster").mkdir(parents=True)
    commands = []
    for block in blocks(page):
        if block.startswith("defaults:"):
            (tmp_path / "site" / "cluster" / "mine.yaml").write_text(block.replace("…", "a" * 64))  # the digest
        commands += re.findall(r"^runstop (plan|render|launch) (.*?)(?: +#.*| > .*)?$", block, re.MULTILINE)
    assert len(commands) >= 3
    for verb, words in commands:
        argv = [verb if verb == "render" else "plan", *(w for w in shlex.split(words) if w != "launch.wait=true")]
        with pytest.raises(SystemExit) as ended:
            cli.main(argv)
        shown = capsys.readouterr()
        errors = [line for line in shown.out.splitlines() if "\terror\t" in line]
        assert all(line.startswith(OF_THIS_MACHINE) for line in errors), errors
        assert (ended.value.code, shown.err) == (2 if errors else 0, ""), argv
        assert ("#SBATCH" in shown.out or "kind: Job" in shown.out) == (verb == "render")
