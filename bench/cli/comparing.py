"""The verbs that compare runs: two systems with each other, and a task with its own past."""

import argparse

from bench.cli import verb
from bench.errors import ConfigError

_PAIRINGS = ("auto", "block", "order", "none")


def _add_compare(verbs: verb.Verbs) -> None:
    parser = verb.add(
        verbs,
        _compare,
        help="say what the runs of two systems prove about their difference, and what else differs",
        example="'runs/*bf16*' 'runs/*fp8*' --measurement step_time",
    )
    what = "a run folder, a log, a folder of runs, a quoted pattern of them, or STUDY/ARM"
    parser.add_argument("sides", nargs="+", metavar="RUNS", help=f"twice: {what}")
    parser.add_argument("--measurement", metavar="NAME", help="(default: throughput per GPU, else throughput)")
    parser.add_argument(
        "--margin",
        type=verb.positive,
        default=2.0,
        metavar="PERCENT",
        help="a difference within it does not matter (default: 2)",
    )
    parser.add_argument(
        "--pairing",
        choices=_PAIRINGS,
        default="auto",
        help="auto: by block in a study, in order of time where the runs took turns, else none",
    )
    verb.takes_json(parser)


def _compare(args: argparse.Namespace) -> int:
    from bench.console import comparison as comparison_sheets
    from bench.console import sheet
    from bench.history import sides
    from bench.results.comparison import Pairing, Verdict

    if len(args.sides) != 2:
        raise ConfigError(
            f"{len(args.sides)} sets of runs, and two are compared",
            where="compare",
            fix="quote patterns, so that the shell leaves them as they are: 'runs/*bf16*' 'runs/*fp8*'",
        )
    compared = sides.compared(
        *(sides.side(text) for text in args.sides),
        measurement=args.measurement,
        pairing=None if args.pairing == "auto" else Pairing[args.pairing],
        margin=args.margin / 100,
    )
    if args.json:
        print(comparison_sheets.to_json(compared))
    else:
        for table in comparison_sheets.sheets(compared):
            sheet.show(table)
    return 1 if compared.comparison.verdict in (Verdict.undecided, Verdict.not_compared) else 0


VERBS = (_add_compare,)
