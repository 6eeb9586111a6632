"""Node 0: drive a plan's commands over all nodes, in the order and with the endings of a batch script (job.sh)."""

import shutil
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench import masking
from bench.backends.local import master_port
from bench.backends.nodes import lead as nodes_lead
from bench.backends.nodes.interruption import START_AGAIN, STOPPED, TIME_IS_NEAR, CutShortError, Ending, NodeLostError
from bench.backends.nodes.lead import Nodes, require_prepared
from bench.contract import plan as plans
from bench.contract import plan_paths, run_files
from bench.contract.plan import Command, Plan
from bench.errors import BenchError, with_rule
from bench.launch import in_job
from bench.runs import status as statuses
from bench.runs.status import Ending as Outcome
from bench.runs.status import Status

RESERVE_BYTES = 2**18
LEAST_FREE_BYTES = 2**20
IN_STATUS = ("SLU-07",)
"""What no rank's own log says; `why` finds all else there."""
SETTLE_S = 3.0
"""Where a whole job is told to end, other nodes may hear of it so much earlier than this one."""


class FailedError(Exception):
    """A command has failed, or what is asked between commands."""

    def __init__(self, exit_code: int, what: str) -> None:
        super().__init__(what)
        self.exit_code, self.what = exit_code, what


@dataclass(slots=True)
class Lead:
    """A run under way."""

    run: Path
    plan: Plan
    nodes: Nodes
    ending: Ending
    job: str
    restarts: bool
    """Whether somebody starts this process again where it ends with START_AGAIN."""
    trials: list[int] = field(default_factory=list)
    gain: bool = False
    """Whether this start has done what the next one need not do again."""

    @property
    def trial_numbers(self) -> str:
        return " ".join(map(str, self.trials))


def drive(lead: Lead, join: Callable[[], None]) -> int:
    """Return the exit code of the run: 0 once every trial is proven."""
    with suppress(OSError):  # room for the last word on a disk that fills up
        (lead.run / run_files.RESERVE).write_bytes(bytes(RESERVE_BYTES))
    try:
        must(lead, "opening the run", in_job.open_, job=lead.job)
        join()
        for command in lead.plan.commands[: len(lead.plan.commands) - len(lead.plan.trials)]:
            before_trials(lead, command)
        for index in lead.trials:
            trial(lead, index)
    except FailedError as error:
        return finish(lead, error.exit_code, error.what)
    except CutShortError as error:
        return leave(lead, str(error))
    except NodeLostError as error:
        return leave(lead, _settled(lead, with_rule(error.rule, error.what)))
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr, flush=True)
        return finish(lead, error.exit_code, with_rule(error.rule, error.what))
    except OSError as error:
        return finish(lead, 1, with_rule("CFG-08", f"cannot write: {error.strerror}"))
    return finish(lead, 0, "every trial ended")


def ask(lead: Lead, question: Callable[[Path, Plan, Namespace], int], **words: object) -> int:
    """Return the exit code of what a job asks between its commands."""
    try:
        return question(lead.run, lead.plan, Namespace(**words))
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:  # noqa: BLE001 - as of a process of its own, whose traceback stands in the output
        traceback.print_exc()
        return 1


def must(lead: Lead, what: str, question: Callable[[Path, Plan, Namespace], int], **words: object) -> None:
    """Ask, and go on only if the answer is yes."""
    lead.ending.check()
    code = ask(lead, question, **words)
    lead.ending.check()
    if code:
        raise FailedError(code, f"{what} failed")


def before_trials(lead: Lead, command: Command) -> None:
    """Run what the plan has before its trials."""
    if command.name == plans.PREPARE:
        return prepare(lead, command)
    if command.name == plans.NODE_FACTS:
        for old in (lead.run / run_files.FACTS).glob("rank_*.json"):  # an earlier start's
            old.unlink()
    run_command(lead, command)
    if command.name == plans.NODE_FACTS:
        must(lead, "the check of the nodes", in_job.check)
    return None


