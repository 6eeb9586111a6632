"""The result of a trial of any kind: the protocol of results, and the table of kinds.

No other module checks the class of a result; what differs by kind is chosen from `KINDS`.
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
from bench.mlperf.official import Verdict, official_verdict, rulesets_of
from bench.mlperf.result import Result
from bench.results import generation, kernels, serving, training
from bench.results.imported import Summary
from bench.results.measurement import Distribution, Measurement
from bench.rules.finding import errors


class KindResult(Protocol):
    """The result of one trial, from its log."""

    @property
    def result(self) -> Result:
        """Times, seed, settings and findings, which every log has."""

    @property
    def valid(self) -> bool:
        """Whether the log shows that the trial completed its task."""

    @property
    def problems(self) -> Sequence[str]:
        """Why the trial is not valid, in addition to the findings of `result`."""

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The measurements of the trial."""

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from a planned trial of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKind:
    """How logs of one kind of task are read and shown."""

    marker: str | None
    """The record that identifies logs of this kind; None for training, whose logs have none of these records."""
    read: Callable[[Log, Result], KindResult]
    """Reads the result of a log of this kind."""
    units: Mapping[str, str]
    """The units of its measurements, by name."""
    shown_by: str
    """The module that turns its results into tables, pages and figures: a `bench.report.kind_report.KindReport`."""
    loads: Callable[[Any], list[Summary]] | None = None
    """Returns the loads of a result, to compare them with those of other load generators; None without loads."""
    distributions: Callable[[Any], list[Distribution]] | None = None
    """Returns the times of all requests of a result; None without requests."""
    has_official_rules: bool = False
    """Whether the official checker has rules for its logs."""


KINDS: Mapping[Kind, TaskKind] = {
    Kind.generate: TaskKind(
        marker=mllog.ANSWERS_REQUESTED,
        read=generation.read,
        units=generation.UNITS,
        shown_by="bench.report.generation",
    ),
    Kind.serve: TaskKind(
        marker=mllog.LOADS_REQUESTED,
        read=serving.read,
        units=serving.UNITS,
        shown_by="bench.report.serving",
        loads=serving.summaries,
        distributions=serving.distributions,
    ),
    Kind.kernels: TaskKind(
        marker=mllog.KERNELS_REQUESTED,
        read=kernels.read,
        units={},
        shown_by="bench.report.kernels",
    ),
    Kind.train: TaskKind(
        marker=None,
        read=training.read,
        units=training.UNITS,
        shown_by="bench.report.training",
        has_official_rules=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The judged log of one trial."""

    log: Log = field(repr=False)
    kind: Kind
    of_kind: KindResult
    verdicts: tuple[Verdict, ...] = ()
    """The verdicts of the official checker, by ruleset; empty if it was not run."""
    differences: tuple[str, ...] = ()
    """Differences from the planned trial; empty without a plan."""

    @property
    def result(self) -> Result:
        return self.of_kind.result

    @property
    def valid(self) -> bool:
        """Whether the log is valid, passes the official checker, and is that of the planned trial."""
        passed = all(verdict.passed is not False for verdict in self.verdicts)
        return self.of_kind.valid and passed and not self.differences

    @property
    def problems(self) -> list[str]:
        """Why the trial is not valid, without its differences from the plan."""
        return [*(finding.titled for finding in errors(self.result.findings)), *self.of_kind.problems]


def kind_of(log: Log) -> Kind:
    """Return the kind of the task of a log."""
    marked = (
        kind for kind, known in KINDS.items() if known.marker is not None and log.single(known.marker) is not None
    )
    return next(marked, Kind.train)


def read(path: Path) -> Judged:
    """Return the judged log, without the official checker.

    Raises:
        LogError: the log cannot be opened.
    """
    log = logs.read(path)
    return of_log(log, results.result(log, str(path), reader.system(path)))


def of_log(log: Log, result: Result) -> Judged:
    """Return the judged log; `result` is its part that is the same for all kinds."""
    kind = kind_of(log)
    return Judged(log=log, kind=kind, of_kind=KINDS[kind].read(log, result))


def with_official_verdicts(judged: Judged, path: Path, rulesets: Sequence[str]) -> Judged:
    """Return a judged log with the verdicts of the official checker by some rulesets."""
    return replace(judged, verdicts=tuple(official_verdict(path, ruleset=ruleset) for ruleset in rulesets))


def judge(path: Path, plan: Plan | None = None, trial: Trial | None = None) -> Judged:
    """Judge a log by our rules and the official checker, and compare it with the planned trial.

    Raises:
        LogError: the log cannot be opened.
    """
    judged = read(path)
    if KINDS[judged.kind].has_official_rules and judged.result.has_target:  # it has no rules for runs without a target
        judged = with_official_verdicts(judged, path, rulesets_of(judged.log))
    if plan is None or trial is None:
        return judged
    differing = [f"the log is of kind {judged.kind.name}, but the plan is of kind {plan.kind.name}"]
    if judged.kind is plan.kind:
        differing = judged.of_kind.differences(plan, trial)
    differing += [missing.titled for missing in provenance_checks.missing_attachments(judged.log)]
    return replace(judged, differences=tuple(differing))
