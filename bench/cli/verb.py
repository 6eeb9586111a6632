"""One verb of the command line: its parser, named after its function, and what its arguments may hold."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

Run: TypeAlias = Callable[[argparse.Namespace], int]
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add(verbs: Verbs, run: Run, *, help: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a verb that is named after its function; its help ends with a line to paste."""
    name = run.__name__.removeprefix("_")
    parser = verbs.add_parser(name, help=help, description=help, epilog=f"example: python -m bench {name} {example}")
    parser.set_defaults(verb=run)
    return parser


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