def prepare(lead: Lead, command: Command) -> None:
    """Make what is not there yet; afterwards every node must have it, at the same path."""
    if not plan_paths.is_prepared(lead.plan):
        run_command(lead, command)
        lead.gain = True
    require_prepared(lead.nodes, lead.ending.check)


def trial(lead: Lead, index: int) -> None:
    """Train and judge a trial, unless its outcome is known."""
    lead.ending.check()
    code = ask(lead, in_job.begin, trial=index, job=lead.job, nodes=",".join(lead.nodes.names))
    if code == in_job.DONE:
        return
    if code:
        raise FailedError(code, f"opening trial {index} failed")
    if words := lead.plan.config.cluster.drop_caches:
        lines = lead.nodes.drop_caches(words.split(), check=lead.ending.check)
        (lead.run / run_files.caches(index)).write_text("".join(f"{line}\n" for line in lines))
    run_command(lead, plans.trial_commands(lead.plan)[index])
    lead.gain = True
    ask(lead, in_job.judge, trial=index)  # if it cannot, `close` will
    lead.ending.check()


def run_command(lead: Lead, command: Command) -> None:
    """Run a command on every rank of every node.

    Raises:
        FailedError: a rank failed, or its time was up.
        NodeLostError: a node is gone, which explains how the ranks ended.
    """
    with nodes_lead.started(lead.nodes, command, lead.run, port=master_port(lead.plan)) as ranks:
        while ranks.are_running():
            lead.ending.check()
    if ranks.lost is not None:
        raise ranks.lost
    try:
        ranks.check()
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr, flush=True)
        what = with_rule(error.rule, error.what) if error.rule in IN_STATUS else f"{command.name} failed"
        raise FailedError(ranks.exit_code, what) from None


def _settled(lead: Lead, why: str) -> str:
    """Return why the run is cut short, after a moment in which this node may be told to end as well."""
    until_s = time.monotonic() + SETTLE_S
    while lead.ending.why is None and time.monotonic() < until_s:
        time.sleep(0.1)
    return lead.ending.why or why


def leave(lead: Lead, why: str) -> int:
    """End before the work is done; whoever restarts runs starts it again, unless somebody wanted it to end."""
    print(f"{time.strftime('%F %T')} {why}", flush=True)
    if why == TIME_IS_NEAR and not lead.gain:
        return finish(lead, 1, f"{why}, and this start of the run has finished nothing")
    with suppress(OSError):  # for the ledger: the next attempt sets aside what this one left
        (lead.run / run_files.interrupted()).write_text(f"{why}\n")
    if why == STOPPED:
        (lead.run / run_files.RESERVE).unlink(missing_ok=True)
        rule, _, what = why.partition(": ")
        fix = f"python -m bench resume {lead.run} goes on with it"
        exit_code = 128 + lead.ending.signum
        status = Status(outcome=Outcome.interrupted, exit_code=exit_code, rule=rule, what=what, fix=fix)
        statuses.write(lead.run, status)
        return exit_code
    return START_AGAIN if lead.restarts else finish(lead, 1, why)


def finish(lead: Lead, exit_code: int, what: str) -> int:
    """Write the last word; nothing failed is not yet success, which the ledger must prove."""
    if shutil.disk_usage(lead.run).free <= LEAST_FREE_BYTES:
        what = with_rule("CFG-08", f"no space left for results: {what}")
    (lead.run / run_files.RESERVE).unlink(missing_ok=True)
    code = ask(lead, _close, exit_code=exit_code, what=what, trials=lead.trial_numbers)
    return exit_code or code


def _close(run: Path, plan: Plan, args: Namespace) -> int:
    """Write the last word, or say that it cannot be written."""
    try:
        return in_job.close(run, plan, args)
    except OSError as error:
        print(
            with_rule("CFG-08", f"{run_files.STATUS} cannot be written: {error.strerror}"), file=sys.stderr, flush=True
        )
        return 1
