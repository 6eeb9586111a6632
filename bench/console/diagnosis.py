"""Show what checks found: the doctor's, the explanation of a failure, what was verified, and the rules."""

import difflib
import re
from collections.abc import Iterator, Sequence

from bench import preflight
from bench.diagnosis import Explanation
from bench.errors import ConfigError
from bench.preflight import Checked, Finding
from bench.report.tables import Row, TextTable
from bench.rules import RULES, Rule
from bench.runs.verification import Compared, Verification


def check_sheets(checked: Sequence[Checked]) -> list[TextTable]:
    """Return a tier's findings, if there are any, errors first, and what was looked at."""
    found = preflight.findings(checked)
    num_made = sum(not check.unknown for check in checked)
    counts = [_count(num_made, "check"), _count(len(found), "finding") if found else "all fine"] if num_made else []
    counts += [f"{len(checked) - num_made} not made"] if num_made < len(checked) else []
    title, looked_at = f"{checked[0].tier}: {', '.join(counts)}", [_check_row(check) for check in checked]
    if not found:
        return [TextTable(title, looked_at)]
    return [findings_sheet(found, title=title), TextTable(f"{checked[0].tier}: what was checked", looked_at)]


def findings_sheet(found: Sequence[Finding], *, title: str) -> TextTable:
    """Return what is wrong with a plan, where, and what to do."""
    rows = [(f.rule, f.severity, f.what, f.where, f.fix) for f in found]
    return TextTable(title, rows, ("rule", "severity", "what", "where", "fix"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _check_row(check: Checked) -> Row:
    """Return what was checked, what came of it, and by which rules."""
    verdict = "not checked" if check.unknown else "found" if check.findings else "fine"
    rules = f"({', '.join(check.rules)})" if check.rules else ""
    return check.what, verdict, "  ".join(filter(None, (check.unknown or check.seen, rules)))


def explanation_sheet(explanation: Explanation) -> TextTable:
    """Return the explanation as rows to print."""
    where = f"{explanation.file}:{explanation.line}" if explanation.file else ""
    rows = [
        ("rule", explanation.rule or "none", explanation.title),
        *([("evidence", explanation.evidence, where)] if explanation.evidence else []),
        *([("so far", explanation.detail, "")] if explanation.detail else []),
        *([("fix", explanation.fix, "")] if explanation.fix else []),
        *(("also", clue.rule, f"{RULES[clue.rule].title} ({clue.file}:{clue.line})") for clue in explanation.also),
        *(("line", line, "") for line in explanation.lines),
    ]
    return TextTable(explanation.run, rows)


_CHECKSUM = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
_COLUMNS = ("what", "expected", "found", "verified")


def verification_sheet(verification: Verification) -> TextTable:
    """Return what was compared, what is wrong first; files of one folder that are as expected share a row."""
    failed = [each for each in verification.compared if each.passed is False]
    fine = [each for each in verification.compared if each.passed is not False]
    verdict = "not verified" if failed else "verified"
    rules = dict.fromkeys(each.rule for each in failed if each.rule)
    caption = "\n".join(f"{rule}: {RULES[rule].title}; {RULES[rule].fix}" for rule in rules)
    rows = [*map(_compared_row, failed), *_compared_rows(fine)]
    return TextTable(f"{verification.folder}: {verdict}", rows, _COLUMNS, caption=caption)


def _compared_rows(fine: list[Compared]) -> Iterator[tuple[str, ...]]:
    folders: dict[str, int] = {}
    for each in fine:
        parent = each.what.rpartition("/")[0]
        if not parent or each.what.endswith("/"):
            yield _compared_row(each)
        else:
            folders[parent] = folders.get(parent, 0) + 1
    for parent, count in folders.items():
        yield f"{parent}/", f"{count} file{'s' if count > 1 else ''}", "as expected", "yes"


def _compared_row(each: Compared) -> tuple[str, ...]:
    what = f"{each.rule} {each.what}" if each.rule else each.what
    found = "as expected" if each.passed else _short(each.found)
    return what, _short(each.expected), found, {True: "yes", False: "no", None: ""}[each.passed]


def _short(text: str) -> str:
    """Return a text with its checksums cut to what one compares by eye."""
    return _CHECKSUM.sub(r"\1…", text)


def named_rules(ids: Sequence[str]) -> list[Rule]:
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


def rule_sheet(rule: Rule) -> TextTable:
    """Return one rule."""
    signs = [("shows as", sign.pattern.decode(errors="replace"), "") for sign in rule.signs]
    return TextTable(rule.id, [("what", rule.title, ""), ("fix", rule.fix, ""), *signs])


def rules_sheet(rules: Sequence[Rule]) -> TextTable:
    """Return all rules, one line each."""
    rows = [(rule.id, rule.title) for rule in rules]
    return TextTable("rules", rows, ("rule", "what is wrong"), "python -m bench rules RULE says what to do")
