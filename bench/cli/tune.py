"""The verb tune: find the fastest settings of a training task on a cluster."""

import argparse
import sys
from pathlib import Path

from bench import hints
from bench.cli import arguments, study
from bench.errors import ConfigError


def _add_tune(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _tune,
        help="find the fastest split, micro-batch, recomputation and CUDA graph of a task: rank by the plan's "
        "estimates, measure the best",
        example="task=lora_tiny cluster=local --best 3",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for runstop launch; settings that you give are kept"
    )
    parser.add_argument("--config-dir", type=Path, help="folder with a site's own conf/ files")
    parser.add_argument(
        "--best", type=arguments.count, metavar="N", default=4, help="measure the best N of the ranking (default: 4)"
    )
    parser.add_argument(
        "--blocks", type=arguments.count, metavar="N", default=6, help="at most N runs of each (default: 6)"
    )
    parser.add_argument(
        "--steps", type=arguments.count, metavar="N", default=20, help="measured steps of a run (default: 20)"
    )
    parser.add_argument(
        "--budget",
        type=arguments.minutes,
        metavar="MIN",
        help="start no further block if it would end after MIN minutes (default: no limit)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show the ranking")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write the page and tables of all runs to",
    )
    arguments.takes_json(parser)


def _tune(args: argparse.Namespace) -> int:
    from bench import studies, tuning
    from bench.console import sheet
    from bench.report import tuning as tables

    _check(args)
    request = tuning.Request(
        overrides=tuple(args.overrides),
        config_dir=args.config_dir,
        best=args.best,
        blocks=args.blocks,
        steps=args.steps,
        budget_min=args.budget,
    )
    if args.dry_run:
        result = tuning.dry_run(request)
    else:
        result = tuning.tune(request, say=lambda line: print(hints.in_this_shell(line), file=sys.stderr))
    written = study.write_page(studies.read(Path(result.folder)), args.out) if args.out else None
    if args.json:
        from bench import answers

        answers.show(answers.tuning(result))
    else:
        sheet.show(tables.table(result))
        if written is not None:
            print(f"\n{written}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not belong together or are too small."""
    if args.dry_run and args.out:
        what = "--out writes a page about the runs, but --dry-run starts no run"
        raise ConfigError(what, where="--out", fix="remove --dry-run or --out")
    if args.blocks < 2:
        what = "--blocks must be at least 2, because a single run of each setting has no confidence interval"
        raise ConfigError(
            what, where="--blocks", fix="set --blocks to 2 or more, or remove --blocks to use the default 6"
        )


VERBS = (_add_tune,)
