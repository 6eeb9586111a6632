"""One row of the fault matrix: the fault, the expected result and the actual result."""

import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fault_injection import Scene, of_job
from user import SHORT_RUN, Run, User, training, until

from bench.report.tables import TextTable
from helpers import answers

ONE_TRIAL = (*SHORT_RUN, "task.training.max_steps=100")
ONE_NODE = (*ONE_TRIAL, "cluster.num_nodes=1")
TWO_TRIALS = (*ONE_TRIAL, "trials=2")
ENDLESS = (*SHORT_RUN, "task.training.max_steps=20000")
IN_LOW = (*TWO_TRIALS, "cluster.slurm.partition=low")
ALERT = ("launch.stall.floor_s=10",)
"""The ranks' watchdog reports a stall early."""
PATIENT = ("launch.stall=null",)
"""No watchdog: the test stops the ranks itself."""
START_S = 900
"""How long a trial may take to start, on a machine that is busy."""
ANY_FAILURE = range(1, 256)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a run ended. Expected texts of attempts and evidence are regular expressions."""

    slurm: str
    """The state of the job."""
    outcome: str | None
    """status.json's; None where there is no status.json."""
    exit_code: int | range | None
    """status.json's. The first rank that Slurm sees end decides: a range in the table."""
    trials: tuple[str, ...]
    """The ledger's outcome of each trial."""
    attempts: tuple[str, ...]
    """Each attempt at the last trial that was begun: its outcome, and the cause if it was interrupted."""
    rule: str | None
    """The rule that `why` reports."""
    evidence: str = ""


ANY_RULE = "any rule"
"""The rule depends on timing and is not checked."""


def recovers(*causes: str, trials: int = 1) -> Answer:
    """Return the result of a run that completes although attempts were interrupted."""
    return Answer(
        slurm="COMPLETED",
        outcome="valid",
        exit_code=0,
        trials=("valid",) * trials,
        attempts=(*(f"interrupted: .*{cause}" for cause in causes), "valid"),
        rule=None,
    )


UNHARMED = recovers()
"""No attempt was interrupted."""


def fails(rule: str, evidence: str, *, trials: tuple[str, ...] = ("aborted",)) -> Answer:
    """Return the result of a run that fails in the last trial that it started."""
    begun = next(outcome for outcome in reversed(trials) if outcome != "planned")
    return Answer(
        slurm="FAILED",
        outcome="failed",
        exit_code=ANY_FAILURE,
        trials=trials,
        attempts=(begun,),
        rule=rule,
        evidence=evidence,
    )


