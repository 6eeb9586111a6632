"""The verb that runs studies, and shows where they stand."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bench import masked_json
from bench.cli import arguments
from bench.errors import ConfigError

if TYPE_CHECKING:
    from bench.results.study import StudyResult
    from bench.studies import Session


def _add_study(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _study,
        help="run what a study lacks, and show its tables beside what is published",
        example="tiny cluster=local --dry-run",
    )
    name = parser.add_argument(
        "name", nargs="?", metavar="NAME", help="of a file in conf/study, or the folder of a study (default: list them)"
    )
    name.completer = _names  # type: ignore[attr-defined]
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run, as for bench.launch")
    parser.add_argument("--config-dir", type=Path, help="a site's own conf/ files, its study/ and published/ too")
    parser.add_argument("--runs", type=arguments.count, metavar="N", help="of each arm (default: as the study says)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show the arms as planned, and start nothing")
    what.add_argument("--table", action="store_true", help="only read what there is")
    what.add_argument("--list", action="store_true", help="list the studies")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="folder that gets index.html, table.md, .csv, .tex and figures"
    )
    arguments.takes_json(parser)


def _study(args: argparse.Namespace) -> int:
    from bench import studies
    from bench.studies.run_missing import run_missing

    if args.out and (args.dry_run or args.list or args.name is None):
        raise ConfigError("no tables to write", where="--out", fix="name a study, without --dry-run and --list")
    if args.list or args.name is None:
        return _list(args)
    if (Path(args.name) / studies.STUDY).exists():
        _check_only_read(args)
        _show(studies.read(Path(args.name), runs=args.runs), args)
        return 0
    if args.table:
        folder = studies.folder_of(args.name, args.overrides, config_dir=args.config_dir)
        _show(studies.read(folder, runs=args.runs), args)
        return 0
    session = studies.begin(args.name, args.overrides, config_dir=args.config_dir, runs=args.runs)
    if args.dry_run:
        return _dry_run(session, args)
    code = run_missing(session)
    _show(studies.read(session.folder), args)
    return code


def _check_only_read(args: argparse.Namespace) -> None:
    """Raise ConfigError where a study's folder is named, and something else is asked for than to read it."""
    given = {"--dry-run": args.dry_run, **dict.fromkeys(args.overrides, True)}
    if unused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{unused[0]} with the folder of a study, which is only read",
            where=args.name,
            fix="name the study instead, to run or to plan it",
        )


def _list(args: argparse.Namespace) -> int:
    from bench import studies
    from bench.console import sheet
    from bench.report.tables import TextTable

    rows = [(name, one.title, one.question, one.source) for name, one in studies.titles(args.config_dir)]
    columns = ("study", "title", "question", "source")
    if args.json:
        print(masked_json.line([dict(zip(columns, row, strict=True)) for row in rows]))
    else:
        sheet.show(TextTable("studies", rows, columns, caption="python -m bench study NAME cluster=… --dry-run"))
    return 0


def _dry_run(session: "Session", args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bench.console import sheet
    from bench.console import study as study_sheets

    blocks = session.blocks_left(session.standings(ask=False))
    if args.json:
        arms = [asdict(arm) | {"gpu_hours": arm.gpu_hours} for arm in session.planned]
        print(masked_json.line({"folder": str(session.folder), "arms": arms, "order": blocks}))
    else:
        sheet.show(study_sheets.plan_sheet(session.kept.name, session.planned, blocks))
    return 0


def _show(result: "StudyResult", args: argparse.Namespace) -> None:
    from bench.console import sheet
    from bench.console import study as study_sheets

    written = _written(result, args.out) if args.out else None
    if args.json:
        print(study_sheets.to_json(result))
        return
    for table in study_sheets.sheets(result):
        sheet.show(table)
    if written is not None:
        print(f"\n{written}")


def _written(result: "StudyResult", out: Path) -> Path:
    """Write a study's tables, figures and page; return the page."""
    from bench import report

    return next(path for path in report.write_study(result, out) if path.suffix == ".html")


def _names(prefix: str, **ignored: object) -> list[str]:
    from bench.studies import library

    return [name for name in library.names() if name.startswith(prefix)]


VERBS = (_add_study,)
