"""A check: its question, its subject (plan, script, the site's answers) and its outcome."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from bench.contract.plan import Plan
from bench.rules.finding import TIERS, Finding, Severity, Tier, broken, errors

__all__ = (
    "TIERS",
    "CannotTellError",
    "Check",
    "Checked",
    "Finding",
    "Severity",
    "Subject",
    "Tier",
    "broken",
    "errors",
    "run",
)


class CannotTellError(Exception):
    """A check has no source for its answer; the message names the missing one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command of the site said, and how it ended."""

    exit_code: int
    out: str
    err: str


@dataclass(frozen=True)
class Subject:
    """What is looked at: the plan, the script that it becomes, and what the site answers."""

    plan: Plan
    script: str
    """Empty where a run has none."""
    arguments: tuple[str, ...] = ()
    """What only goes onto the command line of the backend that takes the script."""
    answers: dict[str, Future[Answer]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `look` yields findings, and short texts about what it saw."""

    what: str
    rules: tuple[str, ...]
    look: Callable[[Subject], "Iterable[Finding | str]"]
    applies: Callable[[Plan], bool] = lambda plan: True


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check: what it saw and found, or why it could not decide."""

    what: str
    rules: tuple[str, ...]
    tier: Tier
    findings: tuple[Finding, ...] = ()
    seen: str = ""
    unknown: str = ""


def run(checks: Iterable[Check], subject: Subject, *, tier: Tier) -> list[Checked]:
    """Return the outcomes of the checks that apply to the plan."""
    return [_run(check, subject, tier) for check in checks if check.applies(subject.plan)]


def _run(check: Check, subject: Subject, tier: Tier) -> Checked:
    try:
        outcome = list(check.look(subject))
    except CannotTellError as reason:
        return Checked(check.what, check.rules, tier, unknown=str(reason))
    findings = tuple(replace(item, tier=tier) for item in outcome if isinstance(item, Finding))
    seen = "; ".join(item for item in outcome if isinstance(item, str))
    return Checked(check.what, check.rules, tier, findings, seen)
