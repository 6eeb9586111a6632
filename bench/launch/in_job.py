"""What the batch script asks between the steps of a Slurm job: `python -m bench.launch.in_job RUN open|check|begin|judge|close`.

Runs on one rank, in the image where there is one. Exit codes: 0 go on, 1 or 2 end the job, 3 (begin) the trial is done.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench import preflight
from bench.console import trial as trial_sheets
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.errors import BenchError
from bench.preflight import nodes
from bench.runs import folder as folders
from bench.runs import ledger
from bench.runs import trial as trials
from bench.runs.folder import JOB, LEDGER, PLAN, STATUS

DONE = 3
OK, FINE = "every trial did what was asked", "fine"


def main() -> None:
    args = _parser().parse_args()
    try:
        plan = plans.load(args.run / PLAN)
        sys.exit(args.step(args.run, plan, args))
    except BenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def open_(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Make what a folder needs that `sbatch FILE` alone has not made; let a run that had ended go on."""
    ledger.create(run, plan)
    if (run / STATUS).exists():
        ledger.reopen(run)
    with ledger.alone(run):
        job = json.loads((run / JOB).read_text()) if (run / JOB).exists() else {"jobs": []}
        if args.job not in [entry["id"] for entry in job["jobs"]]:
            job["jobs"].append({"id": args.job, "submitted": time.time()})
            folders.write(run / JOB, job)
    return 0


def check(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Judge what every rank said of its node and of what it runs in; an error ends the job before it costs anything."""
    findings = nodes.judge(plan, nodes.load(run, element=plans.element()))
    for finding in findings:
        print(finding)
    if not plan.config.launch.force:
        preflight.require(findings)
    return 0


def begin(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Open the next attempt of a trial; one that ended well, and whose job was then cut short, has its result."""
    trial = plan.trials[args.trial]
    trials.settle(run, plan, trial)
    where = {"job": args.job, "nodes": args.nodes}
    is_open = ledger.begin(run, trial, attempts=plan.config.launch.attempts, **where)
    print(f"trial {trial.index}, seed {trial.seed}: {'begins' if is_open else 'was finished before'}", flush=True)
    return 0 if is_open else DONE


def judge(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Judge a trial that has ended well, by us and by the official checker."""
    trial = plan.trials[args.trial]
    judged = trials.close(run, plan, trial, failed=False)
    assert judged is not None
    trial_sheets.show(run, trial, judged)
    return 0 if judged.proven else 1


def close(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Write status.json, once nothing is left to be done; return 0 if this job's trials are proven.

    A trial that this job began and could not finish is aborted; so is that of an array element that came to no trial.
    """
    array, mine = plan.config.launch.array, {int(word) for word in args.trials.split()}
    for entry in ledger.read(run) if (run / LEDGER).exists() else []:
        if entry["trial"] not in mine:
            continue
        if entry["outcome"] == ledger.RUNNING:
            trials.close(run, plan, plan.trials[entry["trial"]], failed=True)
        elif array and args.exit_code and entry["outcome"] in ledger.OPEN:
            ledger.end(run, entry["trial"], {"outcome": ledger.ABORTED})
    outcomes = {entry["trial"]: entry["outcome"] for entry in (ledger.read(run) if (run / LEDGER).exists() else [])}
    if not (array and any(outcome in ledger.OPEN for outcome in outcomes.values())):  # else other elements go on
        with ledger.alone(run):
            folders.write(run / STATUS, _status(run, list(outcomes.values()), exit_code=args.exit_code, what=args.what))
    return 1 if args.exit_code or any(outcomes.get(trial) != ledger.PROVEN for trial in mine) else 0


def _status(run: Path, outcomes: list[str], *, exit_code: int, what: str) -> dict[str, Any]:
    """Return what happened, and the rule that explains it."""
    from bench import diagnosis
    from bench.rules import RULES

    if not outcomes and exit_code == 0:
        return {"outcome": FINE, "exit_code": 0, "what": "the nodes are fine; there was nothing to train"}
    if all(outcome == ledger.PROVEN for outcome in outcomes) and exit_code == 0:
        return {"outcome": ledger.PROVEN, "exit_code": 0, "what": OK}
    is_judged = bool(outcomes) and all(outcome in (ledger.PROVEN, ledger.NOT_PROVEN) for outcome in outcomes)
    status: dict[str, Any] = {"outcome": ledger.NOT_PROVEN if is_judged else "failed", "exit_code": exit_code or 1}
    rule, _, seen = what.partition(": ")
    known = {"rule": rule, "what": seen} if rule in RULES else {}  # the script has seen what no log says
    folders.write(run / STATUS, status | known)
    said = diagnosis.explain([run])
    if said.rule in (None, diagnosis.UNKNOWN):
        return status | {"what": what, "while": what, "fix": f"python -m bench why {run.resolve()}"}
    told = {"what": said.title, "rule": said.rule, "evidence": said.evidence, "fix": said.fix}
    return status | ({} if known else {"while": what}) | told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.launch.in_job", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    steps = parser.add_subparsers(required=True, metavar="STEP")
    opened = steps.add_parser("open", help="a life of the job begins")
    opened.set_defaults(step=open_)
    opened.add_argument("--job", required=True)
    steps.add_parser("check", help="judge facts/").set_defaults(step=check)
    begun = steps.add_parser("begin", help="open the next attempt of a trial")
    begun.set_defaults(step=begin)
    begun.add_argument("trial", type=int)
    begun.add_argument("--job", required=True)
    begun.add_argument("--nodes", required=True)
    judged = steps.add_parser("judge", help="judge a trial that ended well")
    judged.set_defaults(step=judge)
    judged.add_argument("trial", type=int)
    closed = steps.add_parser("close", help="write status.json")
    closed.set_defaults(step=close)
    closed.add_argument("--exit-code", type=int, required=True)
    closed.add_argument("--what", required=True)
    closed.add_argument("--trials", default="", help="those of this job")
    return parser


if __name__ == "__main__":
    main()
