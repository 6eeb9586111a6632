"""A finding: one broken rule. Every part of the toolkit reports problems in this form."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bench import masking
from bench.errors import with_rule
from bench.rules.registry import RULES

Severity = Literal["error", "warning"]
"""An error stops a launch, or makes a log, a set of trials or a package invalid; a warning stops nothing."""
Tier = Literal["laptop", "login", "canary", "nodes"]
TIERS: tuple[Tier, ...] = ("laptop", "login", "canary", "nodes")
"""Where the checks before a run get their information; each tier includes the tiers before it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule."""

    rule: str
    severity: Severity
    what: str
    """What is wrong, in one line."""
    where: str
    """The config key, path, node or part of a log with the problem."""
    fix: str
    line: int | None = None
    """The first line with the problem, if the problem is in a text file."""
    tier: Tier | None = None
    """The tier of the check that found the problem. None for a log, a score or a package."""

    def __str__(self) -> str:
        return f"{self.severity} {self.titled} ({self.where}); {self.fix}"

    @property
    def titled(self) -> str:
        """The rule's ID and what is wrong, as in `CFG-01: …`."""
        return with_rule(self.rule, self.what)


def broken(
    rule: str, what: str, where: str, *, fix: str | None = None, severity: Severity = "error", line: int | None = None
) -> Finding:
    """Return a finding, with secrets masked; without `fix` it gets the fix of the rule."""
    known = RULES[rule]
    what, where, fix = (masking.masked(text) for text in (what, where, fix or known.fix))
    return Finding(known.id, severity, what, where, fix, line)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]
