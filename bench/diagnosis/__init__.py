"""Diagnose a run that failed, was stopped or hangs: the broken rule, the log line that shows it, and the fix.

Clues come from the reports of our own ranks, the signs in all logs and the MLPerf records. The clue that explains most
wins: a cause wins over its consequences. A failure without a clue is unknown.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench import backends
from bench.backends.protocol import KeepsOutput
from bench.contract import mllog, run_files
from bench.contract.plan import Plan
from bench.diagnosis import fixes, flight_recorder, log_scan, run_reports, trial_state
from bench.diagnosis.log_scan import Clue, Scan
from bench.errors import BenchError, ConfigError, LogError
from bench.mlperf import log as logs
from bench.mlperf import result as results
from bench.mlperf.reader import Event
from bench.mlperf.result import Result
from bench.results import kind
from bench.rules import RULES
from bench.rules import finding as findings
from bench.rules.signs import Weight
from bench.runs import names
from bench.runs import run as run_folders
from bench.runs.folder import named, plan_in

_NAMED = re.compile(r"([\w.-]+\.(?:txt|out|err)): (.*)", re.DOTALL)


@contextmanager
def printed_files(folder: Path) -> Iterator[list[Path]]:
    """Yield the output of a run's job as files, if its backend keeps it and answers; else an empty list."""
    texts: dict[str, list[str]] = defaultdict(list)
    with suppress(BenchError):
        run = run_folders.find(folder)
        backend = backends.get(run.backend)
        if run.jobs and not run.why_not_queried and isinstance(backend, KeepsOutput):
            for process, text in backend.output(run.id).items():
                for line in text.splitlines(keepends=True):
                    named = _NAMED.match(line)
                    texts[named[1] if named else f"{process}.out"].append(named[2] if named else line)
    with tempfile.TemporaryDirectory(prefix="runstop-printed-") as scratch:
        paths = [Path(scratch, name) for name in sorted(texts)]
        for path in paths:
            path.write_text("".join(texts[path.name]))
        yield paths


