"""The verbs of `python -m bench`: arguments in, printing out, no logic."""

import argparse
import logging
import sys
from collections.abc import Sequence

from bench.cli import images, judging, running
from bench.errors import BenchError, interrupt_exit_code, output_is_written, stopped_by_sigterm


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb; exit 0 done, 1 a log proves nothing, 2 bad request; 128 + the signal that ended it."""
    args = _parsed(argv)
    _say_more(args.verbose)
    try:
        with stopped_by_sigterm(), output_is_written():
            code = args.verb(args)
        sys.exit(code)
    except KeyboardInterrupt as stop:
        sys.exit(interrupt_exit_code(stop))
    except BenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; KEY=VALUE may stand before and behind options, of which argparse knows one place only."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all("=" in word or word.startswith("~") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if any(word.startswith("-") for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word.startswith('-'))}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _say_more(level: int) -> None:
    """Let our own modules say on stderr what they do: with -v the steps, with -vv everything."""
    shown = {0: logging.WARNING, 1: logging.INFO}.get(level, logging.DEBUG)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("bench").setLevel(shown)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="runstop: plan, run and judge LLM training benchmarks.",
        epilog="To run a benchmark:\n  python -m bench.launch task=lora_tiny cluster=local",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for add in (*running.VERBS, *images.VERBS, *judging.VERBS):
        add(verbs)
    return parser
