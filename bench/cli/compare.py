"""The verbs `compare` (two sets of runs), `history` (results of a task over time) and `nodes` (verdicts on nodes)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import arguments
from bench.errors import ConfigError

if TYPE_CHECKING:
    from bench.history.regression import TaskHistory

_PAIRINGS = ("auto", "block", "order", "none")


def _add_compare(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _compare,
        help="compare two sets of runs: the difference with its confidence, and which settings differ",
        example="'runs/*bf16*' 'runs/*fp8*' --measurement step_time",
    )
    what = "a run, a log, a folder of runs, a quoted pattern, or STUDY/ARM"
    arguments.takes_runs(parser, f"two sets of runs; a set is {what}", dest="run_sets", metavar="RUNS")
    parser.add_argument("--measurement", metavar="NAME", help="(default: throughput per GPU, else throughput)")
    parser.add_argument(
        "--margin",
        type=arguments.percent,
        default=2.0,
        metavar="PERCENT",
        help="smaller differences count as equal (default: 2)",
    )
    parser.add_argument(
        "--pairing",
        choices=_PAIRINGS,
        default="auto",
        help="how runs are paired: auto (default) pairs by block in a study, by time if the runs alternated, else none",
    )
    arguments.takes_json(parser)


def _compare(args: argparse.Namespace) -> int:
    from bench.console import comparison as comparison_sheets
    from bench.console import sheet
    from bench.history import compare
    from bench.results.comparison import Pairing, Verdict
    from bench.studies.measured import as_in_study

    if len(args.run_sets) != 2:
        raise ConfigError(
            f"compare needs exactly two arguments, but the command has {len(args.run_sets)}",
            where="compare",
            fix="run `runstop compare RUNS RUNS`, with quotes around each pattern: 'runs/*bf16*' 'runs/*fp8*'",
        )
    matches = [compare.matching(text) for text in args.run_sets]
    arguments.checked([one for path, folders in matches for one in dict.fromkeys((path, *folders))])
    compared = compare.compared(
        *(as_in_study(compare.read(path, folders)) for path, folders in matches),
        measurement=args.measurement,
        pairing=None if args.pairing == "auto" else Pairing[args.pairing],
        margin=args.margin / 100,
    )
    if args.json:
        from bench import answers

        answers.show(answers.comparison(compared))
    else:
        for table in comparison_sheets.sheets(compared):
            sheet.show(table)
    return 1 if compared.comparison.verdict in (Verdict.undecided, Verdict.not_compared) else 0


def _add_history(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _history,
        help="list past results of a task, and check the newest runs for a regression",
        example="lora_8b --check 2",
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="(default: list all tasks)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder that holds the run folders (default: LOGDIR, else runs)"
    )
    parser.add_argument(
        "--measurement",
        metavar="NAME",
        help="(default: throughput per GPU, else throughput; for kernels the best rate of each; for serving the "
        "throughput and median latency of each load)",
    )
    parser.add_argument("--rebuild", action="store_true", help="ignore the cache and read every log again")
    parser.add_argument(
        "--check",
        type=arguments.percent,
        metavar="PERCENT",
        help="exit with 1 if the newest runs are worse than earlier runs by more than PERCENT (the whole 95 %% "
        "interval of the change), or if no run could be checked",
    )
    parser.add_argument(
        "--newest", type=arguments.count, default=1, metavar="N", help="number of newest runs to check (default: 1)"
    )
    parser.add_argument(
        "--earlier",
        type=arguments.count,
        default=10,
        metavar="N",
        help="number of earlier runs to compare with (default: 10)",
    )
    arguments.takes_json(parser, "one JSON object per run, or per check with --check")
    arguments.takes_junit(parser)


def _history(args: argparse.Namespace) -> int:
    from bench.console import history as history_sheets
    from bench.console import sheet
    from bench.history import regression as history
    from bench.history import store
    from bench.runs import names

    if args.junit and not args.check:
        fix = "add --check PERCENT, such as --check 2"
        raise ConfigError("--junit needs --check, which is missing", where="--junit", fix=fix)
    root = args.folder or names.root()
    histories = history.of_task(history.histories(store.trials(root, rebuild=args.rebuild)), args.task, where=root)
    history.check_measured(histories, args.measurement)
    if args.check:
        return _check(histories, args)
    if args.json:
        from bench import answers

        answers.show(*(answers.history_run(one, run) for one in histories for run in one.runs))
    elif args.task:
        for task_history in histories:
            for measurement in history_sheets.shown_measurements(task_history, args.measurement):
                sheet.show(history_sheets.runs_sheet(task_history, measurement))
    else:
        sheet.show(history_sheets.list_sheet(root, histories, args.measurement))
    return 0


def _check(histories: "Sequence[TaskHistory]", args: argparse.Namespace) -> int:
    """Print whether the newest runs are worse than earlier ones; return 1 if any is, or if none could be checked."""
    from bench.console import history as history_sheets
    from bench.console import sheet
    from bench.history.regression import Change, judge_all

    how = {"tolerance": args.check / 100, "newest": args.newest, "earlier": args.earlier}
    judgements = judge_all(histories, args.measurement, **how)
    if args.json:
        from bench import answers

        answers.show(*map(answers.regression, judgements))
    else:
        sheet.show(history_sheets.judgement_sheet(judgements, tolerance=args.check / 100))
    if args.junit:
        from bench.console import junit

        junit.write(args.junit, "history", junit.of_judgements(judgements))
    changes = {judgement.change for judgement in judgements}
    return 1 if Change.regression in changes or changes == {Change.not_judged} else 0


def _add_nodes(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _nodes,
        help="list what all runs found out about each node: checks, slow findings and failures",
        example="--bad",
    )
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="(default: all nodes)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder that holds the run folders (default: LOGDIR, else runs)"
    )
    parser.add_argument("--bad", action="store_true", help="list only nodes that cluster.avoid=auto leaves out")
    parser.add_argument(
        "--within",
        default="7d",
        metavar="TIME",
        help="how long a finding counts, as cluster.avoid_within: 90m, 12h or 7d (default: 7d)",
    )
    parser.add_argument("--rebuild", action="store_true", help="ignore the cache and read every run again")
    arguments.takes_json(parser, "one JSON object per node")


def _nodes(args: argparse.Namespace) -> int:
    import time

    from bench.console import nodes as node_sheets
    from bench.console import sheet
    from bench.history import nodes, store
    from bench.planning import avoided_nodes
    from bench.runs import names

    since_ms = (time.time() - avoided_nodes.seconds(args.within, where="--within")) * 1000
    root = args.folder or names.root()
    every = nodes.histories(store.node_verdicts(root, rebuild=args.rebuild))
    if unknown := [name for name in args.nodes if name not in {one.node for one in every}]:
        known = ", ".join(dict.fromkeys(one.node for one in every))
        fix = (
            f"choose from the known nodes: {known}"
            if known
            else "remove the name of the node: only runs with Slurm, Kubernetes, Ray or ssh have nodes"
        )
        raise ConfigError(f"no run has used the node {', '.join(unknown)}", where=str(root), fix=fix)
    shown = [
        one
        for one in every
        if (not args.nodes or one.node in args.nodes) and (not args.bad or one.is_bad(since_ms=since_ms))
    ]
    if args.json:
        from bench import answers

        answers.show(*(answers.node(one, since_ms=since_ms) for one in shown))
    else:
        table = node_sheets.nodes_sheet(root, shown, since_ms=since_ms, within=args.within, are_any=bool(every))
        sheet.show(table)
    return 0


VERBS = (_add_compare, _add_history, _add_nodes)
