"""The verb `study`: run the missing runs of a study and show its tables."""

import argparse
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import arguments
from bench.errors import ConfigError

if TYPE_CHECKING:
    from bench.results.study import StudyResult
    from bench.studies import Session


def _add_study(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _study,
        help="run the missing runs of a study, and show its tables next to published figures",
        example="tiny cluster=local --dry-run",
    )
    name = parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a study in conf/study, or the folder of a study (default: list all studies)",
    )
    name.completer = _names  # type: ignore[attr-defined]
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides for every run, as for runstop launch; or further folders of the study, for one table with a "
        "column for each cluster",
    )
    parser.add_argument(
        "--config-dir", type=Path, help="folder with a site's own conf/ files, including study/ and published/"
    )
    parser.add_argument("--runs", type=arguments.count, metavar="N", help="runs of each arm (default: as in the study)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show the planned arms without starting anything")
    what.add_argument(
        "--table", action="store_true", help="show the tables of the existing runs without starting anything"
    )
    parser.add_argument(
        "--all-clusters",
        action="store_true",
        help="with --table: one table with a column for each cluster on which the study ran, below LOGDIR",
    )
    what.add_argument("--list", action="store_true", help="list the studies")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="folder to write index.html, table.md, .csv, .tex and figures to"
    )
    arguments.takes_junit(parser)
    arguments.takes_json(parser, "one JSON object; with --list, one per study")


def _study(args: argparse.Namespace) -> int:
    from bench import studies
    from bench.studies.run_missing import run_missing

    has_no_results = args.dry_run or args.list or args.name is None
    if args.out and has_no_results:
        raise ConfigError(
            "--out writes the tables of a study, but these arguments produce no table",
            where="--out",
            fix="give the name of a study, without --dry-run and --list",
        )
    if args.junit and has_no_results:
        what = "--junit writes the results of a study, but these arguments produce no result"
        raise ConfigError(what, where="--junit", fix="give the name of a study, without --dry-run and --list")
    if args.list or args.name is None:
        return _list(args)
    if folders := _folders(args):
        _check_only_read(args, several=True)
        return _show(studies.platforms.merged([studies.read(folder, runs=args.runs) for folder in folders]), args)
    if (Path(args.name) / studies.STUDY).exists():
        _check_only_read(args)
        return _show(studies.read(Path(args.name), runs=args.runs), args)
    if args.table:
        folder = studies.folder_of(args.name, args.overrides, config_dir=args.config_dir)
        return _show(studies.read(folder, runs=args.runs), args)
    session = studies.begin(
        args.name, args.overrides, config_dir=args.config_dir, runs=args.runs, inspects=args.dry_run
    )
    if args.dry_run:
        return _dry_run(session, args)
    code = run_missing(session)
    return max(code, _show(studies.read(session.folder), args))


def _folders(args: argparse.Namespace) -> list[Path]:
    """Return the folders of a study on several clusters: those that are given, or all; empty for a single one.

    Raises:
        ConfigError: a given folder has no study, or another one than the given name, or there is none at all.
    """
    from bench import studies

    if args.all_clusters:
        if not args.table:
            raise ConfigError(
                "--all-clusters needs --table, which is missing", where="--all-clusters", fix="add --table"
            )
        folder = studies.folder_of(args.name, args.overrides, config_dir=args.config_dir)
        every = sorted(folder.parent.glob(f"{glob.escape(args.name)}-*/{studies.STUDY}"))
        of_study = [one.parent for one in every if studies.name_of(one.parent) == args.name]
        if not of_study:
            what = f"the study {args.name} has no results on any cluster"
            raise ConfigError(what, where=str(folder.parent), fix="run the study first, without --all-clusters")
        return of_study
    given = [args.name, *(one for one in args.overrides if "=" not in one)]
    if not any(is_folder(one) for one in given[1:]) and not glob.has_magic(args.name):
        return []
    is_read = glob.has_magic(args.name) or (Path(args.name) / studies.STUDY).exists()
    name = None if is_read else args.name
    folders = [folder for text in given[name is not None :] for folder in _matching(text)]
    for folder in folders:
        if not (folder / studies.STUDY).exists():
            raise ConfigError(
                "this folder has no results of a study",
                where=str(folder),
                fix="give folders such as LOGDIR/studies/NAME-*",
            )
        if name is not None and studies.name_of(folder) != name:
            what = f"this folder has results of the study {studies.name_of(folder)}, not of the study {name}"
            raise ConfigError(what, where=str(folder), fix=f"give folders of the study {name}")
    return folders


