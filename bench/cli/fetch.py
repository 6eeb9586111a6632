"""The verb `fetch`: download models and data sets, and check what was downloaded."""

import argparse
import sys
import time
from pathlib import Path

from bench.cli import arguments
from bench.errors import ConfigError

_MLPERF = "mlperf"


def _add_fetch(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _fetch,
        help="download a model or a data set from a Hugging Face hub; no other verb downloads anything",
        example="model Qwen/Qwen3-0.6B models/Qwen3-0.6B --dry-run",
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("model", "data", _MLPERF),
        help="mlperf: print where MLPerf's rules keep the inputs of a benchmark",
    )
    parser.add_argument("name", nargs="?", metavar="ORG/NAME", help="the repository; for mlperf: the benchmark")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where the files go (default: NAME)")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="compare a folder with its runstop_fetch.json")
    parser.add_argument("--revision", metavar="SHA", help="a commit, branch or tag (default: the newest commit)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--all", dest="everything", action="store_true", help="all files, not only those that runs read"
    )
    chosen.add_argument("--include", action="append", default=[], metavar="GLOB", help="only these files; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="only show the size and the free space")
    arguments.takes_json(parser)


def _fetch(args: argparse.Namespace) -> int:
    named = [text for text in (args.what, args.name) if text is not None]
    if args.check is not None:
        if named:
            raise ConfigError(
                "--check takes a folder and no other arguments",
                where=" ".join(named),
                fix="runstop fetch --check FOLDER",
            )
        return _check(args)
    if args.what == _MLPERF:
        return _mlperf(args)
    if len(named) < 2:
        fix = "write `runstop fetch model ORG/NAME`, `runstop fetch data ORG/NAME` or `runstop fetch --check FOLDER`"
        raise ConfigError("the command has no repository (ORG/NAME)", where="the command line", fix=fix)
    return _download(args)


def _download(args: argparse.Namespace) -> int:
    from bench.console import fetch as sheets
    from bench.console import progress, sheet
    from bench.fetch import download, hub

    request = download.Request(
        kind=args.what,
        repo=args.name,
        folder=args.folder or Path(args.name.rpartition("/")[2]),
        revision=args.revision,
        everything=args.everything,
        include=tuple(args.include),
    )
    planned = download.plan(request)
    if args.dry_run and args.json:
        from bench import answers

        answers.show(answers.download_plan(planned))
    else:
        sheet.show(sheets.planned_sheet(planned, hub.token_source()), file=sys.stdout if args.dry_run else sys.stderr)
    download.require_room(planned)
    if args.dry_run:
        return 0
    state, began_s = download.Progress(planned.bytes, len(planned.files)), time.monotonic()
    try:
        with progress.shown(lambda: sheets.progress_line(state, began_s), say=_say):
            record = download.fetch(planned, state)
    except KeyboardInterrupt:
        _say(f"interrupted; {hub.CONTINUES}")
        raise
    if args.json:
        from bench import answers

        answers.show(answers.download(request.folder, record, []))
    else:
        sheet.show(sheets.fetched_sheet(request.folder, record))
    return 0


def _check(args: argparse.Namespace) -> int:
    from bench.console import fetch as sheets
    from bench.console import sheet
    from bench.contract.checksums import FETCH_RECORD
    from bench.fetch import record

    known = record.read(args.check)
    if known is None:
        what, fix = f"the folder has no {FETCH_RECORD}", "give a folder that runstop fetch downloaded"
        raise ConfigError(what, where=str(args.check), fix=fix)
    wrong = list(record.problems(args.check, known))
    if args.json:
        from bench import answers

        answers.show(answers.download(args.check, known, wrong))
    else:
        sheet.show(sheets.checked_sheet(args.check, known, wrong))
    return 0 if known.complete and not wrong else 1


def _mlperf(args: argparse.Namespace) -> int:
    """Print the steps. Exit code 2, as for every refused request: nothing was downloaded."""
    from bench.console import fetch as sheets
    from bench.fetch import sources

    if args.name not in sources.MLPERF:
        what = f"runstop knows MLPerf's download locations only for {' and '.join(sources.MLPERF)}"
        raise ConfigError(what, where=str(args.name or "fetch mlperf"), fix="runstop fetch mlperf llama2_70b_lora")
    print(sheets.locations_text(args.name))
    return ConfigError.exit_code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


VERBS = (_add_fetch,)
