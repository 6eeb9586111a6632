"""The verbs of `runstop`, which is `python -m bench`: arguments in, printing out, no logic."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bench import masking
from bench.cli import arguments, compare, images, judge, run, study
from bench.errors import BenchError, exit_code_of_signals, output_is_written

LAUNCH = "launch"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and return its exit code.

    It is 0 for done, 1 if a log proves nothing, 2 for a bad request, and 128 + the number of a signal that ended it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [LAUNCH]:
        return _launch(words[1:])
    args = _parsed(words)
    _say_more(args.verbose)
    with exit_code_of_signals():
        try:
            with output_is_written():
                code = args.verb(args)
        except BenchError as error:
            print(masking.masked(str(error)), file=sys.stderr)
            code = error.exit_code
        sys.exit(code)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; KEY=VALUE may stand before and behind options, of which argparse knows one place only."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # set by the shell's completion function
        import argcomplete

        argcomplete.autocomplete(parser)
    args, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all("=" in word or word.startswith("~") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if any(word.startswith("-") for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word.startswith('-'))}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _say_more(level: int) -> None:
    """Make our own modules log to stderr: their steps with -v, and everything with -vv."""
    shown = {0: logging.WARNING, 1: logging.INFO}.get(level, logging.DEBUG)
    logger, handler = logging.getLogger("bench"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(shown)


def _launch(words: Sequence[str]) -> None:
    """Pass the arguments to the Hydra application, which reads sys.argv."""
    from bench.launch.__main__ import main as launch

    sys.argv = [f"runstop {LAUNCH}", *words]
    launch()


def _parser() -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog="runstop" if called == "runstop" else "python -m bench",
        description="runstop: plan, run and judge LLM training benchmarks.",
        epilog="To run a benchmark:\n  runstop launch task=lora_tiny cluster=local",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_launch(verbs)
    groups = (run, study, images, judge, compare)
    for add in (add for group in groups for add in group.VERBS):
        add(verbs)
    for each in verbs.choices.values():
        _complete_overrides(each)
    return parser


class _Version(argparse.Action):
    """Prints the version; it is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> NoReturn:
        print(version_line())
        parser.exit()


def version_line() -> str:
    """Return what `--version` prints."""
    import bench

    return f"runstop {bench.__version__}"


def _add_launch(verbs: arguments.Verbs) -> None:
    """Add the verb for the help and the completion; `main` hands its words to Hydra before they are parsed."""
    parser = verbs.add_parser(
        LAUNCH,
        help="compose, plan, check, run or submit: a Hydra application, as python -m bench.launch",
        add_help=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    for flags in (("--help",), ("--multirun", "-m")):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--config-dir", type=Path)


def _complete_overrides(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:  # argparse has no public list of them
        if action.dest == "overrides":
            action.completer = _overrides  # type: ignore[attr-defined]


def _overrides(prefix: str, parsed_args: argparse.Namespace, **ignored: object) -> list[str]:
    from bench.planning import compose

    words = [word for word in getattr(parsed_args, "overrides", None) or [] if isinstance(word, str)]
    return compose.completions(prefix, words, config_dir=getattr(parsed_args, "config_dir", None))
