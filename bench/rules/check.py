"""A check: its question, its subject (plan, script, output of the site's commands) and its outcome."""

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
    """A check lacks the information that it needs; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The output and the exit code of a command of the site, such as sinfo."""

    exit_code: int
    out: str
    err: str


@dataclass(frozen=True)
class Subject:
    """What the checks read: the plan, its script, and the output of the site's commands."""

    plan: Plan
    script: str
    """Empty for a run without a script."""
    arguments: tuple[str, ...] = ()
    """Arguments of the submit command (such as sbatch) that are not in the script."""
    answers: dict[str, Future[Answer]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """The overrides and options of the user's command line, for the commands in fixes; empty if they are not known."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `look` yields findings, and short texts about what it measured."""

    what: str
    rules: tuple[str, ...]
    look: Callable[[Subject], "Iterable[Finding | str]"]
    applies: Callable[[Plan], bool] = lambda plan: True


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check: its findings and what it measured, or why it could not decide."""

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
