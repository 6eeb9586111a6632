"""What a job asks between its commands: `python -m bench.launch.in_job RUN open|check|begin|judge|close`.

Runs on one rank, in the image where there is one. Exit codes: 0 go on, 1 or 2 end the job, 3 (begin) the trial is done.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bench import masking, preflight
from bench.console import trial as trial_sheets
from bench.contract import atomic_files, plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, PLAN, STATUS, SUBMISSION, element
from bench.errors import BenchError
from bench.preflight import nodes
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status

DONE = 3
OK = "every trial did what was asked"


def main() -> None:
    args = _parser().parse_args()
    try:
        plan = plan_kinds.load(args.run / PLAN)
        sys.exit(args.answer(args.run, plan, args))
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)


def open_(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Make what a folder needs that `sbatch FILE` alone has not made; let a run that had ended go on."""
    ledger.create(run, plan)
    if (run / STATUS).exists():
        ledger.reopen(run)
    with ledger.alone(run):
        job = atomic_files.read_object(run / JOB)
        known = job.get("jobs", [])
        if args.job not in [entry["id"] for entry in known]:
            new = {"id": args.job, "submitted": time.time()}
            name = {"backend": plan.config.cluster.backend.name}
            atomic_files.write(run / JOB, name | job | {"jobs": [*known, new]})
        (run / SUBMISSION).unlink(missing_ok=True)  # the job is noted now, whatever became of sbatch's answer
    return 0


def check(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Judge what every rank said of its node and of what it runs in; an error ends the job before it costs anything."""
    findings = nodes.judge(plan, nodes.load(run, element=element()))
    for finding in findings:
        print(finding)
    if not plan.config.launch.force:
        preflight.require(findings)
    return 0


def begin(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Open the next attempt of a trial; one that ended well, and whose job was then cut short, has its result."""
    trial = plan.trials[args.trial]
    trials.settle(run, plan, trial)
    is_open = ledger.begin(run, trial, attempts=plan.config.launch.attempts, job=args.job, nodes=args.nodes)
    print(f"trial {trial.index}, seed {trial.seed}: {'begins' if is_open else 'was finished before'}", flush=True)
    return 0 if is_open else DONE


def judge(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Judge a trial that has ended well, by us and by the official checker."""
    trial = plan.trials[args.trial]
    judged = trials.close(run, plan, trial, failed=False)
    assert judged is not None
    trial_sheets.show(run, trial, judged)
    return 0 if judged.valid else 1


def close(run: Path, plan: Plan, args: argparse.Namespace) -> int:
    """Write status.json, once nothing is left to be done; return 0 if this job's trials are proven.

    A trial that this job began and could not finish is aborted; so is that of an array element that came to no trial.
    """
    array, mine = plan.config.launch.array, {int(word) for word in args.trials.split()}
    for entry in ledger.found(run):
        if entry.trial not in mine:
            continue
        if entry.outcome is Outcome.running:
            trials.close(run, plan, plan.trials[entry.trial], failed=True)
        elif array and args.exit_code and entry.outcome.is_open:
            ledger.end(run, entry.trial, Outcome.aborted)
    outcomes = {entry.trial: entry.outcome for entry in ledger.found(run)}
    exit_code, what = args.exit_code, args.what
    if mine and not outcomes:  # whatever the ranks did, nothing says so
        exit_code, what = exit_code or 1, f"{what}, and the ledger cannot be read"
    if not (array and any(outcome.is_open for outcome in outcomes.values())):  # else other elements go on
        with ledger.alone(run):
            _write_status(run, list(outcomes.values()), exit_code=exit_code, what=what)
            with suppress(OSError):  # the run has its last word; `verify` will say that nothing vouches for it
                manifest.write(run)
    return 1 if exit_code or any(outcomes.get(trial) is not Outcome.proven for trial in mine) else 0


def _write_status(run: Path, outcomes: Sequence[Outcome], *, exit_code: int, what: str) -> None:
    """Write what happened, and the rule that explains it, which is looked for beside what is known already."""
    from bench.rules import RULES

    status = _known(outcomes, exit_code=exit_code)
    if status.exit_code == 0:
        statuses.write(run, status)
        return
    rule, _, seen = what.partition(": ")
    if rule in RULES:  # the script has seen what no log says
        status = replace(status, rule=rule, what=seen)
    statuses.write(run, status)
    statuses.write(run, _explained(run, status, what))


def _known(outcomes: Sequence[Outcome], *, exit_code: int) -> Status:
    """Return what the ledger and the exit code say."""
    if not outcomes and exit_code == 0:
        return Status(outcome=Ending.fine, exit_code=0, what="the nodes are fine; there was nothing to train")
    if all(outcome is Outcome.proven for outcome in outcomes) and exit_code == 0:
        return Status(outcome=Ending.proven, exit_code=0, what=OK)
    is_judged = bool(outcomes) and all(outcome.is_result for outcome in outcomes)
    return Status(outcome=Ending.not_proven if is_judged else Ending.failed, exit_code=exit_code or 1)


def _explained(run: Path, status: Status, what: str) -> Status:
    from bench import diagnosis

    found = diagnosis.explain([run])
    if found.rule in (None, diagnosis.UNKNOWN):
        return replace(status, what=what, during=what, fix=f"python -m bench why {run.resolve()}")
    explained = replace(status, what=found.title, during=what, rule=found.rule, fix=found.fix)
    return replace(explained, evidence=found.evidence, file=found.file, line=found.line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.launch.in_job", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    questions = parser.add_subparsers(required=True, metavar="QUESTION")
    opened = questions.add_parser("open", help="the job starts, or starts again")
    opened.set_defaults(answer=open_)
    opened.add_argument("--job", required=True)
    questions.add_parser("check", help="judge facts/").set_defaults(answer=check)
    begun = questions.add_parser("begin", help="open the next attempt of a trial")
    begun.set_defaults(answer=begin)
    begun.add_argument("trial", type=int)
    begun.add_argument("--job", required=True)
    begun.add_argument("--nodes", required=True)
    judged = questions.add_parser("judge", help="judge a trial that ended well")
    judged.set_defaults(answer=judge)
    judged.add_argument("trial", type=int)
    closed = questions.add_parser("close", help="write status.json")
    closed.set_defaults(answer=close)
    closed.add_argument("--exit-code", type=int, required=True)
    closed.add_argument("--what", required=True)
    closed.add_argument("--trials", default="", help="those of this job")
    return parser


if __name__ == "__main__":
    main()
