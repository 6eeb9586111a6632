"""What a run does between its commands: open it, check its nodes, begin and judge each trial, close it.

The driver calls these functions. A batch script, which has no driver, asks by the command line, on one rank and in the
image where there is one: `python -m bench.driver.between_commands RUN open|check|begin|judge|close`. Exit codes: 0 go
on, 1 or 2 end the job, 3 (begin) the trial is done.
"""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bench import masked_json, masking, preflight
from bench.console import trial as trial_tables
from bench.contract import atomic_files, plan_kinds
from bench.contract.plan import Plan, Trial
from bench.contract.run_files import JOB, PLAN, STATUS, SUBMISSION, element
from bench.errors import BenchError
from bench.preflight import nodes
from bench.results.kind import Judged
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status

DONE = 3
ALL_PROVEN = "every trial did what was asked"


def open_run(run: Path, plan: Plan, *, job: str | None) -> None:
    """Create the ledger if there is none, note the job in job.json, and let a run that had ended go on.

    `job` is the id by which a backend knows it; None where no backend does.
    """
    ledger.create(run, plan)
    if (run / STATUS).exists():
        ledger.reopen(run)
    if job is None:
        return
    with ledger.alone(run):
        content = atomic_files.read_object(run / JOB)
        known = content.get("jobs", [])
        if job not in [entry["id"] for entry in known]:
            new = {"id": job, "submitted": time.time()}
            name = {"backend": plan.config.cluster.backend.name}
            masked_json.write(run / JOB, name | content | {"jobs": [*known, new]})
        (run / SUBMISSION).unlink(missing_ok=True)  # the job is noted now, whatever became of sbatch's answer


def check_nodes(run: Path, plan: Plan, *, say: Callable[[str], None]) -> None:
    """Judge what every rank found on its node, and in what it runs; what is found is said.

    Raises:
        BenchError: an error among the findings ends the job before it costs anything, unless launch.force is set.
    """
    findings = nodes.judge(plan, nodes.load(run, element=element()))
    for finding in findings:
        say(str(finding))
    if not plan.config.launch.force:
        preflight.require(findings)


def begin_trial(run: Path, plan: Plan, trial: Trial, *, job: str, nodes: str) -> bool:
    """Open the next attempt of a trial; return False if it is done.

    A trial that ended well, and whose job was cut short before it was judged, gets its result now.

    Raises:
        SubmitError: this job has started it as often as launch.attempts allows.
    """
    trials.settle(run, plan, trial)
    return ledger.begin(run, trial, attempts=plan.config.launch.attempts, job=job, nodes=nodes)


def judge_trial(run: Path, plan: Plan, trial: Trial) -> Judged:
    """Judge a trial that has ended well, by us and by the official checker, and enter it in the ledger.

    Raises:
        LogError: it left no log, or there is one that it did not write.
    """
    judged = trials.close(run, plan, trial, failed=False)
    assert judged is not None
    return judged


def abort_trials(run: Path, plan: Plan, of_job: Collection[int]) -> None:
    """Enter in the ledger that the trials which this job began, and has not ended, are aborted.

    Raises:
        OSError, LogError: the ledger cannot be written, or its log is another run's.
    """
    for entry in ledger.found(run):
        if entry.trial in of_job and entry.outcome is Outcome.running:
            trials.close(run, plan, plan.trials[entry.trial], failed=True)


def close_run(run: Path, plan: Plan, *, exit_code: int, what: str, of_job: Collection[int]) -> int:
    """Write status.json and the manifest, once nothing is left to be done; return 0 if this job's trials are proven.

    A trial that this job began and could not finish is aborted; so is that of an array element that came to no trial.

    Raises:
        OSError: status.json cannot be written.
    """
    array = plan.config.launch.array
    abort_trials(run, plan, of_job)
    for entry in ledger.found(run):
        if entry.trial in of_job and array and exit_code and entry.outcome.is_open:
            ledger.end(run, entry.trial, Outcome.aborted)
    outcomes = {entry.trial: entry.outcome for entry in ledger.found(run)}
    if of_job and not outcomes:  # whatever the ranks did, nothing says so
        exit_code, what = exit_code or 1, f"{what}, and the ledger cannot be read"
    if not (array and any(outcome.is_open for outcome in outcomes.values())):  # else other elements go on
        with ledger.alone(run):
            _write_status(run, list(outcomes.values()), exit_code=exit_code, what=what)
            with suppress(OSError):  # the run has its final status; `verify` will say that nothing vouches for it
                manifest.write(run)
    return 1 if exit_code or any(outcomes.get(trial) is not Outcome.proven for trial in of_job) else 0