UNKNOWN = "unknown"
LOGS = ("*.txt", "*.out", "*.err", "*.log")
_VAGUE = ("RUN-02", "RUN-04", "RUN-07", "RUN-10", "RUN-13", "NCC-07", "LOG-05")
"""Rules that do not name the cause: the last lines of the logs are shown with them."""
_HANGS = ("RUN-02", "RUN-04", "RUN-07", "RUN-17", "NCC-06", "NCC-07", "SLU-07")
"""Rules of runs that may have hung: for these, the flight records of the ranks are cited."""
_ENDINGS = ("RUN-07", "LOG-05")
"""Rules that only report that a run ended; they are not listed together with another rule."""
_TOO_OFTEN = re.compile(r"was started \d+ times and (?:interrupted|cut short) each time")
"""The last message of a job whose trial `bench.runs.ledger` does not restart."""
_MAX_LINES = 12
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one run failed, was stopped or hangs."""

    run: str
    rule: str | None
    """The id of the rule in `bench.rules`, or `unknown`; None if nothing failed."""
    title: str
    evidence: str | None = None
    file: str | None = None
    line: int | None = None
    detail: str | None = None
    """How far the trial got, by its MLPerf records."""
    fix: str | None = None
    also: tuple[Clue, ...] = ()
    """Other rules that match, mostly consequences."""
    lines: tuple[str, ...] = ()
    """The most informative log lines, if the rule does not name the cause."""


@dataclass(frozen=True, slots=True)
class _Log:
    """One file: its signs, and its result if it has MLPerf records."""

    scan: Scan
    events: Sequence[Event] = ()
    result: Result | None = None
    is_running: bool = False
    problems: Sequence[Clue] = ()
    """Requested work of kernels, generation or serving that is missing from a log with status success."""

    @property
    def is_fine(self) -> bool:
        """Whether the log has exactly one trial, which succeeded, did all requested work and reached its target."""
        r = self.result
        if r is None or r.status != mllog.SUCCESS or len(r.trials) != 1:
            return False
        return not self.problems and (r.target is None or r.converged)

    def judged(self) -> Iterable[Clue]:
        """Return the problems that the MLPerf records show."""
        if self.result is None or self.problems:
            return self.problems
        return trial_state.judge(self.result, self.events, is_running=self.is_running)

    def slow(self) -> list[Clue]:
        """Return the ranks that were slower than the others, for a run that did not fail."""
        seen = [] if self.result is None else [f for f in self.result.findings if f.rule == "RUN-26"]
        return [Clue(f.rule, Weight.HINT, self.result.file if self.result else "", f.line or 1, f.what) for f in seen]

    def errors(self) -> Iterable[Clue]:
        """Return the errors of the log itself; the log of the preparation has no trial, and no run_start either."""
        file = self.result.file if self.result else ""
        problems = self.result.findings if self.result and Path(file).name != run_files.PREPARE_LOG else ()
        return (Clue(f.rule, Weight.OUTCOME, file, f.line or 1, f.what) for f in findings.errors(problems))


def runs(paths: Sequence[Path]) -> list[list[Path]]:
    """Group paths by run: each folder is one run, and all files together are one run.

    Raises:
        ConfigError: a file does not exist, or a folder has no logs.
    """
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise names.missing(path, files=True)
        if path.is_dir() and not _files(path) and not run_reports.status(path) and not _was_submitted(path):
            fix = f"give a run folder, or a folder that contains logs ({', '.join(LOGS)})"
            raise ConfigError("the folder has no logs", where=str(path), fix=fix)
    files = [path for path in paths if not path.is_dir()]
    return [*([path] for path in paths if path.is_dir()), *([files] if files else [])]


def explain(paths: Sequence[Path], *, ask: bool = False) -> Explanation:
    """Diagnose the run that wrote these files, or this one folder.

    With `ask`, also query the backend of the run's job: some know why a job waits or has failed.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = paths[0] if paths[0].is_dir() else None
    name = str(folder) if folder else ", ".join(map(str, paths))
    status, plan = (run_reports.status(folder), plan_in(folder)) if folder else ({}, None)
    reported = [_Log(scan) for scan in run_reports.all_reports(folder)] if folder else []
    reported += [_Log(scan) for scan in _queue_report(folder)] if folder and ask else []
    is_over = bool(status) or (folder is not None and _is_gone(folder))
    seen_here = _files(folder) if folder else paths
    with printed_files(folder) if folder and ask and not seen_here else nullcontext(seen_here) as paths:
        logs = [_read(path, is_over=is_over, is_log=plan is None or path.suffix == ".txt") for path in paths]
    if status.get("outcome") in ("valid", "passed") or not (reported or status) and _all_fine(logs, plan):
        return _nothing(name, logs, "no failure: the run succeeded")
    bad = [*reported, *sorted((log for log in logs if not log.is_fine), key=_moment)]
    clues = [clue for log in bad for clue in (*log.scan.clues[:1], *log.judged())]
    if folder and status.get("outcome") == "invalid":
        clues += [clue for log in logs for clue in log.errors()]
        clues += run_reports.invalid_trials(folder)
    clues = [fixes.of_this_run(clue, plan) for clue in clues]
    best = max(clues, key=lambda clue: clue.weight, default=None)  # the first of equal weights
    if any(log.is_running for log in bad) and (best is None or best.weight is Weight.HINT):
        return _nothing(name, bad, "no failure: the run is still running")
    seen = [*clues, *(clue for log in bad for clue in log.scan.clues[1:])]
    if best is not None:
        best, seen = _first_cause(best, seen, bad)
        best = _cite_log_line(best, seen)
    seen += [clue for log in bad for clue in log.slow()]
    explanation = _explanation(name, best, seen, bad, plan)
    if folder is not None and (best is None or best.rule in _HANGS) and (cited := flight_recorder.cited(folder)):
        explanation = replace(explanation, detail="; ".join(filter(None, (explanation.detail, cited))))
    return _with_resume_hint(explanation, folder)


