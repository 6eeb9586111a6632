"""What a check is, what it is about, and what comes of it."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

from bench.contract.plan import Plan
from bench.rules import RULES

Severity = Literal["error", "warning"]
Tier = Literal["laptop", "login", "canary", "nodes"]
TIERS: tuple[Tier, ...] = ("laptop", "login", "canary", "nodes")
"""Each includes those before it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule of `bench.rules` that is broken."""

    rule: str
    severity: Severity
    tier: Tier
    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} {self.rule}: {self.what} ({self.where}); {self.fix}"


class CannotTellError(Exception):
    """There is nobody to ask; the message says who should have answered."""


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
    """One question. `look` gives what is broken, and in a word or two what was seen."""

    what: str
    rules: tuple[str, ...]
    look: Callable[[Subject], "Iterable[Finding | str]"]
    applies: Callable[[Plan], bool] = lambda plan: True


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check: what was seen and found, or why it could not tell."""

    what: str
    rules: tuple[str, ...]
    tier: Tier
    findings: tuple[Finding, ...] = ()
    seen: str = ""
    unknown: str = ""


def broken(rule: str, what: str, where: str, *, fix: str | None = None, severity: Severity = "error") -> Finding:
    """Return the finding; the fix is the rule's where nothing more exact is known."""
    known = RULES[rule]
    return Finding(known.id, severity, TIERS[0], what, where, fix or known.fix)


def run(checks: Iterable[Check], subject: Subject, *, tier: Tier) -> list[Checked]:
    """Return what comes of the checks that apply to the plan."""
    return [_run(check, subject, tier) for check in checks if check.applies(subject.plan)]


def _run(check: Check, subject: Subject, tier: Tier) -> Checked:
    try:
        said = list(check.look(subject))
    except CannotTellError as reason:
        return Checked(check.what, check.rules, tier, unknown=str(reason))
    findings = tuple(replace(item, tier=tier) for item in said if isinstance(item, Finding))
    return Checked(check.what, check.rules, tier, findings, "; ".join(item for item in said if isinstance(item, str)))
