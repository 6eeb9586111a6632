"""What a run found out about its nodes: checks that they passed, and that they were slow or failed."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.contract import mllog, node_lists, run_files
from bench.contract.node_facts import HEALTHY, Health
from bench.contract.plan import Plan, Trial
from bench.errors import BenchError, LogError
from bench.mlperf import reader
from bench.mlperf.log import number
from bench.mlperf.reader import Event
from bench.preflight.nodes import Facts, check_result, load
from bench.rules import RULES
from bench.runs import ledger, names
from bench.runs import status as statuses
from bench.runs.folder import plan_in
from bench.runs.ledger import Outcome
from bench.runs.status import Ending

OF_A_NODE = ("HW-01", "HW-02", "HW-04", "NCC-03", "SLU-09", "KUB-13", "RAY-04", "HST-06")
"""Rules of failures that a node causes; evidence of other rules may name a node that is only affected."""
_CHECKS, _FACTS = run_files.health("*"), run_files.facts("*")
"""Globs: of job arrays each task has its own, and launch.replace_slow keeps a check that found slow nodes."""
READ = (_CHECKS, run_files.STATUS, run_files.LEFT_OUT, _FACTS)
"""What is read besides the ledger, the plan and the logs, as globs."""
_SLOW_RANK = "RUN-26"
"""The rule of ranks that were slower than others in training."""
_ENDED_EARLY = (Ending.failed, Ending.interrupted)
_OF_THE_JOB = re.compile(r"\bCANCELLED AT\b")
"""Slurm's message about a whole job, which names its first node and not the one that failed."""
_USED_NEXT = "; the next attempt"
"""In a message of job.sh about a lost node: what comes before the names of the nodes that replace it."""
_LABEL, _RANK_FILE = re.compile(r" {0,6}(\d{1,6}): "), re.compile(r"_rank_(\d+)\.\w+$")