def _with_resume_hint(explanation: Explanation, folder: Path | None) -> Explanation:
    """Name the run in the commands of the fix, and add how to resume from the last checkpoint, if the run has one."""
    if folder is None:
        return explanation
    explanation = replace(explanation, fix=named(explanation.fix or "", folder) or None)
    hint = fixes.resume_hint(folder)
    if hint is None or "runstop resume" in (explanation.fix or ""):
        return explanation
    return replace(explanation, fix=f"{explanation.fix}; {hint}")


def _first_cause(best: Clue, seen: list[Clue], logs: Iterable[_Log]) -> tuple[Clue, list[Clue]]:
    """Return the best clue and all clues; for a job that was cut short too often, the cause of the first time."""
    earlier = [clue for log in logs for clue in log.scan.earlier if clue.weight > Weight.HINT]
    if not _TOO_OFTEN.search(best.text) or not earlier:
        return best, seen
    return replace(earlier[0], fix=best.fix), [*earlier, *seen]


def _cite_log_line(best: Clue, seen: Iterable[Clue]) -> Clue:
    """Return the best clue; instead of status.json, cite a log line that shows the same rule, if there is one."""
    if Path(best.file).name != run_files.STATUS:
        return best
    shown = next((clue for clue in seen if clue.rule == best.rule and Path(clue.file).name != run_files.STATUS), best)
    return replace(shown, weight=best.weight, fix=best.fix)


def _explanation(
    name: str, best: Clue | None, seen: Sequence[Clue], bad: Sequence[_Log], plan: Plan | None
) -> Explanation:
    lines = tuple(dict.fromkeys(line for log in bad for line in log.scan.lines))[:_MAX_LINES]
    trials = [log for log in bad if log.result and log.result.trials]
    trial = trials[-1] if trials else None
    if best is None:
        title = "unknown failure: no log line matches a known problem"
        fix = "read the lines below, and the lines around them in the logs"
        if not lines and not any(log.scan.has_records for log in bad):
            title = "the log is empty: the program wrote nothing to it"
            fix = "check whether the program started: read its standard error and the output of the batch job; "
            fix += "under Slurm also run `sacct -j JOB`"
        return Explanation(run=name, rule=UNKNOWN, title=title, detail=_detail(trial), fix=fix, lines=lines)
    return Explanation(
        run=name,
        rule=best.rule,
        title=RULES[best.rule].title,
        evidence=best.text,
        file=best.file,
        line=best.line,
        detail=_detail(trial),
        fix=_fix(best, trial, plan),
        also=_others(seen, best.rule),
        lines=lines if best.rule in _VAGUE or best.weight is Weight.HINT else (),
    )


def _nothing(name: str, logs: Sequence[_Log], title: str) -> Explanation:
    """Return that nothing failed, and which ranks were slow, if any."""
    running = [log for log in logs if log.is_running]
    seen = [clue for log in logs for clue in (*(() if running else log.errors()), *log.scan.clues)]
    detail = _detail(running[-1]) if running else None
    slow = [clue for log in logs for clue in log.slow()]
    if not slow:
        return Explanation(run=name, rule=None, title=title, detail=detail, also=_others(seen, ""))
    return Explanation(
        run=name,
        rule=None,
        title=f"{title}; {RULES['RUN-26'].title}",
        evidence="; ".join(dict.fromkeys(clue.text for clue in slow)),
        file=slow[0].file,
        line=slow[0].line,
        detail=detail,
        fix=RULES["RUN-26"].fix,
        also=_others(seen, ""),
    )


