"""The verbs that read logs and run folders: watch, parse, why, rules, score, report, pack, verify, sign."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import hints
from bench.cli import arguments
from bench.contract import run_files
from bench.errors import BenchError, ConfigError, LogError, NotALogError
from bench.runs.folder import short
from bench.texts import with_verb

if TYPE_CHECKING:
    from bench.cli.other_tools import Loads
    from bench.mlperf.log import Log
    from bench.mlperf.package.power import PowerRequest
    from bench.watch.lines import View


def _add_watch(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _watch,
        help="show running trials, with a forecast of when they reach the target",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    source = parser.add_mutually_exclusive_group()
    what = "a run (default: latest, the newest run), or logs that may not exist yet"
    arguments.takes_runs(source, what, dest="paths", metavar="RUN|FILE")
    source.add_argument("--replay", metavar="FILE|RUN", help="replay a finished log as if it were running")
    parser.add_argument(
        "--speed", type=arguments.positive, default=60.0, metavar="N", help="speed factor of --replay (default: 60)"
    )
    parser.add_argument("--once", action="store_true", help="print the current state once and exit")
    parser.add_argument(
        "--interval",
        type=arguments.positive,
        metavar="S",
        help="seconds between updates (default: 1 on a terminal, 60 in a pipe)",
    )
    parser.add_argument(
        "--until-target",
        action="store_true",
        help="exit with 0 as soon as the target is reached, with 1 if the trial ends before",
    )
    parser.add_argument(
        "--walltime",
        type=arguments.positive,
        metavar="MIN",
        help="time limit of each trial, for a log without a run folder",
    )
    parser.add_argument(
        "--trials", type=arguments.count, default=1, metavar="N", help="how many trials each log will have (default: 1)"
    )
    arguments.takes_json(parser, "one JSON object per update")


def _watch(args: argparse.Namespace) -> int:
    from bench import watch
    from bench.watch import sources

    more = {"trials": args.trials, "walltime_min": args.walltime}
    if args.replay:
        if Path(args.replay).is_dir():
            what, fix = "this is a folder, but --replay needs the log of one trial", "give a result_K.txt of the folder"
            raise ConfigError(what, where=args.replay, fix=fix)
        with arguments.plain(_logs(args.replay)[:1]) as (file,):
            job = sources.replay(file, speed=args.speed, from_end=args.once, **more)
    else:
        job = sources.find(_watched(args.paths), **more)
    how = watch.How(
        interval_s=args.interval,
        once=args.once,
        until_target=args.until_target,
        show_json=_show_progress if args.json else None,
    )
    is_reached = watch.watch(job, how)
    return 0 if is_reached or not args.until_target else 1


def _watched(texts: Sequence[str]) -> list[Path]:
    """Return the runs and logs to watch; a log may not exist yet."""
    coming = [Path(text) for text in texts if Path(text).suffix in _OF_LOGS and not Path(text).exists()]
    if len(coming) == len(texts) > 0:
        return coming
    return arguments.logs_or_runs(texts)


_OF_LOGS = (".txt", ".out", ".err", ".log")
"""Suffixes of logs."""


def _show_progress(time_ms: int, views: "Sequence[View]") -> None:
    from bench import answers

    answers.show(answers.progress(time_ms, views))


def _add_parse(verbs: arguments.Verbs) -> None:
    parser = arguments.add(verbs, _parse, help="check a log", example="runs/*/result_0.txt --official 5.1.0")
    what = "result_K.txt of a trial, a run (all its trials), or any log with MLLOG lines; .gz, pipes and - (stdin) work"
    arguments.takes_runs(parser, what, dest="logs", nargs="+", metavar="FILE|RUN")
    parser.add_argument("--official", metavar="RULESET", help="also run MLPerf's own checker on training logs")
    parser.add_argument("--num-gpus", type=arguments.count, metavar="N", help="GPU count, if the log does not have it")
    arguments.takes_json(parser, "one JSON object per file")


def _parse(args: argparse.Namespace) -> int:
    from bench.cli.other_tools import Loads

    exit_code, loads = 0, Loads()
    for text in args.logs:
        try:
            logs = _logs(text)
        except ConfigError as error:  # continue with the other logs
            hints.print_error(error)
            exit_code = error.exit_code
            continue
        for log in logs:
            try:
                is_good = loads.read(log, as_json=args.json) or _parse_one(log, args, loads)
            except BenchError as error:
                hints.print_error(error)
                exit_code = max(exit_code, error.exit_code)
            else:
                exit_code = max(exit_code, 0 if is_good else 1)
    loads.show(as_json=args.json)
    return exit_code


def _logs(text: str) -> list[Path]:
    """Return a log, or the logs of a run's trials.

    Raises:
        ConfigError: there is no such file or run, the file cannot be a log, or the run has no log of a trial.
    """
    from bench.mlperf.trial_set import by_number

    if Path(text) == arguments.STDIN:
        return [arguments.STDIN]
    logs: list[Path] = []
    for path in arguments.run_folders([text], files=True):
        if not path.is_dir():
            arguments.require_log(path, is_parsed=True)
            logs.append(path)
            continue
        results = sorted(path.glob(run_files.RESULTS), key=by_number)
        if not results:
            what = f"this run folder has no logs of trials ({run_files.RESULTS})"
            raise ConfigError(what, where=str(path), fix=f"to see the state of a run: runstop why {short(path)}")
        logs += results
    return logs


def _parse_one(path: Path, args: argparse.Namespace, loads: "Loads") -> bool:
    """Print the result of a log; return whether it is valid, by the official checker as well if --official is given."""
    from bench.console import sheet
    from bench.mlperf import log as logs
    from bench.mlperf import reader
    from bench.mlperf import result as results
    from bench.report import kinds
    from bench.report.kinds import ShownTrial
    from bench.results import kind

    with arguments.plain([path]) as (file,):
        log = logs.read(file)
        _require_log(log, file, path)
        result = results.result(log, str(path), reader.system(file))
        judged = kind.of_log(log, results.with_gpus(result, args.num_gpus))
        unused = [f"--{name.replace('_', '-')}" for name in ("official", "num_gpus") if getattr(args, name)]
        if unused and not kind.KINDS[judged.kind].has_official_rules:
            raise LogError(
                f"{with_verb(unused, 'applies', 'apply')} only to training logs, but this log is not a training log",
                where=str(path),
                fix=f"remove {' and '.join(unused)} for this log",
            )
        judged = kind.with_official_verdicts(judged, file, [args.official] if args.official else [])
    loads.keep(judged)
    shown = kinds.report_of(judged.kind)
    trial: ShownTrial[Any] = ShownTrial(str(path), judged)
    if args.json:
        from bench import answers

        answers.show(answers.verdict(path, judged, **shown.json_fields(judged.of_kind)))
    else:
        for table in (*shown.tables(trial, more=shown.parse_rows(trial)), *shown.detail_tables(trial)):
            sheet.show(table)
    return judged.valid


def _require_log(log: "Log", file: Path, path: Path) -> None:
    """Raise LogError for a file without any MLLOG line; `file` may be a copy of the path."""
    if log.events or log.garbled:
        return
    fix = "give the result_K.txt of a trial; for the output of a job that failed: runstop why FILE"
    if not file.stat().st_size:
        what = "the log is empty: the trial ended before it wrote a record"
        raise LogError(what, where=str(path), fix="to see why: runstop why RUN, with the run folder of this log")
    raise NotALogError("the file is not a log: it has no MLLOG line", where=str(path), fix=fix)


def _add_why(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _why,
        help="diagnose a failed or stuck run from its logs",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    what = "runs (default: latest, the newest run); several files are read as one run"
    arguments.takes_runs(parser, what, metavar="RUN|FILE")
    arguments.takes_json(parser, "one JSON object per run")


def _why(args: argparse.Namespace) -> int:
    from bench import diagnosis
    from bench.console import diagnosis as explanation_sheets
    from bench.console import sheet

    explanations = [diagnosis.explain(paths, ask=True) for paths in diagnosis.runs(arguments.logs_or_runs(args.runs))]
    for explanation in explanations:
        if args.json:
            from bench import answers

            answers.show(answers.diagnosis(explanation))
        else:
            sheet.show(explanation_sheets.explanation_sheet(explanation))
    return 0 if all(explanation.rule is None for explanation in explanations) else 1


def _add_goodput(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _goodput,
        help="show what the wall-clock time of a training run went to: training, restarts, stalls, evaluation, start",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    arguments.takes_runs(parser, "runs (default: latest, the newest run)")
    arguments.takes_json(parser, "one JSON object per run")


def _goodput(args: argparse.Namespace) -> int:
    from bench.console import goodput as goodput_sheets
    from bench.console import sheet
    from bench.runs import goodput

    for measured in map(goodput.of_run, arguments.run_folders(args.runs)):
        if args.json:
            from bench import answers

            answers.show(answers.goodput(measured))
        else:
            sheet.show(goodput_sheets.goodput_sheet(measured))
    return 0


def _add_score(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _score,
        help="compute the MLPerf score of the runs in a folder",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    what = "a run (default: latest, the newest run), or any folder with result_*.txt"
    arguments.takes_runs(parser, what, dest="run", nargs="?")
    parser.add_argument(
        "--ruleset", help="MLPerf ruleset, such as 5.1.0 (default: the one in force at the time of the runs)"
    )
    arguments.takes_json(parser)


def _score(args: argparse.Namespace) -> int:
    from bench.console import result as module_sheets
    from bench.console import sheet
    from bench.mlperf import score

    scored = score.score(arguments.run_folder(args.run), ruleset=args.ruleset)
    if args.json:
        from bench import answers

        answers.show(answers.score(scored))
    else:
        for table in module_sheets.score_sheets(scored):
            sheet.show(table)
    return 0 if scored.valid else 1


def _add_report(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _report,
        help="write results as a page, tables and figures; several run folders are compared",
        example="runs/20261121-lora70b-dgx2-acbd -o report",
    )
    what = "a run, some of its result_K.txt, or a folder of run folders (default: latest, the newest run)"
    arguments.takes_runs(parser, what)
    parser.add_argument("-o", "--out", type=Path, help="folder to write report.html, *.csv and *.png to")
    parser.add_argument("--title", help="title of the page")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="GPU count, if the logs do not have it")
    rows = parser.add_mutually_exclusive_group()
    arguments.takes_json(rows, "one JSON object per trial")
    rows.add_argument("--csv", action="store_true", help="print CSV, one line per trial")


def _report(args: argparse.Namespace) -> int:
    from bench.console import runs as run_sheets
    from bench.console import sheet
    from bench.report import kinds

    paths = arguments.logs_or_runs(args.runs)
    report = kinds.load(paths, num_gpus=args.num_gpus)
    page = report.write(args.out, title=args.title) if args.out else None
    if args.json:
        from bench import answers

        answers.show(*map(answers.trial, report.rows()))
    elif args.csv:
        print(report.csv_text(), end="")
    else:
        for table in (*report.tables(page), *run_sheets.tags_sheets(paths)):
            sheet.show(table)
    if page is not None:
        print(page, file=sys.stderr)
    for hint in _study_hints(args.runs):
        print(hint, file=sys.stderr)
    return 0 if report.valid else 1


def _study_hints(texts: Sequence[str]) -> list[str]:
    """Return how to see the page of each folder of a study, which has its arms and published figures."""
    from bench.runs import names

    folders = [text for text in texts if (Path(text) / names.STUDY).is_file()]
    commands = (f"runstop study {shlex.quote(text)} -o DIR" for text in folders)
    return [hints.in_this_shell(f"this is the folder of a study; its own page, by arms: `{one}`") for one in commands]


def _add_rules(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _rules,
        help="explain known problems by their numbers: what is wrong, how to recognize it, how to fix it",
        example="PYX-05",
    )
    parser.add_argument("ids", nargs="*", metavar="RULE", help="such as PYX-05 (default: list them all)")
    arguments.takes_json(parser, "one JSON object per rule")


def _rules(args: argparse.Namespace) -> int:
    from bench.console import diagnosis as explanation_sheets
    from bench.console import sheet

    rules = explanation_sheets.named_rules(args.ids)
    if args.json:
        from bench import answers

        answers.show(*map(answers.rule, rules))
    elif args.ids:
        for rule in rules:
            sheet.show(explanation_sheets.rule_sheet(rule))
    else:
        sheet.show(explanation_sheets.rules_sheet(rules))
    return 0


def _add_pack(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _pack,
        help="pack finished runs as an MLPerf Training submission and run MLPerf's checkers on it",
        example="runs/20261121-lora70b-dgx2-acbd -o submission --org example --system dgx2_h100",
    )
    arguments.takes_runs(parser, "a run; several of one benchmark are combined", nargs="+")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="new folder for the package (must not exist)"
    )
    parser.add_argument("--org", required=True, help="name of the submitting organization")
    parser.add_argument("--system", metavar="NAME", help="name of the system (default: from the logs)")
    parser.add_argument(
        "--ruleset", help="MLPerf ruleset, such as 5.1.0 (default: the one in force at the time of the runs)"
    )
    parser.add_argument("--division", choices=("closed", "open"), help="(default: from the logs)")
    parser.add_argument(
        "--describe",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="the completed system description <system>.json",
    )
    parser.add_argument(
        "--power",
        nargs="?",
        choices=("node", "gpus"),
        const="node",
        help="also pack the recorded power: of whole nodes (default), or of the GPUs only, which is not for submission",
    )
    parser.add_argument(
        "--meter",
        nargs="+",
        type=Path,
        default=[],
        metavar="CSV",
        help="readings of your own power meter: columns time_ms, node, power_w; instead of the recorded ones",
    )
    parser.add_argument(
        "--switch-watts",
        nargs="+",
        type=float,
        default=[],
        metavar="W",
        help="of each switch between the nodes: its maximum power, times the share that the runs use",
    )
    parser.add_argument(
        "--psu-efficiency",
        type=float,
        default=1.0,
        metavar="F",
        help="output over input of the power supplies, if the meter is on their AC side (default: 1)",
    )
    parser.add_argument("--dc", action="store_true", help="the meter is on the DC side of the power supplies")
    parser.add_argument(
        "--force", action="store_true", help="pack even if it cannot be submitted; the package is marked"
    )
    arguments.takes_json(parser)


def _pack(args: argparse.Namespace) -> int:
    from bench.console import result as module_sheets
    from bench.console import sheet
    from bench.mlperf import package

    request = package.Request(
        runs=tuple(arguments.run_folders(args.runs)),
        folder=args.out,
        org=args.org,
        system=args.system,
        ruleset=args.ruleset,
        division=args.division,
        descriptions=tuple(args.describe),
        power=_power(args),
        force=args.force,
    )
    packed = package.pack(request)
    if args.json:
        from bench import answers

        answers.show(answers.package(packed))
    else:
        sheet.show(module_sheets.package_sheet(packed))
    return 0 if packed.passed else 1


def _power(args: argparse.Namespace) -> "PowerRequest | None":
    """Return which power to pack.

    Raises:
        ConfigError: an option of power is given without --power.
    """
    from bench.mlperf.package.power import PowerRequest, Scope

    if args.power is None:
        given = {
            "--meter": args.meter,
            "--switch-watts": args.switch_watts,
            "--dc": args.dc,
            "--psu-efficiency": args.psu_efficiency != 1,
        }
        if unused := [name for name, value in given.items() if value]:
            raise ConfigError(
                f"{with_verb(unused, 'needs', 'need')} the option --power, which is missing",
                where="command line",
                fix=f"add --power, or remove {' and '.join(unused)}",
            )
        return None
    return PowerRequest(
        scope=Scope(args.power),
        meters=tuple(args.meter),
        current="DC" if args.dc else "AC",
        efficiency=args.psu_efficiency,
        switches_w=tuple(args.switch_watts),
    )


def _add_verify(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _verify,
        help="check that the logs, plan, script and config of a run folder are unchanged since the run",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    arguments.takes_runs(parser, "runs, or copies of their folders (default: latest, the newest run)")
    parser.add_argument("--signed", action="store_true", help="also check that an allowed signer signed it")
    parser.add_argument(
        "--allowed-signers",
        type=Path,
        metavar="FILE",
        help="names and public keys of signers, as ssh-keygen reads them",
    )
    parser.add_argument("--revoked", type=Path, metavar="FILE", help="public keys that are no longer valid, or a KRL")
    arguments.takes_json(parser, "one JSON object per run")


def _verify(args: argparse.Namespace) -> int:
    from bench.console import diagnosis as verification_sheets
    from bench.console import sheet
    from bench.runs import signature, verification

    if bool(args.signed) != (args.allowed_signers is not None) or (args.revoked and not args.signed):
        fix = "run `runstop verify --signed --allowed-signers FILE [--revoked FILE] RUN`"
        given = {"--allowed-signers": args.allowed_signers, "--revoked": args.revoked}
        unused = " and ".join(name for name, file in given.items() if file is not None)
        what = f"{unused} can be used only with --signed, which is missing"
        if args.signed:
            what = "--signed needs --allowed-signers, which is missing"
        raise ConfigError(what, where="command line", fix=fix)
    keys = {"allowed_signers": args.allowed_signers, "revoked": args.revoked}
    verified = [
        signature.verify(folder, **keys) if args.signed else verification.verify(folder)
        for folder in arguments.run_folders(args.runs)
    ]
    for each in verified:
        if args.json:
            from bench import answers

            answers.show(answers.verification(each))
        else:
            sheet.show(verification_sheets.verification_sheet(each))
    return 0 if all(each.passed for each in verified) else 1


def _add_sign(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _sign,
        help="sign the manifest of a run with an SSH key, so that others can check who vouches for it",
        example="runs/20261121-lora70b-dgx2-acbd --key ~/.ssh/id_ed25519",
    )
    arguments.takes_runs(parser, "runs (default: latest, the newest run)")
    parser.add_argument(
        "--key", type=Path, required=True, metavar="FILE", help="private key, or public key of one in ssh-agent"
    )


def _sign(args: argparse.Namespace) -> int:
    from bench.runs import signature

    for folder in arguments.run_folders(args.runs):
        print(signature.sign(folder, args.key))
    return 0


VERBS = (
    _add_watch,
    _add_parse,
    _add_why,
    _add_rules,
    _add_goodput,
    _add_score,
    _add_report,
    _add_pack,
    _add_verify,
    _add_sign,
)
