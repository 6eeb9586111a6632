"""The verbs that read what runs leave behind."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import masked_json, masking
from bench.cli import arguments
from bench.errors import LogError

if TYPE_CHECKING:
    from bench.cli.other_tools import Loads


def _add_watch(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _watch,
        help="show trials while they run, and what lies ahead of them",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[],
        metavar="PATH",
        help="a run folder (default: latest, the newest one), or logs that may not exist yet",
    )
    source.add_argument("--replay", type=Path, metavar="FILE", help="watch a finished log as if it were written now")
    parser.add_argument(
        "--speed", type=arguments.positive, default=60.0, metavar="N", help="of the replay (default: 60 times)"
    )
    parser.add_argument("--once", action="store_true", help="show it once and exit")
    parser.add_argument(
        "--interval", type=arguments.positive, metavar="S", help="default: 1 on a terminal, 60 in a pipe"
    )
    parser.add_argument("--until-target", action="store_true", help="exit 0 once the target is reached, 1 if it is not")
    parser.add_argument("--walltime", type=arguments.positive, metavar="MIN", help="what ends each trial of a bare log")
    parser.add_argument(
        "--trials", type=arguments.count, default=1, metavar="N", help="how many trials a log will hold (default: 1)"
    )
    arguments.takes_json(parser, "one JSON object each time")


def _watch(args: argparse.Namespace) -> int:
    from bench import watch
    from bench.watch import sources

    more = {"trials": args.trials, "walltime_min": args.walltime}
    if args.replay:
        with arguments.plain([args.replay]) as (file,):
            job = sources.replay(file, speed=args.speed, **more)
    else:
        job = sources.find(arguments.run_folders(args.paths), **more)
    how = watch.How(interval_s=args.interval, once=args.once, until_target=args.until_target, as_json=args.json)
    is_reached = watch.watch(job, how)
    return 0 if is_reached or not args.until_target else 1


def _add_parse(verbs: arguments.Verbs) -> None:
    parser = arguments.add(verbs, _parse, help="say what a log proves", example="runs/*/result_0.txt --official 5.1.0")
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="result_K.txt of a trial, or any log that holds one; .gz too, pipes, and - for stdin",
    )
    parser.add_argument("--official", metavar="RULESET", help="ask MLPerf's own checker too, of training logs")
    parser.add_argument("--num-gpus", type=arguments.count, metavar="N", help="where the log does not say")
    arguments.takes_json(parser, "one JSON object per file")


def _parse(args: argparse.Namespace) -> int:
    from bench.cli.other_tools import Loads

    exit_code, loads = 0, Loads()
    for log in args.logs:
        try:
            is_good = loads.read(log, as_json=args.json) or _parse_one(log, args, loads)
        except LogError as error:  # the other logs are judged all the same
            print(masking.masked(str(error)), file=sys.stderr)
            exit_code = max(exit_code, error.exit_code)
        else:
            exit_code = max(exit_code, 0 if is_good else 1)
    loads.show(as_json=args.json)
    return exit_code


def _parse_one(path: Path, args: argparse.Namespace, loads: "Loads") -> bool:
    """Print what a log proves; return whether that is a valid trial, also to the official checker if it is asked."""
    from bench.console import sheet
    from bench.mlperf import log as logs
    from bench.mlperf import reader
    from bench.mlperf import result as results
    from bench.report import kinds
    from bench.report.kinds import ShownTrial
    from bench.results import kind

    with arguments.plain([path]) as (file,):
        log = logs.read(file)
        result = results.result(log, str(path), reader.system(file))
        judged = kind.of_log(log, results.with_gpus(result, args.num_gpus))
        unused = [f"--{name.replace('_', '-')}" for name in ("official", "num_gpus") if getattr(args, name)]
        if unused and not kind.KINDS[judged.kind].has_referee:
            raise LogError(
                f"{' and '.join(unused)} with the log of a task that trains nothing",
                where=str(path),
                fix="leave that out for this log: only logs of training have a use for it",
            )
        judged = kind.refereed(judged, file, [args.official] if args.official else [])
    loads.keep(judged)
    shown = kinds.of(judged.kind)
    trial: ShownTrial[Any] = ShownTrial(str(path), judged)
    if args.json:
        about: dict[str, Any] = {
            "file": str(path),
            "kind": judged.kind.name,
            "minutes": result.minutes,
            "status": result.status,
        }
        about |= {"valid": judged.of_kind.valid, "problems": judged.problems} | shown.json_fields(judged.of_kind)
        about |= {"measurements": [asdict(one) for one in judged.of_kind.measurements]}
        official = [asdict(verdict) for verdict in judged.verdicts]
        print(masked_json.line(about | ({"official": official} if kind.KINDS[judged.kind].has_referee else {})))
    else:
        for table in (*shown.tables(trial, more=shown.parse_rows(trial)), *shown.detail_tables(trial)):
            sheet.show(table)
    return judged.valid


def _add_why(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _why,
        help="explain a run that failed or is stuck, from what it left behind",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    what = "run folders (default: latest, the newest one); files are one run together"
    arguments.takes_runs(parser, what, metavar="RUN|FILE")
    arguments.takes_json(parser, "one JSON object per run")


def _why(args: argparse.Namespace) -> int:
    from bench import diagnosis
    from bench.console import diagnosis as explanation_sheets
    from bench.console import sheet

    explanations = [diagnosis.explain(paths, ask=True) for paths in diagnosis.runs(arguments.run_folders(args.runs))]
    for explanation in explanations:
        if args.json:
            print(masked_json.line(explanation.to_json()))
        else:
            sheet.show(explanation_sheets.explanation_sheet(explanation))
    return 0 if all(explanation.rule is None for explanation in explanations) else 1


def _add_score(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _score,
        help="work out what the runs of a folder are worth by the official rules",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="a run folder (default: latest, the newest one), or another one that holds result_*.txt",
    )
    parser.add_argument("--ruleset", help="as 5.1.0 (default: the one in force when the runs were made)")
    arguments.takes_json(parser)


def _score(args: argparse.Namespace) -> int:
    from bench.console import result as module_sheets
    from bench.console import sheet
    from bench.mlperf import score

    scored = score.score(arguments.run_folders([args.folder] if args.folder else [])[0], ruleset=args.ruleset)
    if args.json:
        print(masked_json.line(scored.to_json()))
    else:
        for table in module_sheets.score_sheets(scored):
            sheet.show(table)
    return 0 if scored.valid else 1


def _add_report(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _report,
        help="write results as a page, tables and figures; several sets are compared",
        example="runs/20261121-lora70b-dgx2-acbd -o report",
    )
    what = "a folder of result_K.txt, some of the files of one, or a folder of such folders (default: latest)"
    arguments.takes_runs(parser, what)
    parser.add_argument("-o", "--out", type=Path, help="folder that gets report.html, *.csv and *.png")
    parser.add_argument("--title", help="headline of the page")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="where the logs do not say")
    rows = parser.add_mutually_exclusive_group()
    arguments.takes_json(rows, "one JSON object per trial")
    rows.add_argument("--csv", action="store_true", help="print one line per trial")


def _report(args: argparse.Namespace) -> int:
    from bench.console import sheet
    from bench.report import kinds

    report = kinds.load(arguments.run_folders(args.runs), num_gpus=args.num_gpus)
    page = report.write(args.out, title=args.title) if args.out else None
    if args.json:
        for row in report.rows():
            print(masked_json.line(row))
    elif args.csv:
        print(report.csv_text(), end="")
    else:
        for table in report.tables(page):
            sheet.show(table)
    if page is not None:
        print(page, file=sys.stderr)
    return 0 if report.valid else 1


def _add_rules(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs, _rules, help="say what a numbered rule means, how it shows and what to do", example="PYX-05"
    )
    parser.add_argument("ids", nargs="*", metavar="RULE", help="such as PYX-05 (default: list them all)")
    arguments.takes_json(parser, "one JSON object per rule")


def _rules(args: argparse.Namespace) -> int:
    from bench.console import diagnosis as explanation_sheets
    from bench.console import sheet

    found = explanation_sheets.named_rules(args.ids)
    if args.json:
        for rule in found:
            print(masked_json.line(asdict(rule)))
    elif args.ids:
        for rule in found:
            sheet.show(explanation_sheets.rule_sheet(rule))
    else:
        sheet.show(explanation_sheets.rules_sheet(found))
    return 0


def _add_pack(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _pack,
        help="pack finished runs as an MLPerf Training submission and run MLPerf's checkers on it",
        example="runs/20261121-lora70b-dgx2-acbd -o submission --org example --system dgx2_h100",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a folder of result_K.txt; several of one benchmark are merged",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="new folder for the package")
    parser.add_argument("--org", required=True, help="who submits")
    parser.add_argument("--system", metavar="NAME", help="what the system is called (default: as the logs say)")
    parser.add_argument("--ruleset", help="as 5.1.0 (default: the one in force when the runs were made)")
    parser.add_argument("--division", choices=("closed", "open"), help="(default: as the logs say)")
    parser.add_argument(
        "--describe", nargs="+", type=Path, default=[], metavar="FILE", help="<system>.json as a person filled it in"
    )
    parser.add_argument("--force", action="store_true", help="pack what could not be submitted; the package says so")
    arguments.takes_json(parser)


def _pack(args: argparse.Namespace) -> int:
    from bench.console import result as module_sheets
    from bench.console import sheet
    from bench.mlperf import package

    request = package.Request(
        runs=tuple(args.runs),
        folder=args.out,
        org=args.org,
        system=args.system,
        ruleset=args.ruleset,
        division=args.division,
        descriptions=tuple(args.describe),
        force=args.force,
    )
    packed = package.pack(request)
    if args.json:
        print(masked_json.line(packed.to_json()))
    else:
        sheet.show(module_sheets.package_sheet(packed))
    return 0 if packed.passed else 1


def _add_verify(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _verify,
        help="check that a run folder is as its run left it: logs, plan, script and config",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    arguments.takes_runs(parser, "run folders, or copies of them (default: latest, the newest one)")
    arguments.takes_json(parser, "one JSON object per run")


def _verify(args: argparse.Namespace) -> int:
    from bench.console import diagnosis as verification_sheets
    from bench.console import sheet
    from bench.runs import verification

    verified = [verification.verify(folder) for folder in arguments.run_folders(args.runs)]
    for each in verified:
        if args.json:
            print(masked_json.line(each.to_json()))
        else:
            sheet.show(verification_sheets.verification_sheet(each))
    return 0 if all(each.passed for each in verified) else 1


VERBS = (_add_watch, _add_parse, _add_why, _add_rules, _add_score, _add_report, _add_pack, _add_verify)
