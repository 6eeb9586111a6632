"""The verbs of `python -m bench`: arguments in, printing out, no logic."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BenchError


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
    plan = verbs.add_parser(
        "plan",
        help="work out what a run would do",
        epilog="example: python -m bench plan task=lora70b cluster=dgx2 parallel.tp=8 --json",
    )
    plan.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for bench.launch")
    plan.add_argument("--config-dir", type=Path, help="a site's own conf/ files")
    plan.add_argument("--json", action="store_true", help="print plan.json instead of a table")
    plan.set_defaults(verb=_plan)
    parse = verbs.add_parser(
        "parse",
        help="say what a trial's log proves",
        epilog="example: python -m bench parse runs/*/result_0.txt",
    )
    parse.add_argument("logs", nargs="+", type=Path, metavar="FILE", help="result_K.txt of a trial")
    parse.add_argument("--json", action="store_true", help="print one JSON object per file")
    parse.set_defaults(verb=_parse)
    return parser


def _plan(args: argparse.Namespace) -> int:
    from bench import launch, plan, preflight, tables

    made = launch.compose(args.overrides, config_dir=args.config_dir)
    if args.json:
        print(plan.dumps(made), end="")
    else:
        tables.show_plan(made, preflight.inspect(made))
    return 0


def _parse(args: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import local, tables

    console, exit_code = Console(), 0
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
            console.print(tables.verdict_table(judged.result, judged.verdicts, log, None))
        exit_code = exit_code if judged.proven else 1
    return exit_code