def launched(user: User, overrides: Sequence[str]) -> Run:
    return user.launch(*overrides)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to break a run."""

    name: str
    inject: Callable[[Scene], object]
    answer: Answer
    overrides: tuple[str, ...] = ONE_TRIAL
    start: Callable[[User, Sequence[str]], Run] = launched
    trial: int | None = 0
    """The fault is injected once this trial trains; None: right after the launch."""
    alone: bool = False
    """The fault breaks nodes, partitions or Slurm itself, so no other run may be active."""
    in_gate: bool = False
    cannot: Callable[[User], str] = lambda user: ""
    """Why the fault is not possible here; empty if it is."""
    only_the_script_knows: bool = False
    """No log contains the cause: status.json itself is cited."""
    timeout_s: float = 1200


@dataclass(frozen=True, kw_only=True)
class Played:
    """The result of a row."""

    fault: Fault
    actual: Answer | None = None
    wrong: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped else "WRONG" if self.wrong else "right"


def play(user: User, fault: Fault) -> Played:
    """Start a run, inject the fault and return the result; `wrong` lists all differences and errors."""
    if reason := fault.cannot(user):
        return Played(fault=fault, skipped=reason)
    start, run = time.monotonic(), None
    try:
        run = fault.start(user, fault.overrides)
        if fault.trial is not None:
            trains = training(run, fault.trial)
            until(lambda: trains() or run.status, START_S, run)
            assert trains(), f"the run ended before trial {fault.trial} trained: {run.status}"
        kept = {log: log.read_bytes() for log in run.folder.glob("result_*.txt") if b"run_stop" in log.read_bytes()}
        fault.inject(Scene(user, run))
        state = user.cluster.wait_for_state(run.job, ENDED, fault.timeout_s)
        diagnosis = explained(user, run)
        actual = look(run, state, diagnosis)
        wrong = (
            *differences(fault.answer, actual),
            *leftovers(run, kept, fault),
            *ill_explained(run, fault, diagnosis),
        )
    except Exception as error:  # noqa: BLE001 - the other rows continue, and the table shows the error
        output = run.output() if run else ""
        return Played(
            fault=fault,
            wrong=(f"{error!r}\n{traceback.format_exc()}\n{output}",),
            seconds=time.monotonic() - start,
        )
    if wrong:
        wrong = (*wrong, f"status: {run.status}\n{run.output()}")
    return Played(fault=fault, actual=actual, wrong=wrong, seconds=time.monotonic() - start)


def look(run: Run, state: str, diagnosis: dict[str, Any]) -> Answer:
    """Return the actual result of a run that has ended."""
    ledger, status = run.readable_ledger, run.status
    begun = [entry["attempts"] for entry in ledger if entry.get("attempts")]
    return Answer(
        slurm=state,
        outcome=status.get("outcome"),
        exit_code=status.get("exit_code"),
        trials=tuple(entry["outcome"] for entry in ledger),
        attempts=tuple(
            ": ".join(filter(None, (one["outcome"], one.get("cause")))) for one in (begun[-1] if begun else ())
        ),
        rule=diagnosis.get("rule"),
        evidence=diagnosis.get("evidence") or "",
    )


def explained(user: User, run: Run) -> dict[str, Any]:
    """Return the output of `why`; empty if it prints none."""
    printed = user.types("why", run.folder, "--json", code=None).stdout
    return answers.one(printed) if printed else {}


def differences(expected: Answer, actual: Answer) -> list[str]:
    """Return where the actual result differs from the expected one."""
    wrong = []
    for name in (field.name for field in fields(Answer)):
        wanted, got = getattr(expected, name), getattr(actual, name)
        if name == "attempts":
            fits = len(wanted) == len(got) and all(re.match(a, b) for a, b in zip(wanted, got, strict=True))
        elif name == "evidence":
            fits = re.search(wanted, got) is not None
        else:
            fits = wanted == ANY_RULE or (got in wanted if isinstance(wanted, range) else wanted == got)
        if not fits:
            wrong.append(f"{name}: {got!r}, expected {wanted!r}")
    return wrong


def leftovers(run: Run, kept: dict[Path, bytes], fault: Fault) -> list[str]:
    """Return changed logs, wrong seeds and remaining processes, which no fault may cause."""
    wrong = [f"{log.name} has changed" for log, content in kept.items() if log.exists() and log.read_bytes() != content]
    for log in (*run.folder.glob("result_*.txt"), *run.folder.glob("attempts/*/result_*.txt")):
        starts, must_start = log.read_text().count('"run_start"'), log.parent == run.folder or fault.trial is not None
        if starts > 1 or starts == 0 and must_start and fault.answer.slurm == "COMPLETED":
            wrong.append(f"{log} begins {starts} times")
    seeds = [entry["seed"] for entry in run.readable_ledger]
    if seeds != [1, 2][: len(seeds)]:
        wrong.append(f"seeds are {seeds}")
    for _ in range(600):
        if not (alive := [words for _, words, _ in of_job(run.job)]):
            break
        time.sleep(0.1)
    wrong += [f"process left: {' '.join(words)[:200]}" for words in alive]
    return wrong


def ill_explained(run: Run, fault: Fault, diagnosis: dict[str, Any]) -> list[str]:
    """Return what is wrong with a diagnosis: it must cite an existing line, and not its own output."""
    wrong = []
    if run.status.get("outcome") == "failed" and run.status.get("rule") != diagnosis.get("rule"):
        wrong.append(f"the rule is {run.status.get('rule')} in status.json, {diagnosis.get('rule')} in `why`")
    if "runstop why" in (diagnosis.get("fix") or ""):
        wrong.append(f"the fix only repeats the command: {diagnosis['fix']}")
    if not diagnosis.get("evidence") or not diagnosis.get("file"):
        return wrong
    cited, evidence = Path(diagnosis["file"]), diagnosis["evidence"].partition(" (at ")[0]
    if cited.name == "status.json" and not fault.only_the_script_knows:
        wrong.append(f"cites status.json itself: {evidence}")
    if cited.suffix == ".out":  # of log records it prints a summary
        line = cited.read_text(errors="replace").splitlines()[diagnosis["line"] - 1]
        if evidence not in line:
            wrong.append(f"{cited.name}:{diagnosis['line']} is {line!r}, not {evidence!r}")
    return wrong


def in_home(user: User, fault: Fault) -> User:
    """Return the same user with a separate home for the row."""
    home = user.home / re.sub(r"\W+", "_", fault.name)
    home.mkdir()
    return replace(user, home=home)


def play_all(user: User, faults: Iterable[Fault], *, at_once: int = 3) -> Iterator[Played]:
    """Run the rows and yield each result: rows that break nodes or Slurm one by one, then the others concurrently."""
    chosen = list(faults)
    for fault in chosen:
        if fault.alone:
            yield play(in_home(user, fault), fault)
            user.cluster.clear()
    pool = ThreadPoolExecutor(at_once)
    together = [pool.submit(play, in_home(user, fault), fault) for fault in chosen if not fault.alone]
    try:
        yield from (done.result() for done in as_completed(together))
    finally:
        pool.shutdown(cancel_futures=True)


def shown_live(played: Iterable[Played]) -> Iterator[Played]:
    """Yield the rows and print the result of each as soon as it is known."""
    for one in played:
        print(f"{one.verdict:8} {one.seconds:4.0f} s  {one.fault.name}", *one.wrong, sep="\n    ", file=sys.stderr)
        yield one


def table(played: Sequence[Played]) -> TextTable:
    """Return the rows with expected and actual results."""
    rows = [
        (
            one.fault.name,
            shown(one.fault.answer),
            one.skipped or (shown(one.actual) if one.actual else "no answer"),
            one.verdict,
            f"{one.seconds:.0f}",
        )
        for one in played
    ]
    counts = Counter(one.verdict for one in played)
    caption = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "WRONG", "skipped"))
    caption += f"; {grade_of_why(played)}"
    return TextTable("faults", rows, ("fault", "expected", "actual", "verdict", "s"), caption)


def grade_of_why(played: Sequence[Played]) -> str:
    """Return precision and recall of `why` over the rows, as experiments/grade_why.py has them over composed logs."""
    pairs = [(one.fault.answer.rule, one.actual.rule) for one in played if one.actual is not None]
    pairs = [(expected, actual) for expected, actual in pairs if expected != ANY_RULE]
    num_right = sum(expected is not None and expected == actual for expected, actual in pairs)
    num_failed = sum(expected is not None for expected, _ in pairs)
    num_named = sum(actual is not None for _, actual in pairs)
    return f"why: precision {num_right} of {num_named} named, recall {num_right} of {num_failed}"


def shown(answer: Answer) -> str:
    """Return a result in one cell: Slurm's state, the status, the ledger, and the rule from `why`."""
    code = "> 0" if isinstance(answer.exit_code, range) else answer.exit_code
    status = f"{answer.outcome} {code}" if answer.outcome else "no status"
    ledger = ", ".join(answer.trials) or "no ledger"
    attempts = f" ({len(answer.attempts)} attempts)" if len(answer.attempts) > 1 else ""
    return f"{answer.slurm}; {status}; {ledger}{attempts}; {answer.rule or 'nothing failed'}"
