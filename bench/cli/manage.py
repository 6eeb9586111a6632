"""The verbs rerun, tag, rm and gc."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import arguments
from bench.errors import ConfigError
from bench.runs.folder import short

if TYPE_CHECKING:
    from bench.runs.removal import Removable


def _add_rerun(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _rerun,
        help="launch a run anew with its own arguments and these overrides, and show what differs",
        example="latest recipe.lr=0.001",
    )
    arguments.takes_runs(parser, "a run; `latest` is the newest run", dest="run", nargs=None)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="replace or add to the arguments of the run"
    )


def _rerun(args: argparse.Namespace) -> int:
    from bench.console import manage as manage_sheets
    from bench.console import sheet
    from bench.launch import rerun
    from bench.runs import names

    folder = arguments.run_folder(args.run)
    repeated = rerun.plan(folder, args.overrides)
    sheet.show(manage_sheets.rerun_sheet(names.name_of(folder), repeated.differences), file=sys.stderr)
    return rerun.run(repeated)


def _add_tag(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _tag,
        help="add tags and a note to a run, or show them; runs --tag TAG lists the runs with a tag",
        example="latest baseline --note 'before the new driver'",
    )
    arguments.takes_runs(parser, "a run; `latest` is the newest run", dest="run", nargs=None)
    parser.add_argument("tags", nargs="*", default=[], metavar="TAG", help="letters, digits and . _ : + -")
    parser.add_argument("--remove", nargs="+", default=[], metavar="TAG", help="remove these tags")
    parser.add_argument("--note", metavar="TEXT", help="a line about the run; replaces its note, '' removes it")


def _tag(args: argparse.Namespace) -> int:
    from bench.runs import names, tags

    for folder in arguments.run_folders([args.run]):
        if args.tags or args.remove or args.note is not None:
            kept = tags.change(folder, add=args.tags, remove=args.remove, note=args.note)
        elif names.is_run(folder):
            kept = tags.read(folder)
        else:
            raise names.not_a_run(folder)
        print(f"{names.name_of(folder)}: {kept.text or 'no tags'}")
    return 0


def _add_rm(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _rm,
        help="delete runs with all their files; asks first, and never deletes an active run",
        example="runs/20261121-lora70b-dgx2-acbd --dry-run",
    )
    arguments.takes_runs(parser, "runs; with --yes a part of a name is not enough", nargs="+")
    _takes_answer(parser)


def _takes_answer(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--yes", "-y", action="store_true", help="do not ask")
    how.add_argument("--dry-run", action="store_true", help="only list what would be deleted")


def _rm(args: argparse.Namespace) -> int:
    from bench.runs import removal

    folders = dict.fromkeys(path.absolute() for path in arguments.run_folders(args.runs, whole=args.yes))
    return _removed("runs to delete", [removal.of_run(folder) for folder in folders], args)


def _add_gc(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _gc,
        help="delete what is of no use: runs that failed without a result, incomplete checkpoints of runs that have "
        "ended, and the rest of interrupted commands; asks first",
        example="--older-than 30 --dry-run",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder that holds the run folders (default: LOGDIR, else runs)",
    )
    parser.add_argument(
        "--older-than",
        type=arguments.positive,
        default=30.0,
        metavar="DAYS",
        help="only what has not changed for so many days (default: 30)",
    )
    _takes_answer(parser)


def _gc(args: argparse.Namespace) -> int:
    from bench.runs import names, removal

    root = args.folder or names.root()
    removable = removal.garbage(root, older_than_days=args.older_than)
    age = f"{args.older_than:g} {'day' if args.older_than == 1 else 'days'}"
    return _removed(f"of no use in {short(root)}, unchanged for {age}", removable, args)


def _removed(title: str, removable: "Sequence[Removable]", args: argparse.Namespace) -> int:
    """List what is to be deleted, ask, and delete it; return the exit code."""
    from bench.console import manage as manage_sheets
    from bench.console import sheet
    from bench.runs import removal

    sheet.show(manage_sheets.removal_sheet(title, removable, why_none="nothing to delete"))
    if args.dry_run or not removable:
        return 0
    if not args.yes and not _is_confirmed():
        print("nothing was deleted", file=sys.stderr)
        return 0
    for one in removable:
        removal.remove(one)
        print(f"deleted {short(one.path)}")
    return 0


def _is_confirmed() -> bool:
    """Ask whether to delete.

    Raises:
        ConfigError: stdin is not a terminal.
    """
    if not sys.stdin.isatty():
        fix = "add --yes to delete without a question, or --dry-run to only list"
        raise ConfigError("this command asks before it deletes, but stdin is not a terminal", where="stdin", fix=fix)
    print("delete them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


VERBS = (_add_rerun, _add_tag, _add_rm, _add_gc)
