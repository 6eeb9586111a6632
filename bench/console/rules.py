"""Show the numbered rules: what is wrong, how it shows, what to do."""

import difflib
from collections.abc import Sequence

from bench.console.sheet import Sheet
from bench.errors import ConfigError
from bench.rules import RULES, Rule


def named(ids: Sequence[str]) -> list[Rule]:
    """Return the rules of these ids, or all of them.

    Raises:
        ConfigError: there is no such rule.
    """
    for id in ids:
        if id.upper() not in RULES:
            near = ", ".join(difflib.get_close_matches(id.upper(), RULES, n=3))
            fix = f"did you mean {near}? " if near else ""
            raise ConfigError(f"no rule {id!r}", where="command line", fix=f"{fix}python -m bench rules lists them all")
    return [RULES[id.upper()] for id in ids] or list(RULES.values())


def sheet(rule: Rule) -> Sheet:
    """Return one rule."""
    signs = [("shows as", sign.pattern.decode(errors="replace"), "") for sign in rule.signs]
    return Sheet(rule.id, [("what", rule.title, ""), ("fix", rule.fix, ""), *signs])


def list_sheet(rules: Sequence[Rule]) -> Sheet:
    """Return all rules, one line each."""
    rows = [(rule.id, rule.title) for rule in rules]
    return Sheet("rules", rows, ("rule", "what is wrong"), "python -m bench rules RULE says what to do")
