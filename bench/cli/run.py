"""The verbs plan, doctor, render, runs, logs, cancel and resume."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench import hints, masking
from bench.cli import arguments
from bench.errors import ConfigError
from bench.runs.folder import short

if TYPE_CHECKING:
    from bench.contract.plan import Plan


def _takes_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for runstop launch")
    parser.add_argument("--config-dir", type=Path, help="folder with a site's own conf/ files")


def _composed(args: argparse.Namespace) -> "Plan":
    from bench.history.avoid import bad_nodes
    from bench.planning import compose

    return compose.compose(args.overrides, config_dir=args.config_dir, bad_nodes=bad_nodes)


def _words(args: argparse.Namespace) -> list[str]:
    """Return the arguments of the plan, for the commands in fixes."""
    from bench.planning import to_prepare

    return [*args.overrides, *to_prepare.site_words(args.config_dir)]


def _add_plan(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _plan,
        help="show what a run would do, without running it",
        example="task=lora_tiny parallel.tp=2 --json",
    )
    _takes_overrides(parser)
    arguments.takes_json(parser, "plan.json on one line (with --layouts: one JSON object per layout)")
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="list possible values of parallel.tp, pp, cp and sp where they are null, best first",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="list the training memory of Llama 2 7B, 13B and 70B next to a published table",
    )
    parser.add_argument(
        "--scale",
        metavar="NODES",
        help="predict step, time to target and price on each number of nodes, such as 1,2,4,...,64",
    )
    parser.add_argument(
        "--stack",
        choices=("runstop", "reference", "reference-fp4"),
        default="runstop",
        help="with --scale: the training program, runstop's own engine or NVIDIA's code for MLPerf, in FP8 or NVFP4 "
        "(default: runstop)",
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="with --scale: draw the speed over GPUs, as PNG")


def _plan(args: argparse.Namespace) -> int:
    from bench import preflight
    from bench.console import plan as plan_sheets
    from bench.console import sheet

    if args.memory:
        return _plan_memory(args)
    if args.scale is not None:
        return _plan_scale(args)
    if args.figure is not None or args.stack != "runstop":
        raise _only_with_scale()
    plan = _composed(args)
    if args.layouts:
        if args.json:
            from bench import answers
            from bench.planning import layouts, local_sgd

            answers.show(*map(answers.layout, layouts.ranked(local_sgd.of_one_group(plan.config))))
        else:
            sheet.show(plan_sheets.sheet(plan))
        return 0
    if args.json:
        preflight.require_no_secret(plan)
    findings = preflight.inspect(plan, _words(args))
    if args.json:
        from bench import answers

        print(answers.plan_line(plan))
        for finding in findings:
            print(masking.masked(str(finding)), file=sys.stderr)
    else:
        plan_sheets.show_plan(plan, findings)
    return ConfigError.exit_code if preflight.would_refuse(plan, findings) else 0


def _only_with_scale() -> ConfigError:
    return ConfigError(
        "--figure and --stack are options of --scale, which is missing",
        where="plan",
        fix="add --scale 1,2,4,8, or remove --figure and --stack",
    )


def _plan_scale(args: argparse.Namespace) -> int:
    from bench.console import scaling as tables
    from bench.console import sheet
    from bench.planning import compose
    from bench.prediction import scale

    if args.layouts:
        what = "--layouts cannot be used with --scale, which itself chooses a layout on each number of nodes"
        raise ConfigError(what, where="plan --scale", fix="remove --layouts or --scale")
    counts, config = scale.numbers(args.scale), compose.unplanned(args.overrides, config_dir=args.config_dir)
    scaling = scale.predict(config, counts, stack=scale.StackName(args.stack))
    name = f"{config.task.name} on {config.cluster.name}"
    if args.figure is not None:
        from bench.report import scaling_figure

        scaling_figure.draw(scaling, args.figure, heading=name)
    if args.json:
        from bench import answers

        answers.show(answers.scaling(scaling, name))
    else:
        for table in (tables.sheet(scaling, name), tables.terms_sheet(scaling)):
            sheet.show(table)
    return 0


def _plan_memory(args: argparse.Namespace) -> int:
    from bench.console import plan as plan_sheets
    from bench.console import sheet
    from bench.planning import compose
    from bench.planning.estimates.model_memory import MODELS

    if args.overrides or args.layouts or args.json:
        raise ConfigError(
            "plan --memory takes no other arguments, because it always shows the same models",
            where="plan --memory",
            fix="remove all other arguments; for the memory of one task: runstop plan task=NAME",
        )
    task = ("task=pretrain_7b", "cluster=dgxh200")
    configs = {model: compose.unplanned([*task, f"model={model}"], config_dir=args.config_dir) for model in MODELS}
    for table in plan_sheets.sheets(configs):
        sheet.show(table)
    return 0


def _add_doctor(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _doctor,
        help="check a plan before it runs: plan and script, this site's Slurm, the nodes",
        example="task=lora70b cluster=dgx2 --tier canary",
    )
    _takes_overrides(parser)
    parser.add_argument(
        "--tier",
        choices=("laptop", "login", "canary", "nodes"),
        help="how far to check, each tier includes the ones before: laptop (plan and script), login (this site's Slurm "
        "and files), canary (a job on one node), nodes (a job on all nodes that measures their speed) "
        "(default: login if sbatch is installed, else laptop)",
    )
    arguments.takes_json(parser)
    arguments.takes_junit(parser)


def _doctor(args: argparse.Namespace) -> int:
    from bench.console import diagnosis as check_sheets
    from bench.console import sheet
    from bench.preflight import doctor

    plan, tiers = _composed(args), []
    for checked in doctor.examine(
        plan, doctor.tier_for(plan, args.tier), say=lambda line: print(line, file=sys.stderr), words=_words(args)
    ):
        tiers.append(checked)
        if not args.json:
            for table in check_sheets.check_sheets(checked):
                sheet.show(table)
    if args.json:
        from bench import answers

        answers.show(answers.doctor(plan, tiers))
    if args.junit:
        from bench.console import junit

        junit.write(args.junit, f"doctor {plan.name}", junit.of_checks(tiers))
    return 1 if doctor.errors([check for checked in tiers for check in checked]) else 0


def _add_render(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _render,
        help="print the sbatch script of a run (self-contained)",
        example="task=lora70b cluster=dgx2 > lora70b_dgx2.sbatch",
    )
    _takes_overrides(parser)
    arguments.takes_json(parser)


def _render(args: argparse.Namespace) -> int:
    from bench import backends, preflight

    plan = _composed(args)
    text = backends.for_plan(plan).render(plan)
    preflight.require_no_secret(plan)
    preflight.require_valid_manifest(plan)
    if args.json:
        from bench import answers
        from bench.answers.schema import Script

        answers.show(Script(plan=plan.name, backend=plan.config.cluster.backend.name, text=text))
    else:
        print(text, end="")
    return 0


def _add_runs(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _runs,
        help="list runs with the state of their jobs and their results",
        example="--task 'lora_*' --since 7d",
    )
    what = "folder that holds the run folders (default: LOGDIR, else runs), or a run"
    arguments.takes_runs(parser, what, dest="folder", nargs="?", metavar="DIR|RUN")
    parser.add_argument("--active", action="store_true", help="only runs that are queued or running")
    parser.add_argument("--task", metavar="NAME", help="only runs of this task; may be a pattern, such as 'lora_*'")
    parser.add_argument("--cluster", metavar="NAME", help="only runs on this cluster; may be a pattern")
    parser.add_argument(
        "--status",
        metavar="STATUS",
        help="only runs that ended so: valid, invalid, failed, interrupted, passed, ended; or that are active or "
        "unknown",
    )
    parser.add_argument("--since", metavar="TIME", help="only runs launched since then: an age (36h, 7d) or a date")
    parser.add_argument("--tag", metavar="TAG", help="only runs with this tag (runstop tag); may be a pattern")
    parser.add_argument(
        "--limit", type=arguments.count, metavar="N", default=30, help="list only the newest N (default: 30)"
    )
    parser.add_argument("--watch", action="store_true", help="repeat every 10 s until no run is active")
    arguments.takes_json(parser, "one JSON object per run")


def _runs(args: argparse.Namespace) -> int:
    from bench.console import runs as run_sheets
    from bench.runs import names
    from bench.runs.filters import Filter

    if args.status is not None and args.status not in run_sheets.STATUSES:
        fix = f"choose one of {', '.join(run_sheets.STATUSES)}"
        raise ConfigError(f"the status {args.status} does not exist", where="--status", fix=fix)
    root, only = Path(args.folder or names.root()), None
    if args.folder and (names.is_run(root) or not root.is_dir()):
        only = arguments.run_folders([args.folder])
        if not names.is_run(only[0]):
            raise names.not_a_run(only[0])
        root = only[0].parent
    wanted = Filter(task=args.task, cluster=args.cluster, tag=args.tag, since=args.since)
    how = {"active": args.active, "watch": args.watch, "as_json": args.json, "limit": args.limit}
    return run_sheets.show(root, **how, only=only, wanted=wanted, status=args.status)


def _add_logs(verbs: arguments.Verbs) -> None:
    parser = arguments.add(verbs, _logs, help="print the output of a run's job and ranks", example="latest --follow")
    arguments.takes_runs(parser, "a run (default: latest, the newest run)", dest="run", nargs="?")
    parser.add_argument("--follow", "-f", action="store_true", help="keep printing until the run ends")
    parser.add_argument(
        "--lines", "-n", type=arguments.count, metavar="N", help="print only the last N lines of each file"
    )
    arguments.takes_json(parser, "one JSON object per line of the output")


def _logs(args: argparse.Namespace) -> int:
    from bench.console import logs as log_pages

    folder = arguments.run_folder(args.run)
    log_pages.show(folder, num_lines=args.lines, follow=args.follow, as_json=args.json)
    return 0


def _add_cancel(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _cancel,
        help="cancel a run; finished trials are kept",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    arguments.takes_runs(parser, "runs; `latest` is the newest run", nargs="+")


def _cancel(args: argparse.Namespace) -> int:
    from bench.launch import resume

    for folder in arguments.run_folders(args.runs):
        text = f"job {resume.cancel(folder)} is cancelled; to resume the run: runstop resume {short(folder)}"
        print(hints.in_this_shell(text))
    return 0


def _add_resume(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _resume,
        help="resume a run that has ended: finished trials are kept, the others get another attempt",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    arguments.takes_runs(parser, "a run; `latest` is the newest run", dest="run", nargs=None)
    parser.add_argument(
        "--walltime",
        type=arguments.minutes,
        metavar="MIN",
        help="time limit of each remaining trial (default: as planned)",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option for sbatch, such as --sbatch=--exclude=dgx-7",
    )


def _resume(args: argparse.Namespace) -> int:
    from bench.launch import resume

    folder = arguments.run_folder(args.run)
    return resume.resume(folder, walltime_min=args.walltime, arguments=args.sbatch)


VERBS = (_add_plan, _add_doctor, _add_render, _add_runs, _add_logs, _add_cancel, _add_resume)
