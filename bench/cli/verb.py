"""Build the parser of one verb, which is named after its function, and check the values of its arguments."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

Run: TypeAlias = Callable[[argparse.Namespace], int]
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_EXAMPLE_WIDTH = 78


def add(verbs: Verbs, run: Run, *, help: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a verb that is named after its function; its help ends with a line to paste."""
    name = run.__name__.removeprefix("_")
    parser = verbs.add_parser(
        name,
        help=help,
        description=help,
        epilog=pasteable(f"python -m bench {name} {example}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="say more on stderr of what is done; -vv says all"
    )
    parser.set_defaults(verb=run)
    return parser


def takes_runs(parser: argparse.ArgumentParser, help: str, *, metavar: str = "RUN") -> None:
    """Let a verb take run folders, or none; `run_folders` returns which are meant."""
    parser.add_argument("runs", nargs="*", type=Path, metavar=metavar, help=help)


def takes_json(parser: argparse._ActionsContainer, objects: str = "one JSON object") -> None:
    """Let a verb print JSON instead of tables; `objects` is what it prints then."""
    parser.add_argument("--json", action="store_true", help=f"print {objects}")


def pasteable(command: str) -> str:
    """Return an example as the end of a help text, on lines that a narrow terminal does not break."""
    lines = ["  "]
    for word in command.split(" "):
        if len(lines[-1]) + len(word) > _EXAMPLE_WIDTH - 2:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{word} "
    return "\n".join(["example:", *(line.rstrip() for line in lines)])


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the folders and files that are meant: the newest run for `latest`, and where none is named."""
    from bench.runs import latest

    return [latest.resolved(path) for path in paths or [Path(latest.LATEST)]]


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count")
    return number
