"""The verb calibrate: measure this machine's GPU, so that plans estimate the time of a step."""

import argparse
import sys
from pathlib import Path

from bench import hints
from bench.cli import arguments


def _add_calibrate(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _calibrate,
        help="measure the rates of this machine's GPU, from which plans then estimate the time of a step",
        example="--file conf/gpu/l40s.yaml",
    )
    parser.add_argument(
        "--file", type=Path, help="the file to write (default: gpu/NAME.yaml in ~/.config/runstop, NAME from the GPU)"
    )
    arguments.takes_json(parser)


def _calibrate(args: argparse.Namespace) -> int:
    from bench.console import calibration as sheets
    from bench.console import sheet
    from bench.launch import calibrate

    done = calibrate.calibrate(file=args.file, say=lambda line: print(line, file=sys.stderr))
    if args.json:
        from bench import answers

        answers.show(answers.calibration(done.file, done.gpu, skipped=done.skipped, link_error=done.link_error))
        return 0
    for table in sheets.tables(done.gpu, skipped=done.skipped, link_error=done.link_error):
        sheet.show(table)
    print(hints.in_this_shell(f"written to {done.file}; `runstop plan task=…` uses it on this machine"))
    return 0


VERBS = (_add_calibrate,)
