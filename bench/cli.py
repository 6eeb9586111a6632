"""The verbs of `python -m bench`: arguments in, printing out, no logic."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from bench.errors import BenchError

Run: TypeAlias = Callable[[argparse.Namespace], int]
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb; exit 0 done, 1 a log proves nothing, 2 bad request."""
    args = _parser().parse_args(argv)
    try:
        sys.exit(args.verb(args))
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
    for add in (_add_plan, _add_parse):
        add(verbs)
    return parser


def _verb(verbs: Verbs, run: Run, *, help: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a verb that is named after its function; its help ends with a line to paste."""
    name = run.__name__.removeprefix("_")
    parser = verbs.add_parser(name, help=help, description=help, epilog=f"example: python -m bench {name} {example}")
    parser.set_defaults(verb=run)
    return parser


def _add_plan(verbs: Verbs) -> None:
    parser = _verb(
        verbs, _plan, help="work out what a run would do", example="task=lora70b cluster=dgx2 parallel.tp=8 --json"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--config-dir", type=Path, help="a site's own conf/ files")
    parser.add_argument("--json", action="store_true", help="print plan.json instead of a table")


def _plan(args: argparse.Namespace) -> int:
    from bench import launch, plan, preflight, tables

    made = launch.compose(args.overrides, config_dir=args.config_dir)
    if args.json:
        print(plan.dumps(made), end="")
    else:
        tables.show_plan(made, preflight.inspect(made))
    return 0


def _add_parse(verbs: Verbs) -> None:
    parser = _verb(verbs, _parse, help="say what a trial's log proves", example="runs/*/result_0.txt")
    parser.add_argument("logs", nargs="+", type=Path, metavar="FILE", help="result_K.txt of a trial")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file")


def _parse(args: argparse.Namespace) -> int:
    from bench import local, tables

    exit_code = 0
    for log in args.logs:
        try:
            judged = local.judge(log)
        except BenchError as error:  # the other logs are judged all the same
            print(error, file=sys.stderr)
            exit_code = 1
            continue
        if args.json:
            print(json.dumps(judged.to_json()))
        else:
            tables.show(tables.verdict_sheet(judged.result, judged.verdicts, log, None))
        exit_code = exit_code if judged.proven else 1
    return exit_code
