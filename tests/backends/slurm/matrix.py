"""One row of the fault matrix: what is broken, what must come out, and what came out."""

import json
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

from breaking import Scene, of_job
from user import SHORT, Run, User, training, until

from bench.report.tables import TextTable

ONE_TRIAL = (*SHORT, "task.training.max_steps=100")
ONE_NODE = (*ONE_TRIAL, "cluster.num_nodes=1")
TWO_TRIALS = (*ONE_TRIAL, "trials=2")
ENDLESS = (*SHORT, "task.training.max_steps=20000")
IN_LOW = (*TWO_TRIALS, "cluster.slurm.partition=low")
ALERT = ("launch.stall.floor_s=10",)
"""The watchdog of the ranks looks soon."""
PATIENT = ("launch.stall=null",)
"""It does not look: the ranks are held for another reason."""
START_S = 900
"""How long a trial may take to start, on a machine that is busy."""
ANY_FAILURE = range(1, 256)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a run ended. In the table, texts of attempts and evidence are regular expressions."""

    slurm: str
    """The state of the job."""
    outcome: str | None
    """status.json's; None where there is no status.json."""
    exit_code: int | range | None
    """status.json's. Of ranks that end each other, the one that Slurm hears of first decides: a range in the table."""
    trials: tuple[str, ...]
    """The ledger's outcome of each trial."""
    attempts: tuple[str, ...]
    """Each attempt at the last trial that was begun: its outcome, and the cause if it was cut short."""
    rule: str | None
    """What `why` says."""
    evidence: str = ""


NOT_ASKED = "not asked"
"""Of a rule: chance decides what is left to explain."""


def recovers(*causes: str, trials: int = 1) -> Answer:
    """Return the answer of a run that completes by itself, although attempts were cut short."""
    return Answer(
        slurm="COMPLETED",
        outcome="proven",
        exit_code=0,
        trials=("proven",) * trials,
        attempts=(*(f"interrupted: .*{cause}" for cause in causes), "proven"),
        rule=None,
    )


UNHARMED = recovers()
"""Nothing was cut short."""


def fails(rule: str, evidence: str, *, trials: tuple[str, ...] = ("aborted",)) -> Answer:
    """Return the answer of a run that fails in its last trial that was begun."""
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
    inflict: Callable[[Scene], object]
    answer: Answer
    overrides: tuple[str, ...] = ONE_TRIAL
    start: Callable[[User, Sequence[str]], Run] = launched
    trial: int | None = 0
    """It is broken once this trial trains; None: as soon as it was started."""
    alone: bool = False
    """It breaks nodes, partitions or Slurm itself: no other run may be there."""
    in_gate: bool = False
    cannot: Callable[[User], str] = lambda user: ""
    """Why it cannot be done here; empty if it can."""
    only_the_script_knows: bool = False
    """No log holds a line that says why: status.json itself is cited."""
    timeout_s: float = 1200


@dataclass(frozen=True, kw_only=True)
class Played:
    """A row that was played."""

    fault: Fault
    found: Answer | None = None
    wrong: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped else "WRONG" if self.wrong else "right"


def play(user: User, fault: Fault) -> Played:
    """Break a run and return what came of it; whatever goes wrong on the way is in `wrong`."""
    if reason := fault.cannot(user):
        return Played(fault=fault, skipped=reason)
    start, run = time.monotonic(), None
    try:
        run = fault.start(user, fault.overrides)
        if fault.trial is not None:
            until(training(run, fault.trial), START_S, run)
        kept = {log: log.read_bytes() for log in run.folder.glob("result_*.txt") if b"run_stop" in log.read_bytes()}
        fault.inflict(Scene(user, run))
        state = user.cluster.wait_for_state(run.job, ENDED, fault.timeout_s)
        said = explained(user, run)
        found = look(run, state, said)
        wrong = (*differences(fault.answer, found), *left_behind(run, kept, fault), *ill_explained(run, fault, said))
    except Exception as error:  # noqa: BLE001 - the other rows go on, and the table says what happened
        output = run.output() if run else ""
        return Played(
            fault=fault,
            wrong=(f"{error!r}\n{traceback.format_exc()}\n{output}",),
            seconds=time.monotonic() - start,
        )
    if wrong:
        wrong = (*wrong, f"status: {run.status}\n{run.output()}")
    return Played(fault=fault, found=found, wrong=wrong, seconds=time.monotonic() - start)


