"""Build the argument parser of a verb and check argument values."""

import argparse
import gzip
import json
import os
import re
import select
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from bench.contract import regular_files
from bench.errors import ConfigError, LogError
from bench.hints import in_this_shell
from bench.planning import synonyms
from bench.texts import nearest

Run: TypeAlias = Callable[[argparse.Namespace], int]
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_EXAMPLE_WIDTH = 78


def add(verbs: Verbs, run: Run, *, help: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a verb. The verb has the name of its function; its help ends with an example."""
    name = run.__name__.removeprefix("_")
    parser = verbs.add_parser(
        name,
        help=help,
        description=help,
        epilog=pasteable(f"runstop {name} {example}".rstrip()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log steps to stderr; -vv logs details")
    parser.set_defaults(verb=run)
    return parser


def takes_runs(
    parser: argparse._ActionsContainer, help: str, *, dest: str = "runs", nargs: str | None = "*", metavar: str = "RUN"
) -> None:
    """Accept runs, which `run_folders` resolves; the Tab key offers their names."""
    default: dict[str, Any] = {"default": []} if nargs == "*" else {}  # groups of exclusive arguments need a default
    action = parser.add_argument(dest, nargs=nargs, metavar=metavar, help=help, **default)
    action.completer = _names_and_files  # type: ignore[attr-defined]


def _names_and_files(prefix: str, **ignored: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    from bench.runs import names

    return [*names.completions(prefix), *FilesCompleter()(prefix)]


def takes_json(parser: argparse._ActionsContainer, objects: str = "one JSON object") -> None:
    """Add --json; `objects` describes in the help what it prints."""
    parser.add_argument("--json", action="store_true", help=f"print {objects}")


def takes_junit(parser: argparse.ArgumentParser) -> None:
    """Add --junit."""
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the results as JUnit XML for CI")


def pasteable(command: str) -> str:
    """Return an example for the end of a help text, in lines short enough for a narrow terminal."""
    lines = ["  "]
    for argument in command.split(" "):
        if len(lines[-1]) + len(argument) > _EXAMPLE_WIDTH - 2:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{argument} "
    return "\n".join(["example:", *(line.rstrip() for line in lines)])


def run_folders(texts: Sequence[str | Path], *, files: bool = False, whole: bool = False) -> list[Path]:
    """Return the runs that texts mean, by `names.several`; no text means the newest run.

    Say on stderr which folders are of other users. With `files`, paths of files are accepted, too.

    Raises:
        ConfigError: there is no such run, or a path has characters that control a terminal, which every message would
            print.
    """
    from bench.runs import names

    return checked([path for text in texts or [names.LATEST] for path in names.several(text, files=files, whole=whole)])


def checked(paths: Sequence[Path]) -> list[Path]:
    """Return the paths of runs. Say on stderr which folders are of other users.

    Raises:
        ConfigError: a path has characters that control a terminal, which every message would print.
    """
    from bench.runs import folder, names

    for path in paths:
        if error := names.unprintable(path):
            raise error
        if names.is_run(path) and (why := folder.other_writers(path)):
            print(f"{path}: {why}; this command only reads the folder", file=sys.stderr)
    return list(paths)


def run_folder(text: str | Path | None) -> Path:
    """Return the run that a text means, by default the newest; raises as `run_folders`, and for several runs."""
    from bench.runs import names

    return run_folders([names.one(text)] if text else [])[0]


_BINARY = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"%PDF": "a PDF file",
    b"PK\x03\x04": "a ZIP archive",
    b"\x7fELF": "a program",
    b"SQLite format 3": "a SQLite database",
    b"\x93NUMPY": "an array of NumPy",
}
"""The first bytes of files that are taken for logs by mistake."""
_MAX_JSON_BYTES = 1 << 26


def logs_or_runs(texts: Sequence[str | Path]) -> list[Path]:
    """Return the logs and runs that texts mean, by default the newest run.

    Raises:
        ConfigError: as `run_folders` and `require_log`.
    """
    paths = run_folders(texts, files=True)
    for path in paths:
        require_log(path)
    return paths


def require_log(path: Path, *, is_parsed: bool = False) -> None:
    """Raise ConfigError for a file that can be no log: a binary file, or one whole JSON document.

    `parse` also reads gzip files, and result files of other load generators, which are JSON.
    """
    try:
        with regular_files.opened(path, follows_links=True) as file:
            head = file.read(4096)
    except OSError:  # a folder, a pipe, or a file whose reader reports the error
        return
    if head.startswith(_GZIP_MAGIC):
        if not is_parsed:
            fix = f"unpack the file first: gunzip --keep {shlex.quote(str(path))}"
            raise ConfigError(
                "the log is compressed, but only `runstop parse` reads compressed logs", where=str(path), fix=fix
            )
        return
    file_type = next((file_type for magic, file_type in _BINARY.items() if head.startswith(magic)), "")
    text = head.replace(b"\0", b"").decode(errors="replace")  # a node that crashed leaves blocks of zeros
    if (
        not file_type
        and sum(letter == "\ufffd" or letter < " " and letter not in "\t\n\r\b\x1b" for letter in text) > len(text) / 4
    ):
        file_type = "a binary file"
    if not file_type and not is_parsed and head.lstrip()[:1] in (b"{", b"[") and _is_json(path):
        file_type = "a JSON document"
    if file_type:
        from bench.runs import names

        fix = "give a run, or a text file with a program's output"
        if names.is_run(path.parent):
            fix = f"give the run itself: {shlex.quote(str(path.parent))}"
        raise ConfigError(f"this file is {file_type}, not a log", where=str(path), fix=fix)


def _is_json(path: Path) -> bool:
    try:
        json.loads(regular_files.read_bytes(path, max_bytes=_MAX_JSON_BYTES, follows_links=True))
    except (OSError, ValueError, RecursionError):
        return False
    return True


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the option, verb or choice that a user probably means.

    The example at the end of its help is written for this shell only when the help is printed: finding the program
    costs time, and every start makes the parsers of all verbs.
    """

    words: Sequence[str] = ()
    """The command line, for hints."""

    def format_help(self) -> str:
        pasted, self.epilog = self.epilog, in_this_shell(self.epilog or "")
        try:
            return super().format_help()
        finally:
            self.epilog = pasted  # one process may parse several command lines

    def error(self, message: str) -> NoReturn:
        hint = self._hint(message)
        super().error(f"{message}\n  {hint}" if hint else message)

    def _hint(self, message: str) -> str:
        if wrong := re.match(r".*invalid choice: '(.*)' \(choose from (.*)\)$", message, re.DOTALL):
            known, name = re.findall(r"[\w.-]+", wrong[2]), wrong[1].lower()
            other = synonyms.ACTIONS.get(name)
            near = other if other in known else nearest(name, known)
            return f"did you mean {near}?" if near else ""
        if missing := re.match(r"argument (?:\S+/)?(--\S+?)(?:/\S+)?: expected one argument", message):
            after = next(
                (x for argument, x in pairwise(Parser.words) if argument == missing[1] and x.startswith("-")), None
            )
            return f"write {missing[1]}={after}" if after else f"write {missing[1]} VALUE"
        if "\n" not in message and (unknown := re.match(r"unrecognized arguments: (-\S+)", message)):
            near = nearest(unknown[1], self._option_string_actions, likeness=0.6)
            return f"did you mean {near}?" if near else ""
        return ""


def positive(text: str) -> float:
    """Return a number greater than 0."""
    return _positive(text, text, "a number greater than 0, such as 2")


def percent(text: str) -> float:
    """Return a number of percent greater than 0; a % behind it may be written."""
    return _positive(text, text.removesuffix("%"), "a number of percent greater than 0, such as 2")


def _positive(text: str, number: str, what: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def count(text: str) -> int:
    """Return a whole number of 1 or more."""
    return _whole(text, "an integer of 1 or more")


def minutes(text: str) -> int:
    """Return a whole number of minutes."""
    return _whole(text, "a number of minutes, such as 60")


def _whole(text: str, what: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


STDIN = Path("-")
WRITER_S = 5.0
"""Seconds that a pipe is waited for."""
_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def plain(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield each log as a file that can be read several times; pipes and .gz files are copied to a temporary folder.

    Raises:
        LogError: a .gz log is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="runstop-") as scratch:
        yield [_plain(path, Path(scratch, str(number))) for number, path in enumerate(paths)]


def _plain(path: Path, folder: Path) -> Path:
    """Return the path itself, or that of a copy in a new folder; the reader reports a missing file."""
    copy = folder / ("stdin" if path == STDIN else path.name.removesuffix(".gz"))
    folder.mkdir()
    if path == STDIN:
        _unpack(sys.stdin.buffer, copy, path)
    elif path.is_fifo():
        with _pipe(path) as source:
            _unpack(source, copy, path)
    elif _is_gzip(path):
        with regular_files.opened(path, follows_links=True) as source:
            _unpack(source, copy, path)
    else:
        return path
    return copy


def _pipe(path: Path) -> BinaryIO:
    """Open a pipe; LogError if no program writes into it within WRITER_S."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    if not waiting.poll(int(WRITER_S * 1000)):
        os.close(pipe)
        what, fix = "no program writes into this pipe", "give a file, or start the program that writes into the pipe"
        raise LogError(what, where=str(path), fix=fix)
    os.set_blocking(pipe, True)
    return os.fdopen(pipe, "rb")


def _is_gzip(path: Path) -> bool:
    try:
        with regular_files.opened(path, follows_links=True) as file:
            return file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    except OSError:  # the reader reports the cause
        return False


def _unpack(source: BinaryIO, copy: Path, path: Path) -> None:
    """Copy a stream to a file; decompress it if it is gzip data."""
    with copy.open("wb") as target:
        head = source.read(len(_GZIP_MAGIC))
        target.write(head)
        shutil.copyfileobj(source, target)
    if head != _GZIP_MAGIC:
        return
    packed = copy.with_name(f"{copy.name}.gz")
    copy.rename(packed)
    try:
        with gzip.open(packed) as stream, copy.open("wb") as target:
            while chunk := stream.read(1 << 20):
                target.write(chunk)
                if target.tell() > regular_files.MAX_LOG_BYTES:
                    what = f"the uncompressed log has more than {regular_files.MAX_LOG_BYTES:,} bytes"
                    raise LogError(
                        what,
                        where=str(path),
                        fix="give a file with only the MLLOG lines: zgrep ':::MLLOG' FILE > SHORT",
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"the log cannot be decompressed: {error}"
        raise LogError(
            what, where=str(path), fix="compress the log again with gzip, or give the uncompressed log"
        ) from error
    packed.unlink()
