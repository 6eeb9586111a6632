"""The verbs of `python -m bench`: arguments in, printing out, no logic."""

import argparse
import sys
from collections.abc import Sequence

from bench.cli import images, judging, running
from bench.errors import BenchError, interrupt_exit_code, stopped_by_sigterm


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb; exit 0 done, 1 a log proves nothing, 2 bad request; 128 + the signal that ended it."""
    args = _parser().parse_args(argv)
    try:
        with stopped_by_sigterm():
            sys.exit(args.verb(args))
    except KeyboardInterrupt as stop:
        sys.exit(interrupt_exit_code(stop))
    except BenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="runstop: plan, run and judge LLM training benchmarks.",
        epilog="To run a benchmark: python -m bench.launch task=lora_tiny cluster=local",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for add in (*running.VERBS, *images.VERBS, *judging.VERBS):
        add(verbs)
    return parser