def look(run: Run, state: str, said: dict[str, Any]) -> Answer:
    """Return what one finds of a run that has ended."""
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
        rule=said.get("rule"),
        evidence=said.get("evidence") or "",
    )


def explained(user: User, run: Run) -> dict[str, Any]:
    """Return what `why` says; nothing where no log is left to ask about."""
    printed = user.types("why", run.folder, "--json", code=None).stdout
    return dict(json.loads(printed)) if printed else {}


def differences(expected: Answer, found: Answer) -> list[str]:
    """Return what is not as it must be."""
    wrong = []
    for name in (field.name for field in fields(Answer)):
        want, got = getattr(expected, name), getattr(found, name)
        if name == "attempts":
            fits = len(want) == len(got) and all(re.match(a, b) for a, b in zip(want, got, strict=True))
        elif name == "evidence":
            fits = re.search(want, got) is not None
        else:
            fits = want == NOT_ASKED or (got in want if isinstance(want, range) else want == got)
        if not fits:
            wrong.append(f"{name}: {got!r}, not {want!r}")
    return wrong


def left_behind(run: Run, kept: dict[Path, bytes], fault: Fault) -> list[str]:
    """Return what no run may leave behind, whatever was done to it."""
    wrong = [f"{log.name} has changed" for log, content in kept.items() if log.exists() and log.read_bytes() != content]
    for log in (*run.folder.glob("result_*.txt"), *run.folder.glob("attempts/*/result_*.txt")):
        if (starts := log.read_text().count('"run_start"')) > 1 or starts == 0 and fault.answer.slurm == "COMPLETED":
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


def ill_explained(run: Run, fault: Fault, said: dict[str, Any]) -> list[str]:
    """Return what is wrong with an explanation: it must cite a line that stands where it says, and never itself."""
    wrong = []
    if run.status.get("outcome") == "failed" and run.status.get("rule") != said.get("rule"):
        wrong.append(f"status.json says {run.status.get('rule')}, and why {said.get('rule')}")
    if "bench why" in (said.get("fix") or ""):
        wrong.append(f"the fix is to ask again: {said['fix']}")
    if not said.get("evidence") or not said.get("file"):
        return wrong
    cited, evidence = Path(said["file"]), said["evidence"].partition(" (at ")[0]
    if cited.name == "status.json" and not fault.only_the_script_knows:
        wrong.append(f"cites status.json itself: {evidence}")
    if cited.suffix == ".out":  # of records it says what they amount to
        line = cited.read_text(errors="replace").splitlines()[said["line"] - 1]
        if evidence not in line:
            wrong.append(f"{cited.name}:{said['line']} is {line!r}, not {evidence!r}")
    return wrong


def in_home(user: User, fault: Fault) -> User:
    """Return the same user with a home of the row's own."""
    home = user.home / re.sub(r"\W+", "_", fault.name)
    home.mkdir()
    return replace(user, home=home)


def play_all(user: User, faults: Iterable[Fault], *, at_once: int = 3) -> Iterator[Played]:
    """Yield each row once it was played: those that break nodes or Slurm alone, then the others side by side."""
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
    """Yield the rows, and say of each how it went as soon as that is known."""
    for one in played:
        print(f"{one.verdict:8} {one.seconds:4.0f} s  {one.fault.name}", *one.wrong, sep="\n    ", file=sys.stderr)
        yield one


def table(played: Sequence[Played]) -> TextTable:
    """Return the rows with what must come out, what came out, and whether that is right."""
    rows = [
        (
            one.fault.name,
            shown(one.fault.answer),
            one.skipped or (shown(one.found) if one.found else "no answer"),
            one.verdict,
            f"{one.seconds:.0f}",
        )
        for one in played
    ]
    counts = Counter(one.verdict for one in played)
    caption = ", ".join(f"{counts[word]} {word}" for word in ("right", "WRONG", "skipped"))
    return TextTable("faults", rows, ("fault", "expected", "found", "verdict", "s"), caption)


def shown(answer: Answer) -> str:
    """Return an answer in one cell: Slurm's state, the status, the ledger, and what `why` says."""
    code = "> 0" if isinstance(answer.exit_code, range) else answer.exit_code
    status = f"{answer.outcome} {code}" if answer.outcome else "no status"
    ledger = ", ".join(answer.trials) or "no ledger"
    attempts = f" ({len(answer.attempts)} attempts)" if len(answer.attempts) > 1 else ""
    return f"{answer.slurm}; {status}; {ledger}{attempts}; {answer.rule or 'nothing failed'}"
