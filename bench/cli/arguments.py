"""Build the argument parser of a verb and check argument values."""

import argparse
import gzip
import os
import select
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

from bench.contract import regular_files
from bench.errors import ConfigError, LogError
from bench.texts import control_character

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
        epilog=pasteable(f"runstop {name} {example}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log steps to stderr; -vv logs details")
    parser.set_defaults(verb=run)
    return parser


def takes_runs(parser: argparse.ArgumentParser, help: str, *, metavar: str = "RUN") -> None:
    """Accept zero or more run folders; `run_folders` resolves them."""
    parser.add_argument("runs", nargs="*", type=Path, metavar=metavar, help=help)


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


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Resolve paths: `latest` and an empty list mean the newest run. Say on stderr which folders are of other users.

    Raises:
        ConfigError: a path has characters that control a terminal; every message would print it.
    """
    from bench.runs import folder, run

    folders = [run.resolved(path) for path in paths or [Path(run.LATEST)]]
    for path in folders:
        if control_character(str(path)):
            fix = "rename the folder: control characters can make a terminal show a wrong name"
            raise ConfigError("the path contains control characters", where=str(path), fix=fix)
        if run.is_run(path) and (why := folder.other_writers(path)):
            print(f"{path}: {why}; this command only reads the folder", file=sys.stderr)
    return folders


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return number


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
                    what = f"the log has more than {regular_files.MAX_LOG_BYTES:,} bytes"
                    raise LogError(what, where=str(path), fix="keep only MLLOG lines: zgrep ':::MLLOG' FILE > SHORT")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"the log cannot be decompressed: {error}"
        raise LogError(
            what, where=str(path), fix="compress the log again with gzip, or give the uncompressed log"
        ) from error
    packed.unlink()
