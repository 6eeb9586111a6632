"""A newcomer's first hour: the commands of README.md and docs/start-laptop.md, in a clean home, in order, as written.

What they print is a promise, too: each command in a message works in the shell that shows it.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

PASSED_ON = re.compile(r"PIP_\w+|\w+_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|LANG", re.IGNORECASE)
"""Variables that a download may need; a newcomer has none of the others."""
CLONE = re.compile(r"git clone \S+ && cd runstop")
NO_VERDICT = "runstop compare "
"""One run of each side shows no variation: the page says that the exit code is 1."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command, its exit code, and all that it printed."""

    command: str
    code: int
    printed: str


@dataclass(frozen=True, slots=True)
class Home:
    """A clean home, and the folder in which the newcomer works: its name has a space and a letter outside of ASCII."""

    folder: Path
    work: Path

    def environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        path = f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return kept | {"HOME": str(self.folder), "PATH": path}

    def run(self, commands: Sequence[str], cwd: Path) -> list[Ran]:
        """Run commands in one shell, which keeps its folder and its variables; return what each of them did."""
        mark = "@@@"
        script = "\n".join(f"{command}\necho '{mark}' $?" for command in commands)
        shell = subprocess.run(
            ["bash", "-c", f"exec 2>&1\n{script}"], cwd=cwd, env=self.environment(), capture_output=True, text=True
        )
        parts = re.split(rf"^{mark} (\d+)\n", shell.stdout, flags=re.MULTILINE)
        assert len(parts) == 2 * len(commands) + 1, shell.stdout
        return [Ran(*one) for one in zip(commands, map(int, parts[1::2]), parts[::2], strict=False)]


def commands(page: str, section: str) -> list[str]:
    """Return the commands of a section of a page: indented lines, without remarks."""
    text = (ROOT / page).read_text().partition(section)[2]
    text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    return [re.sub(r"\s{2,}# .*", "", line) for line in lines if not line.startswith(("…", "trial ", "evaluation "))]


def clone(command: str) -> str:
    """Return the command that clones this checkout instead of the repository on the web."""
    assert CLONE.fullmatch(command), command
    return f"git clone --quiet {shlex.quote(str(ROOT))} runstop && cd runstop"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    work = folder / "sp ace" / "ünï"
    work.mkdir(parents=True)
    return Home(folder, work)


@pytest.fixture(scope="module")
def first_hour(home: Home) -> list[Ran]:
    """All commands of the laptop's page, up to the page of the two runs."""
    before, (first, *others) = time.monotonic(), commands("docs/start-laptop.md", "# Start on a laptop")
    results = home.run([clone(first), *others], home.work)
    print(f"from clone to page: {(time.monotonic() - before) / 60:.1f} min")
    return results


def test_the_first_hour_is_as_the_page_says(home: Home, first_hour: list[Ran]) -> None:
    wrong = [one for one in first_hour if one.code != one.command.startswith(NO_VERDICT)]
    assert wrong == []
    first_run, folder = first_hour[1], home.work / "runstop"
    assert re.search(r"^valid trial: yes$", first_run.printed, re.MULTILINE)
    last = first_run.printed.splitlines()[-1]
    assert last.startswith("  . .venv/bin/activate && runstop report runs/")
    page = (folder / "page" / "trials.csv").read_text()
    assert "base," in page and "faster," in page and (folder / "page" / "report.html").exists()
    assert [one for one in home.run([last], folder) if one.code] == []
    compared = next(one for one in first_hour if one.command.startswith(NO_VERDICT))
    assert re.search(r"^recipe\.lr\t0\.0012\t0\.002$", compared.printed, re.MULTILINE)


def test_the_readme_begins_with_the_same_commands(first_hour: list[Ran]) -> None:
    shown = commands("README.md", "## Run it")
    assert shown[:3] == commands("docs/start-laptop.md", "# Start on a laptop")[:3]


SHOWN = (
    *("runs", "why latest", "rules", "history", "study --list", "plan task=lora_tiny", "resume latest", "logs latest"),
    *("cancel latest", "verify latest", "score latest", "watch latest", "why nosuch", "logs nosuch", "verify nosuch"),
    *("--help", "plan --help", "launch task=lora_tiny launch.folder=runs/base", "launch task=nosuch", "rules NOS-99"),
    *("launch recipe.nosuch=1", "compare runs/base runs/faster", "parse runs/base/result_0.txt", "report latest"),
)
"""What a newcomer may type after the first hour, right or wrong."""


def hinted(printed: str, program: str) -> set[str]:
    """Return the commands in an output: from the program's path to the end of its line, sentence or backticks."""
    commands = set()
    for line in printed.splitlines():
        for place in (match.start() for match in re.finditer(re.escape(program), line)):
            end = "`" if line[:place].endswith("`") else r"(?:; |, or | {2,}# |$)"
            commands.add(re.split(end, line[place:])[0])
    return commands


def test_every_command_in_a_message_works_in_this_shell(home: Home, first_hour: list[Ran]) -> None:
    folder = home.work / "runstop"
    program = shlex.quote(str(folder / ".venv" / "bin" / "runstop"))
    shown = home.run([f".venv/bin/runstop {words}" for words in SHOWN], folder)
    assert [one.command for one in shown if "Traceback" in one.printed] == []
    bare = [line for one in shown for line in one.printed.splitlines() if re.search(r"[:`] ?runstop [a-z]", line)]
    assert [line for line in bare if not line.startswith("usage: ")] == []
    hints = sorted(set.union(*(hinted(one.printed, program) for one in shown)))
    assert len(hints) >= 6
    assert [(one.command, one.printed) for one in home.run(hints, folder) if one.code != 0] == []


def test_a_wheel_goes_the_same_way(home: Home, first_hour: list[Ran]) -> None:
    """Also outside of a clone: the configs, the programs of the ranks and the templates are in the wheel."""
    build, *others = commands("docs/start-laptop.md", "## Without a clone")
    folder, empty = home.work / "runstop", home.work / "empty"
    empty.mkdir()
    assert [one for one in home.run([build], folder) if one.code] == []
    away = [*others[:-1], f"cd {shlex.quote(str(empty))}", others[-1], "command -v runstop", "runstop why latest"]
    paths = "DATADIR=/data MODEL=/model CONT=/image.sqsh LOGDIR=/runs"
    away += [f"{paths} runstop plan task=lora70b cluster=dgx2", "runstop report latest -o page", "ls page runs"]
    results = home.run(away, folder)
    assert [one for one in results if one.code] == []
    assert results[len(others) + 1].printed.strip() == str(home.folder / "runstop" / "bin" / "runstop")
    demo = results[len(others)].printed.splitlines()
    assert "valid trial: yes" in demo and demo[-1].startswith("  runstop report runs/")
