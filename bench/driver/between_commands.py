"""Steps between the commands of a run: open the run, check its nodes, begin and judge each trial, close the run.

The driver calls these functions. Slurm's batch script uses the command line, on one rank and in the container if there
is one: `python -m bench.driver.between_commands RUN STEP`. Exit codes: 0 continue, 1 or 2 end the job, 3 (begin only)
the trial already has its result, 4 and 5 (replace only) as in `bench.driver.slow_nodes`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bench import masked_json, masking, preflight
from bench.backends.slurm import job_output
from bench.console import trial as trial_tables
from bench.contract import atomic_files, node_lists, plan_kinds, regular_files
from bench.contract.plan import Plan, Trial, on_nodes
from bench.contract.run_files import JOB, MANIFEST, PLAN, STATUS, SUBMISSION, array_task
from bench.driver import slow_nodes
from bench.errors import BenchError
from bench.preflight import nodes
from bench.results.kind import Judged
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status

TRIAL_DONE = 3
ALL_VALID = "every trial completed the requested work"


def open_run(run: Path, plan: Plan, *, job: str | None) -> None:
    """Create the ledger if there is none, record the job in job.json, and reopen a run that had ended.

    `job` is the backend's id of the job; None without a backend.
    """
    ledger.create(run, plan)
    if (run / STATUS).exists():
        ledger.reopen(run)
    if job is None:
        return
    with ledger.locked(run):
        content = atomic_files.read_object(run / JOB)
        known = content.get("jobs", [])
        if job not in [entry["id"] for entry in known]:
            new = {"id": job, "submitted": time.time()}
            name = {"backend": plan.config.cluster.backend.name}
            masked_json.write(run / JOB, name | content | {"jobs": [*known, new]})
        (run / SUBMISSION).unlink(missing_ok=True)  # the job is recorded now, even if sbatch's answer was lost


def check_nodes(run: Path, plan: Plan, *, say: Callable[[str], None], num_nodes: int | None = None) -> None:
    """Judge the facts that every rank collected on its node, and print the findings.

    num_nodes: how many nodes were checked, if not those of a trial.

    Raises:
        BenchError: there is an error among the findings and launch.force is not set.
    """
    checked = plan if num_nodes is None else on_nodes(plan, num_nodes)
    findings = nodes.judge(checked, nodes.load(run, array_task=array_task()))
    for finding in findings:
        say(str(finding))
    if not plan.config.launch.force:
        preflight.require(findings)


def begin_trial(
    run: Path,
    plan: Plan,
    trial: Trial,
    *,
    job: str,
    nodes: str,
    nonce: str | None = None,
    unrecorded_cause: str | None = None,
) -> bool:
    """Open the next attempt of a trial; return False if the trial already has its result.

    A trial that succeeded, but whose job was interrupted before judging it, gets its result now. `nonce` is the
    attempt's; its ranks get the same one, so that they cannot take a later attempt for theirs. `unrecorded_cause` is
    why the previous attempt was interrupted, if the batch script recorded no cause.

    Raises:
        SubmitError: this job has started the trial launch.attempts times.
    """
    trials.settle(run, plan, trial)
    return ledger.begin(
        run,
        trial,
        attempts=plan.config.launch.attempts,
        job=job,
        nodes=nodes,
        nonce=nonce,
        left_out=node_lists.left_out(run, job),
        unrecorded_cause=unrecorded_cause,
    )


def judge_trial(run: Path, plan: Plan, trial: Trial) -> Judged:
    """Judge a trial that exited with 0, with the official checker too, and record its result in the ledger.

    Raises:
        LogError: the log is missing, or another run wrote it.
    """
    judged = trials.close(run, plan, trial, failed=False)
    assert judged is not None
    return judged


def abort_trials(run: Path, plan: Plan, of_job: Collection[int]) -> None:
    """Record in the ledger that the unfinished trials of this job are aborted.

    Raises:
        OSError, LogError: the ledger cannot be written, or another run wrote the log.
    """
    for entry in ledger.entries(run):
        if entry.trial in of_job and entry.outcome is Outcome.running:
            trials.close(run, plan, plan.trials[entry.trial], failed=True)


def close_run(run: Path, plan: Plan, *, exit_code: int, what: str, of_job: Collection[int]) -> int:
    """Write status.json and the manifest if no trial is left; return 0 if this job's trials are valid.

    Unfinished trials of this job are aborted; so is the trial of an array task that failed before starting it.

    Raises:
        OSError: status.json cannot be written.
    """
    array = plan.config.launch.array
    abort_trials(run, plan, of_job)
    for entry in ledger.entries(run):
        if entry.trial in of_job and array and exit_code and entry.outcome.is_open:
            ledger.end(run, entry.trial, Outcome.aborted)
    outcomes = {entry.trial: entry.outcome for entry in ledger.entries(run)}
    if of_job and not outcomes:  # nothing shows what the ranks did
        exit_code, what = exit_code or 1, f"{what}; the ledger cannot be read"
    others_run = array and any(outcome.is_open for outcome in outcomes.values())
    if not others_run:  # the last array task writes the status
        with ledger.locked(run):
            _write_status(run, list(outcomes.values()), exit_code=exit_code, what=what)
            with suppress(OSError):  # the run has its final status; `verify` reports the missing manifest
                manifest.write(run)
    return 1 if exit_code or any(outcomes.get(trial) is not Outcome.valid for trial in of_job) else 0


def finish_run(run: Path, plan: Plan) -> int:
    """Write the status and the manifest of a run that was killed after its last trial was judged; return its exit code.

    Raises:
        OSError: a file cannot be written.
    """
    every = [trial.index for trial in plan.trials]
    code = close_run(run, plan, exit_code=0, what="every trial ended", of_job=every)
    if not (run / MANIFEST).exists():
        manifest.write(run)  # raises what `close_run` ignores
    return code


def _write_status(run: Path, outcomes: Sequence[Outcome], *, exit_code: int, what: str) -> None:
    """Write the final status, with the rule that explains a failure if diagnosis finds one."""
    from bench.rules import RULES

    status = _known(outcomes, exit_code=exit_code)
    if status.exit_code == 0:
        statuses.write(run, status)
        return
    rule, _, seen = what.partition(": ")
    if rule in RULES:  # the driver or batch script names the rule
        status = replace(status, rule=rule, what=seen)
    statuses.write(run, status)
    statuses.write(run, _explained(run, status, what))


def _known(outcomes: Sequence[Outcome], *, exit_code: int) -> Status:
    """Return the status that follows from the ledger and the exit code."""
    if not outcomes and exit_code == 0:
        return Status(outcome=Ending.passed, exit_code=0, what="all node checks passed; the plan has no trials")
    if all(outcome is Outcome.valid for outcome in outcomes) and exit_code == 0:
        return Status(outcome=Ending.valid, exit_code=0, what=ALL_VALID)
    is_invalid = all(outcome.is_result for outcome in outcomes) and Outcome.invalid in outcomes
    return Status(outcome=Ending.invalid if is_invalid else Ending.failed, exit_code=exit_code or 1)


def _explained(run: Path, status: Status, what: str) -> Status:
    from bench import diagnosis

    cause = diagnosis.explain([run])
    if cause.rule in (None, diagnosis.UNKNOWN):
        return replace(status, what=what, during=what, fix="runstop why RUN")
    explained = replace(status, what=cause.title, during=what, rule=cause.rule, fix=cause.fix)
    return replace(explained, evidence=cause.evidence, file=cause.file, line=cause.line)


def main() -> None:
    """Run one step for a batch script."""
    regular_files.keep_others_from_writing()
    args = _parser().parse_args()
    try:
        plan = plan_kinds.load(args.run / PLAN)
        sys.exit(_step(args, plan))
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)


def _step(args: argparse.Namespace, plan: Plan) -> int:
    run: Path = args.run
    match args.step:
        case "open":
            open_run(run, plan, job=args.job)
        case "check":
            check_nodes(run, plan, say=print, num_nodes=args.nodes)
        case "replace":
            return slow_nodes.choose(run, plan, job=args.job, check_passed=args.exit_code == 0)
        case "spare":
            return slow_nodes.use_spare(run, plan, job=args.job, lost=args.lost.split(","), why=args.why)
        case "begin":
            trial = plan.trials[args.trial]
            name = f"trial {trial.index}, seed {trial.seed}"
            starts = f"{name}: starts"
            is_open = begin_trial(
                run,
                plan,
                trial,
                job=args.job,
                nodes=args.nodes,
                nonce=args.nonce,
                unrecorded_cause=job_output.requeue_cause(run, job=args.job, first_line=starts),
            )
            print(starts if is_open else f"{name}: already finished", flush=True)
            return 0 if is_open else TRIAL_DONE
        case "judge":
            trial = plan.trials[args.trial]
            judged = judge_trial(run, plan, trial)
            trial_tables.show(run, trial, judged)
            return 0 if judged.valid else 1
        case "close":
            mine = {int(trial) for trial in args.trials.split()}
            return close_run(run, plan, exit_code=args.exit_code, what=args.what, of_job=mine)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.driver.between_commands", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    steps = parser.add_subparsers(required=True, metavar="STEP", dest="step")
    opened = steps.add_parser("open", help="record that the job has started or restarted")
    opened.add_argument("--job", required=True)
    checked = steps.add_parser("check", help="judge the facts of the nodes (facts/)")
    checked.add_argument("--nodes", type=int, help="how many nodes were checked (default: those of a trial)")
    replaced = steps.add_parser("replace", help="choose the nodes that the trials use, after a node check")
    replaced.add_argument("--job", required=True)
    replaced.add_argument("--exit-code", type=int, required=True, help="of the node check")
    spare = steps.add_parser("spare", help="choose the nodes of the next attempt, after nodes were lost during a trial")
    spare.add_argument("--job", required=True)
    spare.add_argument("--lost", required=True, help="names of the lost nodes, separated by commas")
    spare.add_argument("--why", required=True)
    begun = steps.add_parser("begin", help="open the next attempt of a trial")
    begun.add_argument("trial", type=int)
    begun.add_argument("--job", required=True)
    begun.add_argument("--nodes", required=True)
    begun.add_argument("--nonce", help="nonce of the attempt, which its ranks get as RUNSTOP_ATTEMPT (default: random)")
    judged = steps.add_parser("judge", help="judge a trial that exited with 0")
    judged.add_argument("trial", type=int)
    closed = steps.add_parser("close", help="write status.json")
    closed.add_argument("--exit-code", type=int, required=True)
    closed.add_argument("--what", required=True)
    closed.add_argument("--trials", default="", help="numbers of this job's trials")
    return parser


if __name__ == "__main__":
    main()
