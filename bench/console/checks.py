"""Show what the doctor checked and found."""

from collections.abc import Sequence

from bench import preflight
from bench.console.sheet import Row, Sheet
from bench.preflight import Checked, Finding


def sheets(checked: Sequence[Checked]) -> list[Sheet]:
    """Return a tier's findings, if there are any, errors first, and what was looked at."""
    found = preflight.findings(checked)
    num_made = sum(not check.unknown for check in checked)
    counts = [_count(num_made, "check"), _count(len(found), "finding") if found else "all fine"] if num_made else []
    counts += [f"{len(checked) - num_made} not made"] if num_made < len(checked) else []
    title, looked_at = f"{checked[0].tier}: {', '.join(counts)}", [_row(check) for check in checked]
    if not found:
        return [Sheet(title, looked_at)]
    return [findings_sheet(found, title=title), Sheet(f"{checked[0].tier}: what was checked", looked_at)]


def findings_sheet(found: Sequence[Finding], *, title: str) -> Sheet:
    """Return what is wrong with a plan, where, and what to do."""
    rows = [(f.rule, f.severity, f.what, f.where, f.fix) for f in found]
    return Sheet(title, rows, ("rule", "severity", "what", "where", "fix"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(check: Checked) -> Row:
    """Return what was checked, what came of it, and by which rules."""
    verdict = "not checked" if check.unknown else "found" if check.findings else "fine"
    rules = f"({', '.join(check.rules)})" if check.rules else ""
    return check.what, verdict, "  ".join(filter(None, (check.unknown or check.seen, rules)))