def _write_status(run: Path, outcomes: Sequence[Outcome], *, exit_code: int, what: str) -> None:
    """Write what happened, and the rule that explains it, which is looked for beside what is known already."""
    from bench.rules import RULES

    status = _known(outcomes, exit_code=exit_code)
    if status.exit_code == 0:
        statuses.write(run, status)
        return
    rule, _, seen = what.partition(": ")
    if rule in RULES:  # the driver, or the batch script, has seen what no log says
        status = replace(status, rule=rule, what=seen)
    statuses.write(run, status)
    statuses.write(run, _explained(run, status, what))


def _known(outcomes: Sequence[Outcome], *, exit_code: int) -> Status:
    """Return what the ledger and the exit code say."""
    if not outcomes and exit_code == 0:
        return Status(outcome=Ending.fine, exit_code=0, what="the nodes are fine; there was nothing to train")
    if all(outcome is Outcome.proven for outcome in outcomes) and exit_code == 0:
        return Status(outcome=Ending.proven, exit_code=0, what=ALL_PROVEN)
    is_judged = bool(outcomes) and all(outcome.is_result for outcome in outcomes)
    return Status(outcome=Ending.not_proven if is_judged else Ending.failed, exit_code=exit_code or 1)


def _explained(run: Path, status: Status, what: str) -> Status:
    from bench import diagnosis

    found = diagnosis.explain([run])
    if found.rule in (None, diagnosis.UNKNOWN):
        return replace(status, what=what, during=what, fix=f"python -m bench why {run.resolve()}")
    explained = replace(status, what=found.title, during=what, rule=found.rule, fix=found.fix)
    return replace(explained, evidence=found.evidence, file=found.file, line=found.line)


def main() -> None:
    """Answer one question of a batch script."""
    args = _parser().parse_args()
    try:
        plan = plan_kinds.load(args.run / PLAN)
        sys.exit(_answer(args, plan))
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)


def _answer(args: argparse.Namespace, plan: Plan) -> int:
    run: Path = args.run
    match args.question:
        case "open":
            open_run(run, plan, job=args.job)
        case "check":
            check_nodes(run, plan, say=print)
        case "begin":
            trial = plan.trials[args.trial]
            is_open = begin_trial(run, plan, trial, job=args.job, nodes=args.nodes)
            what = "begins" if is_open else "was finished before"
            print(f"trial {trial.index}, seed {trial.seed}: {what}", flush=True)
            return 0 if is_open else DONE
        case "judge":
            trial = plan.trials[args.trial]
            judged = judge_trial(run, plan, trial)
            trial_tables.show(run, trial, judged)
            return 0 if judged.valid else 1
        case "close":
            mine = {int(word) for word in args.trials.split()}
            return close_run(run, plan, exit_code=args.exit_code, what=args.what, of_job=mine)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.driver.between_commands", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    questions = parser.add_subparsers(required=True, metavar="QUESTION", dest="question")
    opened = questions.add_parser("open", help="the job starts, or starts again")
    opened.add_argument("--job", required=True)
    questions.add_parser("check", help="judge facts/")
    begun = questions.add_parser("begin", help="open the next attempt of a trial")
    begun.add_argument("trial", type=int)
    begun.add_argument("--job", required=True)
    begun.add_argument("--nodes", required=True)
    judged = questions.add_parser("judge", help="judge a trial that ended well")
    judged.add_argument("trial", type=int)
    closed = questions.add_parser("close", help="write status.json")
    closed.add_argument("--exit-code", type=int, required=True)
    closed.add_argument("--what", required=True)
    closed.add_argument("--trials", default="", help="those of this job")
    return parser


if __name__ == "__main__":
    main()