class VerdictKind(StrEnum):
    """What a run found out about a node. seen: the node only took part."""

    seen = "seen"
    passed = "passed"
    slow = "slow"
    failure = "failure"

    @property
    def is_bad(self) -> bool:
        return self in (VerdictKind.slow, VerdictKind.failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """One verdict on one node."""

    node: str
    backend: str
    kind: VerdictKind
    time_ms: int
    rule: str | None = None
    what: str = ""


def of_run(folder: Path) -> tuple[NodeVerdict, ...]:
    """Return the verdicts of a run folder; none for a run on this machine, or if its plan cannot be read."""
    plan = plan_in(folder)
    if plan is None or not plan.config.cluster.backend.is_elsewhere:
        return ()
    backend, facts = plan.config.cluster.backend.name, _facts(folder)
    reports = [report for path in sorted(folder.glob(_CHECKS)) if (report := check_result(path)) is not None]
    ranks = [rank for one in facts for rank in one.ranks]
    ended_ms = max((rank.time_ms for rank in ranks), default=int(names.launched_s(folder) * 1000))
    with suppress(OSError):
        ended_ms = max(ended_ms, int((folder / run_files.STATUS).stat().st_mtime * 1000))
    of_ranks = {rank.rank: rank.node for rank in ranks}
    seen = {rank.node: rank.time_ms for rank in ranks}
    verdicts = [NodeVerdict(node=node, backend=backend, kind=VerdictKind.seen, time_ms=ms) for node, ms in seen.items()]
    verdicts += [verdict for report in reports for verdict in _of_check(report, backend)]
    known = dict.fromkeys([*seen, *(node for report in reports for node in report.slow_nodes)])
    for rule, node, what in _failures(folder, known, of_ranks):
        verdicts.append(
            NodeVerdict(node=node, backend=backend, kind=VerdictKind.failure, time_ms=ended_ms, rule=rule, what=what)
        )
    return tuple(dict.fromkeys([*verdicts, *_slow_in_training(folder, plan, backend)]))


def _facts(folder: Path) -> list[Facts]:
    """Return the facts of a run; of a job array those of each task."""
    tasks = sorted(path.name.removeprefix(run_files.FACTS) for path in folder.glob(_FACTS))
    every = []
    for task in tasks:
        with suppress(BenchError):
            every.append(load(folder, array_task=task))
    return every


def _of_check(report: Health, backend: str) -> Iterator[NodeVerdict]:
    """Yield the verdicts of a node check. Only a check without any finding shows that a node is healthy."""
    for node in dict.fromkeys((*(each.node for each in report.nodes), *report.slow_nodes)):
        kind = VerdictKind.slow if node in report.slow_nodes else VerdictKind.seen
        if report.verdict == HEALTHY:
            kind = VerdictKind.passed
        about = [one for one in report.findings if _is_named(node, one.where) or _is_named(node, one.what)]
        first = about[0] if kind.is_bad and about else None
        yield NodeVerdict(
            node=node,
            backend=backend,
            kind=kind,
            time_ms=report.time_ms,
            rule=first.rule if first else None,
            what=first.what if first else "",
        )


def _slow_in_training(folder: Path, plan: Plan, backend: str) -> Iterator[NodeVerdict]:
    """Yield the nodes whose ranks were persistently slower than others, by the records of the logs of all attempts."""
    logs = [log for trial in plan.trials for log in (folder / trial.log, *_earlier_logs(folder, trial))]
    for log in logs:
        events: list[Event] = []
        with suppress(LogError):
            events, _ = reader.read(log)
        for event in events:
            about = event.metadata
            if event.key != mllog.SLOW_RANKS or not {"node", "cause"} <= about.keys():
                continue
            own_ms, usual_ms = number(about.get("own_ms")), number(about.get("usual_ms"))
            if own_ms is None or usual_ms is None:
                continue
            yield NodeVerdict(
                node=str(about["node"]),
                backend=backend,
                kind=VerdictKind.slow,
                time_ms=event.time_ms,
                rule=_SLOW_RANK,
                what=f"slow {about['cause']} during a trial: {own_ms:.4g} ms, others {usual_ms:.4g} ms",
            )


def _earlier_logs(folder: Path, trial: Trial) -> list[Path]:
    """Return the logs of interrupted attempts: one may have ended because a spare node replaced the slow one."""
    return sorted(folder.glob(f"{run_files.ATTEMPTS}/{trial.index}.*/{trial.log}"))


def _failures(folder: Path, nodes: Iterable[str], of_ranks: dict[int, str]) -> Iterator[tuple[str, str, str]]:
    """Yield rule, node and evidence of each failure that `why` blames on a node of the run."""
    from bench import diagnosis  # only if the history has changed
    from bench.diagnosis import log_scan

    status = statuses.read(folder)
    attempts = [attempt for entry in ledger.entries(folder) for attempt in entry.attempts]
    was_cut_short = any(attempt.outcome is Outcome.interrupted for attempt in attempts)
    clues: list[tuple[str | None, str, str]] = []
    if status is not None and status.outcome in _ENDED_EARLY:
        with suppress(BenchError):
            why = diagnosis.explain([folder])
            clues += [(why.rule, why.evidence or "", why.file or ""), *((c.rule, c.text, c.file) for c in why.also)]
    if was_cut_short:  # the run may have continued on other nodes, and succeeded
        for path in sorted(folder.glob(run_files.JOB_OUTPUTS)):
            clues += [(clue.rule, clue.text, clue.file) for clue in log_scan.scan(path).clues]
    for name, entry in node_lists.entries(folder).items():
        known, _, what = str(entry.get("why")).partition(": ")
        if known in OF_A_NODE:  # the node was lost during a trial, which continued on other nodes
            yield known, name, what
    for rule, text, file in dict.fromkeys(clues):
        if rule not in OF_A_NODE or _OF_THE_JOB.search(text):
            continue
        about = text.partition(_USED_NEXT)[0]
        accused = [node for node in nodes if _is_named(node, about)]
        rank = _RANK_FILE.search(file) or _LABEL.match(text)
        if not accused and rank is not None and int(rank[1]) in of_ranks:
            accused = [of_ranks[int(rank[1])]]
        for node in accused:
            yield rule, node, text


def _is_named(node: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", text) is not None


def title(rule: str | None) -> str:
    """Return what a rule means; an empty text without one."""
    return RULES[rule].title if rule in RULES else ""