def is_folder(text: str) -> bool:
    """Return whether an argument is a folder, or a pattern of folders."""
    return glob.has_magic(text) or Path(text).is_dir()


def _matching(text: str) -> list[Path]:
    """Return the folders of studies that match a pattern; a path without a pattern is returned as it is."""
    from bench import studies

    path = Path(text)
    if path.exists() or not glob.has_magic(text):
        return [path]
    matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
    folders = sorted(one for one in matches if (one / studies.STUDY).exists())
    if not folders:
        raise ConfigError(
            "no folder of a study matches this pattern", where=text, fix="write a pattern such as LOGDIR/studies/NAME-*"
        )
    return folders


def _check_only_read(args: argparse.Namespace, *, several: bool = False) -> None:
    """Raise ConfigError if the folder of a study is given with options that only apply to a study's name."""
    overrides = [] if args.all_clusters else [one for one in args.overrides if "=" in one or not several]
    given = {"--dry-run": args.dry_run, **dict.fromkeys(overrides, True)}
    if unused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{unused[0]} does not apply to the folder of a study: runstop only shows the results in this folder",
            where=args.name,
            fix="to run or plan the study, write the name of the study instead of the folder",
        )


def _list(args: argparse.Namespace) -> int:
    from bench import studies
    from bench.console import sheet
    from bench.report.tables import TextTable

    rows = [(name, one.title, one.question, one.source) for name, one in studies.titles(args.config_dir)]
    columns = ("study", "title", "question", "source")
    if args.json:
        from bench import answers
        from bench.answers.schema import StudyTitle

        answers.show(*(StudyTitle(name=name, title=t, question=q, source=s) for name, t, q, s in rows))
    else:
        sheet.show(
            TextTable(
                "studies",
                rows,
                columns,
                caption="to see the runs of a study, such as tiny: runstop study tiny cluster=local --dry-run",
            )
        )
    return 0


def _dry_run(session: "Session", args: argparse.Namespace) -> int:
    from bench.console import sheet
    from bench.console import study as study_sheets

    blocks = session.blocks_left(session.statuses(must_query=False))
    if args.json:
        from bench import answers

        answers.show(answers.study_plan(session.folder, session.planned, blocks))
    else:
        sheet.show(study_sheets.plan_sheet(session.stored.name, session.planned, blocks))
    return 0 if any(arm.runs for arm in session.planned) else 1


def _show(result: "StudyResult", args: argparse.Namespace) -> int:
    """Print the tables of a study; return 1 if a reference value is not reached."""
    from bench.console import sheet
    from bench.console import study as study_sheets

    written = write_page(result, args.out) if args.out else None
    if args.json:
        from bench import answers

        answers.show(answers.study(result))
        return _ended(result, args)
    for table in study_sheets.sheets(result):
        sheet.show(table)
    if written is not None:
        print(f"\n{written}")
    return _ended(result, args)


def _ended(result: "StudyResult", args: argparse.Namespace) -> int:
    """Write --junit; return 1 if a reference value is not reached."""
    if args.junit:
        from bench.console import junit
        from bench.studies import junit as study_cases

        folders = [Path(one.folder) for one in result.platforms if one.folder] or [Path(result.folder)]
        arms = [case for folder in folders for case in study_cases.of_arms(folder, result.command)]
        junit.write(args.junit, f"study {result.name}", [*arms, *study_cases.of_references(result)])
    return 0 if result.meets_references else 1


def write_page(result: "StudyResult", out: Path) -> Path:
    """Write a study's tables, figures and page; return the page."""
    from bench import report

    return next(path for path in report.write_study(result, out) if path.suffix == ".html")


def _names(prefix: str, **ignored: object) -> list[str]:
    from bench.studies import library

    return [name for name in library.names() if name.startswith(prefix)]


VERBS = (_add_study,)
