"""The verb that checks what a run left behind, before it is handed on or after."""

import argparse

from bench.cli import verb
from bench.contract import strict_json


def _add_verify(verbs: verb.Verbs) -> None:
    parser = verb.add(
        verbs,
        _verify,
        help="check that a run folder is as its run left it: logs, plan, script and config",
        example="runs/20261121-lora70b-dgx2-acbd",
    )
    verb.takes_runs(parser, "run folders, or copies of them (default: latest, the newest one)")
    verb.takes_json(parser, "one JSON object per run")


def _verify(args: argparse.Namespace) -> int:
    from bench.console import sheet
    from bench.console import verification as verification_sheets
    from bench.runs import verification

    verified = [verification.verify(folder) for folder in verb.run_folders(args.runs)]
    for each in verified:
        if args.json:
            print(strict_json.line(each.to_json()))
        else:
            sheet.show(verification_sheets.sheet(each))
    return 0 if all(each.passed for each in verified) else 1


VERBS = (_add_verify,)
