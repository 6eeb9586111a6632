"""Show what the doctor checked and found."""

from collections.abc import Sequence

from bench import preflight
from bench.console.sheet import Row, Sheet
from bench.preflight import Checked


def sheet(checked: Sequence[Checked]) -> Sheet:
    """Return a tier's sheet: findings, errors first, and below them what was looked at."""
    found = preflight.findings(checked)
    told = sum(not one.unknown for one in checked)
    counts = [_count(told, "check"), _count(len(found), "finding") if found else "all fine"] if told else []
    counts += [f"{len(checked) - told} not made"] if told < len(checked) else []
    title, lines = f"{checked[0].tier}: {', '.join(counts)}", [_row(one) for one in checked]
    if not found:
        return Sheet(title, lines)
    return Sheet(
        title,
        [(f.rule, f.severity, f.what, f.where, f.fix) for f in found],
        columns=("rule", "severity", "what", "where", "fix"),
        caption="\n".join(f"{name}: {verdict}  {more}".rstrip() for name, verdict, more in lines),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(one: Checked) -> Row:
    """Return what was checked, what came of it, and by which rules."""
    verdict = "not checked" if one.unknown else "found" if one.findings else "fine"
    rules = f"({', '.join(one.rules)})" if one.rules else ""
    return one.what, verdict, "  ".join(filter(None, (one.unknown or one.seen, rules)))
