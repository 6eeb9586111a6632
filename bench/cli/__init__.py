"""The command line of `runstop`: parse arguments, call one verb, print its result."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from bench import hints
from bench.cli import (
    arguments,
    calibrate,
    compare,
    dashboard,
    demo,
    fetch,
    images,
    judge,
    manage,
    prepare,
    published,
    run,
    study,
    tune,
)
from bench.contract import regular_files
from bench.errors import (
    BenchError,
    every_character_is_written,
    exit_code_of_signals,
    output_is_written,
    shown,
)
from bench.texts import nearest

LAUNCH = "launch"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and return its exit code.

    0: success. 1: a log is not valid, or a check failed. 2: bad input. 128 + N: signal N ended it.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    every_character_is_written()
    regular_files.keep_others_from_writing()
    if argv[:1] == [LAUNCH]:
        return _launch(argv[1:])
    args = _parse(argv)
    _set_log_level(args.verbose)
    with exit_code_of_signals():
        try:
            with output_is_written():
                _read_files_of_overrides(args)
                _check_overrides(args)
                code = args.verb(args)
        except BenchError as error:
            hints.print_error(error)
            code = error.exit_code
        sys.exit(code)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments. KEY=VALUE may come before and after options; argparse alone accepts only one place."""
    parser, arguments.Parser.words = _parser(), argv
    if "_ARGCOMPLETE" in os.environ:  # set by the shell's completion function
        import argcomplete

        argcomplete.autocomplete(parser)
    _check_verb(parser, argv)
    args, rest = parser.parse_known_args(argv)
    own = _verbs(parser)[argv[0]]  # its errors name its own options
    if rest and not hasattr(args, "overrides"):
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    if unknown := [text for text in rest if text.startswith("-")]:
        own.error(f"unrecognized arguments: {' '.join(unknown)}{_override_of(unknown[0], argv)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb, by its name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(actions).choices)


def _check_verb(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Exit with 2 if the first word is neither a verb nor an option, and print what it probably means."""
    first, verbs = argv[0] if argv else "", _verbs(parser)
    if not first or first in verbs or first in parser._option_string_actions:
        return
    from bench.planning import overrides, synonyms

    if first.startswith("-"):
        near = nearest(first, parser._option_string_actions, likeness=0.6)
        parser.error(f"there is no option {first}{f': did you mean {near}?' if near else ''}")
    meant = synonyms.VERBS.get(first.lower())
    near = meant if meant in (*verbs, "--help", "--version") else nearest(first.lower(), verbs, likeness=0.6)
    if near is not None:
        offer = f"did you mean {near}?" if near in verbs else f"write runstop {near}"
    elif (guess := first if "=" in first else overrides.guessed(first)) is not None:
        offer = f"did you mean runstop launch {guess}?"
    else:
        offer = "runstop --help lists the verbs"
    parser.error(f"there is no verb {first!r}: {offer}")


def _override_of(option: str, argv: Sequence[str]) -> str:
    """Return a hint at the override that an unknown option means; an empty text if it means none."""
    from bench.planning import overrides

    name, _, value = option.partition("=")
    after = [*argv[argv.index(option) + 1 :], ""][0]
    if not value and "=" not in after and not after.startswith("-"):
        value = after
    if name == "--dry-run":
        return "\n  this verb starts nothing, so it needs no --dry-run"
    meant = overrides.of_option(name, value)
    return f"\n  write {meant}" if meant else ""


def _read_files_of_overrides(args: argparse.Namespace) -> None:
    """Replace every argument @FILE by the overrides in this file."""
    if getattr(args, "overrides", None):
        from bench.planning import overrides

        args.overrides = overrides.of_files(args.overrides)


def _check_overrides(args: argparse.Namespace) -> None:
    """Raise ConfigError for a wrong override of a verb."""
    given = getattr(args, "overrides", None)
    takes_folders = hasattr(args, "all_clusters")  # the verb study: its name and its overrides may be folders
    if given is None or (takes_folders and study.is_folder(args.name or "")):
        return
    from bench.planning import compose, overrides

    config_dir = getattr(args, "config_dir", None)
    compose.search_path(config_dir)  # refuses a folder that does not exist
    words = [text for text in given if not (takes_folders and "=" not in text and study.is_folder(text))]
    overrides.check(words, config_dir=config_dir, knows_choices=hasattr(args, "config_dir"))


def _set_log_level(verbosity: int) -> None:
    """Log to stderr: warnings by default, INFO with -v, DEBUG with -vv. Only modules of `bench` are affected."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logger, handler = logging.getLogger("bench"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(level)


class _Formatter(logging.Formatter):
    """Removes the characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def _launch(argv: Sequence[str]) -> None:
    """Pass the arguments to the Hydra application, which reads sys.argv."""
    from bench.launch.__main__ import main as launch

    sys.argv = [f"runstop {LAUNCH}", *argv]
    launch()


@cache
def _parser() -> argparse.ArgumentParser:
    """Return the parser of every verb: 700 calls of argparse, so that one process makes it once."""
    parser: argparse.ArgumentParser = arguments.Parser(
        prog="runstop",
        description="runstop: plan, run and evaluate LLM benchmarks.",
        epilog="To run a benchmark:\n  runstop launch task=lora_tiny cluster=local",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_launch(verbs)
    groups = (demo, prepare, run, manage, study, tune, calibrate, fetch, images, judge, published, compare, dashboard)
    for add in (add for group in groups for add in group.VERBS):
        add(verbs)
    for each in verbs.choices.values():
        _complete_overrides(each)
    return parser


class _Version(argparse.Action):
    """Prints the version; looking it up runs git, so that it is done only for --version."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> NoReturn:
        print(version_line())
        parser.exit()


def version_line() -> str:
    """Return the line that `--version` prints."""
    import bench

    return f"runstop {bench.__version__}"


def _add_launch(verbs: arguments.Verbs) -> None:
    """Add `launch` for --help and shell completion only: `main` passes its arguments to Hydra unparsed."""
    parser = verbs.add_parser(
        LAUNCH,
        help="plan and check a benchmark, then run it or submit its job (a Hydra application)",
        add_help=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    for flags in (("--help",), ("--multirun", "-m")):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--config-dir", type=Path)


def _complete_overrides(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:  # argparse has no public list of actions
        if action.dest == "overrides":
            action.completer = _overrides  # type: ignore[attr-defined]


def _overrides(prefix: str, parsed_args: argparse.Namespace, **ignored: object) -> list[str]:
    from bench.planning import compose

    overrides = [text for text in getattr(parsed_args, "overrides", None) or [] if isinstance(text, str)]
    return compose.completions(prefix, overrides, config_dir=getattr(parsed_args, "config_dir", None))
