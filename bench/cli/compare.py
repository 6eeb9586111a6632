"""The verbs that compare runs: two systems with each other, and a task with its own past."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import arguments
from bench.errors import ConfigError

if TYPE_CHECKING:
    from bench.history.regression import Past

_PAIRINGS = ("auto", "block", "order", "none")


def _add_compare(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
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
        type=arguments.positive,
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
    arguments.takes_json(parser)


def _compare(args: argparse.Namespace) -> int:
    from bench.console import comparison as comparison_sheets
    from bench.console import sheet
    from bench.history import compare
    from bench.results.comparison import Pairing, Verdict
    from bench.studies.measured import side

    if len(args.sides) != 2:
        raise ConfigError(
            f"{len(args.sides)} sets of runs, and two are compared",
            where="compare",
            fix="quote patterns, so that the shell leaves them as they are: 'runs/*bf16*' 'runs/*fp8*'",
        )
    compared = compare.compared(
        *(side(text) for text in args.sides),
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


def _add_history(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _history,
        help="list what a task measured in the past, and check whether its newest runs are worse",
        example="lora_8b --check 2",
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="(default: a list of all tasks)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="of run folders (default: LOGDIR, else runs)")
    parser.add_argument(
        "--measurement",
        metavar="NAME",
        help="(default: throughput per GPU, else throughput; the best rate of each kernel, or throughput and median "
        "latency of each load)",
    )
    parser.add_argument("--rebuild", action="store_true", help="read every log again")
    parser.add_argument(
        "--check",
        type=arguments.positive,
        metavar="PERCENT",
        help="exit with 1 if the newest runs are proven to be worse than the ones before, and by more than this, or "
        "if nothing could be judged",
    )
    parser.add_argument(
        "--newest", type=arguments.count, default=1, metavar="N", help="runs that are checked (default: 1)"
    )
    parser.add_argument(
        "--earlier", type=arguments.count, default=10, metavar="N", help="runs before them that count (default: 10)"
    )
    arguments.takes_json(parser, "one JSON object per run, or per check")


def _history(args: argparse.Namespace) -> int:
    from bench.console import history as history_sheets
    from bench.console import sheet
    from bench.history import regression as history
    from bench.history import store
    from bench.runs import run as runs

    root = args.folder or runs.root()
    pasts = history.of_task(history.pasts(store.trials(root, rebuild=args.rebuild)), args.task, where=root)
    history.check_measured(pasts, args.measurement)
    if args.check:
        return _check(pasts, args)
    if args.json:
        for past in pasts:
            for run in past.runs:
                print(history_sheets.run_json(past, run))
    elif args.task:
        for past in pasts:
            for of in history_sheets.shown_of(past, args.measurement):
                sheet.show(history_sheets.past_sheet(past, of))
    else:
        sheet.show(history_sheets.list_sheet(root, pasts, args.measurement))
    return 0


def _check(pasts: "Sequence[Past]", args: argparse.Namespace) -> int:
    """Print whether the newest runs are worse than the ones before; return 1 if one of them is, or none was judged."""
    from bench.console import history as history_sheets
    from bench.console import sheet
    from bench.history.regression import Change, judge_all

    how = {"tolerance": args.check / 100, "newest": args.newest, "earlier": args.earlier}
    judgements = judge_all(pasts, args.measurement, **how)
    if args.json:
        for judgement in judgements:
            print(history_sheets.judgement_json(judgement))
    else:
        sheet.show(history_sheets.judgement_sheet(judgements, tolerance=args.check / 100))
    changes = {judgement.change for judgement in judgements}
    return 1 if Change.regression in changes or changes == {Change.not_judged} else 0


VERBS = (_add_compare, _add_history)
