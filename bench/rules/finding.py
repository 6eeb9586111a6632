"""A finding: one rule that is broken, in the one form in which every part of the toolkit reports it."""

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
"""How far the checks before a run look; each tier includes those before it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule of `bench.rules` that is broken."""

    rule: str
    """Its ID."""
    severity: Severity
    what: str
    """What is wrong here, in one line."""
    where: str
    """The key, path, node or part of a log that is at fault."""
    fix: str
    line: int | None = None
    """Where to look first, if the finding is about a file with lines."""
    tier: Tier | None = None
    """Which checks before a run found it."""

    def __str__(self) -> str:
        return f"{self.severity} {self.titled} ({self.where}); {self.fix}"

    @property
    def titled(self) -> str:
        """What is wrong, behind the ID of the rule."""
        return with_rule(self.rule, self.what)


def broken(
    rule: str, what: str, where: str, *, fix: str | None = None, severity: Severity = "error", line: int | None = None
) -> Finding:
    """Return the finding; its fix is the rule's own where the caller knows nothing more exact."""
    known = RULES[rule]
    what, where, fix = (masking.masked(text) for text in (what, where, fix or known.fix))
    return Finding(known.id, severity, what, where, fix, line)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are errors."""
    return [finding for finding in findings if finding.severity == "error"]
