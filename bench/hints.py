"""Commands in messages, as they work in the user's shell.

Messages are written with short commands, such as `runstop why RUN` or `pip install 'runstop[data]'`. Files keep these:
another user may read them. A screen shows them with full paths, if the environment of this process is not activated.
"""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from bench import masking
from bench.errors import BenchError

PROGRAM = "runstop"
VERBS = (
    *("calibrate", "cancel", "compare", "dashboard", "demo", "doctor", "fetch", "gc", "goodput", "history", "image"),
    *("launch", "logs", "nodes", "note", "pack", "parse", "plan", "prepare", "published", "render", "report", "rerun"),
    *("resume", "rm", "rules", "runs", "score", "sign", "study", "tag", "tune", "verify", "watch", "why"),
)
"""Words after `runstop` that make it a command. A prose sentence may also begin with `runstop`."""
_BEFORE = r"(^\s*|[:;`(]\s*|\bfix: +|env -u \S+ |&& )"
"""What a command follows in a message. A prose sentence has a command only in backticks."""
_COMMAND = re.compile(
    rf"{_BEFORE}(?:(?P<own>{PROGRAM})(?= (?:{'|'.join(VERBS)})\b)"
    r"|(?P<pip>pip) install|(?P<module>python) -m (?:bench|jobs)\b)",
    re.MULTILINE,
)
_STARTED_AS = Path(os.path.abspath(sys.argv[0])) if sys.argv[:1] not in ([], [""]) else None
"""The file of the command that started this process; `runstop launch` changes sys.argv later."""


def in_this_shell(text: str) -> str:
    """Return a message whose commands work in the shell that started this process, quoted where needed."""
    return _COMMAND.sub(_replaced, text)


def print_error(error: BenchError) -> None:
    """Print an error on stderr, with its secrets masked."""
    print(in_this_shell(masking.masked(str(error))), file=sys.stderr)


def has_command(text: str) -> bool:
    """Return whether a message contains a command to paste."""
    return _COMMAND.search(text) is not None


def _replaced(match: re.Match[str]) -> str:
    text, start = match.group(0), match.start()
    if match["own"]:
        first, last, command = match.start("own"), match.end("own"), program()
    elif match["pip"]:
        first, last, command = match.start("pip"), match.end("pip"), _pip()
    else:
        first, last, command = match.start("module"), match.end("module"), _python()
    return text[: first - start] + command + text[last - start :]


def program() -> str:
    """Return the command of this installation: `runstop` if the shell finds it, else its full path, quoted.

    Without the script of an installation, it is this Python with `-m bench`.
    """
    own = _script()
    if own is None:
        return f"{_python()} -m bench"
    return PROGRAM if _is_found(PROGRAM, own) else shlex.quote(str(own))


def activation() -> str:
    """Return the command that makes `runstop` work in this shell; empty if it works already or there is none."""
    script = Path(sys.prefix) / "bin" / "activate"
    if program() == PROGRAM or not script.is_file() or _script() != script.with_name(PROGRAM):
        return ""
    relative = os.path.relpath(script)
    return f". {shlex.quote(str(script) if relative.startswith('..') else relative)}"


def _script() -> Path | None:
    """Return the script `runstop` of this installation; None if it is run without one."""
    of_user = sysconfig.get_path("scripts", f"{os.name}_user")
    scripts = [Path(folder) / PROGRAM for folder in (sysconfig.get_path("scripts"), of_user)]
    if _STARTED_AS is not None and _STARTED_AS.name == PROGRAM:
        scripts.insert(0, _STARTED_AS)
    return next((script for script in scripts if script.is_file()), None)


def _is_found(name: str, file: Path) -> bool:
    path = shutil.which(name)
    return path is not None and Path(path).samefile(file)


def _python() -> str:
    """Return this Python, as `python` if the shell finds it by this name."""
    path = shutil.which("python")
    return "python" if path is not None and os.path.abspath(path) == sys.executable else shlex.quote(sys.executable)


def _pip() -> str:
    """Return pip of this environment, as `pip` if the shell finds it by this name."""
    path = shutil.which("pip")
    is_own = path is not None and Path(path).parent == Path(sysconfig.get_path("scripts"))
    return "pip" if is_own else f"{shlex.quote(sys.executable)} -m pip"
