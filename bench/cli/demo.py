"""The verb demo: train the tiny benchmark on this machine, then show what to type next."""

import argparse
import sys
from collections.abc import Sequence
from typing import cast

from bench import hints
from bench.cli import arguments

WORDS = ("task=lora_tiny", "cluster=local")


def _add_demo(verbs: arguments.Verbs) -> None:
    help = "train a tiny model on this machine (task=lora_tiny cluster=local), and show what to type next"
    arguments.add(verbs, _demo, help=help, example="")


def _demo(args: argparse.Namespace) -> int:
    from bench.runs import names
    from bench.runs.folder import short

    code = _launched(WORDS)
    if not code:
        command = f"runstop report {short(names.one(names.LATEST))} -o page"
        print(f"\nnext, write a page with the curves and tables of this run:\n  {_in_a_shell(command)}")
    return code


def _in_a_shell(command: str) -> str:
    """Return a command that works in this shell, and makes the command `runstop` work afterwards."""
    activation = hints.activation()
    return f"{activation} && {command}" if activation else hints.in_this_shell(command)


def _launched(words: Sequence[str]) -> int:
    """Run `runstop launch`, a Hydra application that reads sys.argv and exits; return its exit code."""
    from bench.launch.__main__ import main

    sys.argv = ["runstop launch", *words]
    try:
        main()
    except SystemExit as exit:
        return cast(int, exit.code)
    raise AssertionError("launch always exits")


VERBS = (_add_demo,)
