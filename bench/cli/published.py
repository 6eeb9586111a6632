"""The verb published: the table of a round's published systems, from its results repository."""

import argparse
import sys
from pathlib import Path

from bench.cli import arguments

_BENCHMARKS = ("llama2_70b_lora", "llama31_8b")
"""The benchmarks whose published systems runstop compares runs with."""
_OWN = Path()
"""The value of --write without a file. Only this object: the path `.` is equal to it."""


def _add_published(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _published,
        help="read the results repository of an MLPerf Training round into a table of its systems",
        example="training_results_v5.1 --benchmark llama31_8b --write",
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a cloned results repository, such as training_results_v5.1, or a part"
    )
    parser.add_argument(
        "--benchmark",
        choices=_BENCHMARKS,
        action="append",
        help="read only this benchmark; may be repeated (default: both)",
    )
    parser.add_argument("--round", metavar="vX.Y", help="the round (default: from the name of the folder)")
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=_OWN,
        metavar="FILE",
        help="also write the table as CSV; without FILE to ~/.config/runstop/mlperf, whose tables report, score, watch"
        " and plan use",
    )
    parser.add_argument("--source", metavar="TEXT", help="where the repository is from, for the first line of the CSV")
    arguments.takes_json(parser, "one JSON object per system")


def _published(args: argparse.Namespace) -> int:
    from bench.console import published as sheets
    from bench.console import sheet
    from bench.mlperf import results_repository, system_tables
    from bench.user_folder import user_folder

    repository = results_repository.opened(args.folder, round_=args.round, benchmarks=args.benchmark or _BENCHMARKS)
    own = user_folder() / system_tables.OWN / f"{repository.round}.csv"
    file = own if args.write is _OWN else args.write
    if file is not None:
        system_tables.require_writable(file)
    print(f"reading the logs of {len(repository.folders)} folders; -v names each", file=sys.stderr)
    entries = list(repository.entries())
    if args.json:
        from bench import answers

        answers.show(*map(answers.published_system, entries))
    else:
        for table in sheets.published_sheets(entries):
            sheet.show(table)
    if file is not None:
        listed = results_repository.write(file, entries, source=args.source or repository.folder.resolve().name)
        used = "report, score, watch and plan use it" if file == own else f"to use it, copy it to {own.parent}"
        print(f"{listed} systems are written to {file}; {used}", file=sys.stderr)
    return 0 if all(entry.minutes is not None for entry in entries) else 1


VERBS = (_add_published,)
