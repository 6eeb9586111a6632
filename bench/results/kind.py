"""What a trial's log shows, whatever its kind: the protocol of its result, and the one table of kinds.

Nobody else asks for the class of a result: what differs by kind is chosen from `KINDS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bench.contract import mllog
from bench.contract.plan import Plan, Trial
from bench.contract.task import Kind
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks, reader
from bench.mlperf import result as results
from bench.mlperf.log import Log
from bench.mlperf.official import RULESETS, Verdict, official_verdict
from bench.mlperf.result import Result
from bench.results import generation, kernels, serving, training
from bench.results.imported import Summary
from bench.results.measurement import Measurement
from bench.rules.finding import errors


class KindResult(Protocol):
    """What the log of one trial shows."""

    @property
    def result(self) -> Result:
        """What every log says: times, seed, settings and findings."""

    @property
    def valid(self) -> bool:
        """Whether the log proves that the trial did what its task asks."""

    @property
    def problems(self) -> Sequence[str]:
        """What keeps the trial from being valid, besides the findings that every log may have."""

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """What the trial measured."""

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from a planned trial of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKind:
    """What the toolkit knows of one kind of task."""

    marker: str | None
    """The record that the logs of this kind have, and no others; None for training, whose logs have none of those."""
    read: Callable[[Log, Result], KindResult]
    """Reads what a log of this kind shows."""
    units: Mapping[str, str]
    """The names of its measurements, with their units."""
    shown_by: str
    """The module that turns its results into tables, pages and figures: a `bench.report.kind_report.KindReport`."""
    loads: Callable[[Any], list[Summary]] | None = None
    """The loads of a result, to be shown beside those of other load generators; None for kinds without loads."""
    has_referee: bool = False
    """Whether the official checker has rules for its logs."""


KINDS: Mapping[Kind, TaskKind] = {
    Kind.generate: TaskKind(
        marker=mllog.ANSWERS_ASKED,
        read=generation.read,
        units=generation.UNITS,
        shown_by="bench.report.generation",
    ),
    Kind.serve: TaskKind(
        marker=mllog.LOADS_ASKED,
        read=serving.read,
        units=serving.UNITS,
        shown_by="bench.report.serving",
        loads=serving.summaries,
    ),
    Kind.kernels: TaskKind(
        marker=mllog.KERNELS_ASKED,
        read=kernels.read,
        units={},
        shown_by="bench.report.kernels",
    ),
    Kind.train: TaskKind(
        marker=None,
        read=training.read,
        units=training.UNITS,
        shown_by="bench.report.training",
        has_referee=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The log of one trial, judged."""

    log: Log = field(repr=False)
    kind: Kind
    of_kind: KindResult
    verdicts: tuple[Verdict, ...] = ()
    """What the official checker says, by ruleset, where it was run."""
    differences: tuple[str, ...] = ()
    """From the planned trial, where it was compared with one."""

    @property
    def result(self) -> Result:
        return self.of_kind.result

    @property
    def valid(self) -> bool:
        """Whether the log proves that the trial did what its task asks, as it was planned."""
        passed = all(verdict.passed is not False for verdict in self.verdicts)
        return self.of_kind.valid and passed and not self.differences

    @property
    def problems(self) -> list[str]:
        """Everything that keeps the trial from being valid, but for its differences from the plan."""
        return [*(finding.titled for finding in errors(self.result.findings)), *self.of_kind.problems]


def kind_of(log: Log) -> Kind:
    """Return of which kind the task of a log is, as the log says."""
    marked = (
        kind for kind, known in KINDS.items() if known.marker is not None and log.single(known.marker) is not None
    )
    return next(marked, Kind.train)


def read(path: Path) -> Judged:
    """Return what a log proves, without the official checker.

    Raises:
        LogError: the log cannot be opened.
    """
    log = logs.read(path)
    return of_log(log, results.result(log, str(path), reader.system(path)))


def of_log(log: Log, result: Result) -> Judged:
    """Return what the records of a log prove; `result` is what they say of every trial."""
    kind = kind_of(log)
    return Judged(log=log, kind=kind, of_kind=KINDS[kind].read(log, result))


def refereed(judged: Judged, path: Path, rulesets: Sequence[str]) -> Judged:
    """Return a log with what the official checker says of it by some rulesets."""
    return replace(judged, verdicts=tuple(official_verdict(path, ruleset=ruleset) for ruleset in rulesets))


def judge(path: Path, plan: Plan | None = None, trial: Trial | None = None) -> Judged:
    """Return what a log proves, by us and by the official checker, and in what it differs from the planned trial.

    Raises:
        LogError: the log cannot be opened.
    """
    judged = read(path)
    if KINDS[judged.kind].has_referee and judged.result.has_target:  # it has no rules for runs without a target
        judged = refereed(judged, path, RULESETS)
    if plan is None or trial is None:
        return judged
    differing = [f"the log is of kind {judged.kind.name}, planned {plan.kind.name}"]
    if judged.kind is plan.kind:
        differing = judged.of_kind.differences(plan, trial)
    differing += [missing.titled for missing in provenance_checks.missing_attachments(judged.log)]
    return replace(judged, differences=tuple(differing))