def _others(seen: Iterable[Clue], rule: str) -> tuple[Clue, ...]:
    """Return the first clue of each rule except `rule`."""
    first: dict[str, Clue] = {}
    for clue in seen:
        first.setdefault(clue.rule, clue)
    return tuple(clue for name, clue in first.items() if name not in (rule, *_ENDINGS))


def _detail(log: _Log | None) -> str | None:
    if log is None or log.result is None or log.problems:
        return None
    return fixes.how_far(fixes.reached(log.events, log.result), log.result)


def _fix(best: Clue, trial: _Log | None, plan: Plan | None) -> str:
    """Return the fix, with numbers if the plan and the records have them."""
    if best.rule == "SLU-07" and trial and (hung := fixes.hung(trial.events, best.text, plan)):
        return hung
    if best.rule in ("RUN-02", "RUN-04") and fixes.BUS_ERROR.search(best.text):
        return fixes.MAPPED_FILE
    if best.fix:
        return best.fix
    better = None
    if best.rule == "RUN-01" and plan is not None:
        better = fixes.less_memory(plan)
    if best.rule == "SLU-07" and trial and trial.result:
        better = fixes.enough_time(fixes.reached(trial.events, trial.result), trial.result, plan)
    return f"{better}. Otherwise: {RULES[best.rule].fix}" if better else RULES[best.rule].fix


def _all_fine(logs: Sequence[_Log], plan: Plan | None) -> bool:
    """Return whether every planned trial has a log and every trial succeeded."""
    trials = [log.result for log in logs if log.result and log.result.trials]
    planned = {trial.log for trial in plan.trials} if plan else set()
    complete = planned <= {Path(result.file).name for result in trials}
    return bool(trials) and complete and all(log.is_fine for log in logs if log.result and log.result.trials)


def _read(path: Path, *, is_over: bool, is_log: bool) -> _Log:
    """Read one file. A program may print records: these are no log, but its runner's log has them, and more keys."""
    try:
        scan = log_scan.scan(path)
        if not scan.has_records or not is_log:
            return _Log(scan)
        log = logs.read(path)
        result = results.result(log, str(path), {})
        is_running = not is_over and result.run_stop_ms is None and trial_state.is_fresh(path, log.events)
    except (OSError, LogError) as error:
        raise ConfigError(
            f"the log cannot be read: {error}",
            where=str(path),
            fix="give this user read permission for the log, or remove the log from the command",
        ) from error
    problems = kind.of_log(log, result).of_kind.problems if result.status == mllog.SUCCESS else ()
    problem_clues = tuple(trial_state.problem_clues(problems, str(path)))
    return _Log(scan, log.events, result, is_running, problem_clues)


def _files(folder: Path) -> list[Path]:
    """Return the logs of a run folder, the trials' logs first."""
    logs = [
        path for place in (folder, folder / run_files.RANK_LOGS) for name in LOGS for path in sorted(place.glob(name))
    ]
    notes = set(
        folder.glob(run_files.interrupted("*"))
    )  # written by the batch script for the ledger; its output has more
    return [path for path in logs if path.is_file() and path not in notes]


def _moment(log: _Log) -> str:
    """Return the time stamp of the first clue as a sort key; logs without one come last."""
    stamp = _STAMP.search(log.scan.clues[0].text) if log.scan.clues else None
    return stamp[0].replace(" ", "T") if stamp else "~"


def _was_submitted(folder: Path) -> bool:
    return (folder / run_files.JOB).exists()


def _queue_report(folder: Path) -> list[Scan]:
    """Return the state of a run's job as its backend reports it; nothing if the backend does not answer."""
    if not _was_submitted(folder):
        return []
    with suppress(BenchError):
        return run_reports.queue_report(run_folders.find(folder).state, str(folder / run_files.JOB))
    return []


def _is_gone(folder: Path) -> bool:
    """Return whether the job of a run without a final status has left the queue, even if its log is new."""
    with suppress(BenchError):
        return run_folders.find(folder).has_died
    return False
