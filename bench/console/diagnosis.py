"""Show the results of doctor, why, verify and rules."""

import difflib
import re
from collections.abc import Iterator, Sequence

from bench import preflight
from bench.diagnosis import Explanation
from bench.errors import ConfigError
from bench.planning import synonyms
from bench.preflight import Checked, Finding
from bench.report.tables import Row, TextTable
from bench.rules import RULES, Rule
from bench.runs.verification import Compared, Verification
from bench.texts import counted


def check_sheets(checked: Sequence[Checked]) -> list[TextTable]:
    """Return a tier's problems, if there are any, errors first, and the list of its checks."""
    findings = preflight.findings(checked)
    num_done = sum(not check.unknown for check in checked)
    counts = (
        [counted(num_done, "check"), counted(len(findings), "problem") if findings else "all passed"]
        if num_done
        else []
    )
    counts += [f"{len(checked) - num_done} not done"] if num_done < len(checked) else []
    title, rows = f"{checked[0].tier}: {', '.join(counts)}", [_check_row(check) for check in checked]
    if not findings:
        return [TextTable(title, rows)]
    return [findings_sheet(findings, title=title), TextTable(f"{checked[0].tier}: all checks", rows)]


def findings_sheet(findings: Sequence[Finding], *, title: str) -> TextTable:
    rows = [(f.rule, f.severity, f.what, f.where, f.fix) for f in findings]
    return TextTable(title, rows, ("rule", "severity", "what", "where", "fix"))


def _check_row(check: Checked) -> Row:
    """Return what was checked, the outcome, and the rules of the check."""
    verdict = "not checked" if check.unknown else "problem" if check.findings else "passed"
    rules = f"({', '.join(check.rules)})" if check.rules else ""
    return check.what, verdict, "  ".join(filter(None, (check.unknown or check.seen, rules)))


def explanation_sheet(explanation: Explanation) -> TextTable:
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
_COLUMNS = ("what", "expected", "actual", "verified")


def verification_sheet(verification: Verification) -> TextTable:
    """Return what was compared, mismatches first; files of one folder that are as expected share a row."""
    failed = [each for each in verification.compared if each.passed is False]
    passed = [each for each in verification.compared if each.passed is not False]
    verdict = "not verified" if failed else "verified"
    rules = dict.fromkeys(each.rule for each in failed if each.rule)
    caption = "\n".join(f"{rule}: {RULES[rule].title}; {RULES[rule].fix}" for rule in rules)
    rows = [*map(_compared_row, failed), *_compared_rows(passed)]
    return TextTable(f"{verification.folder}: {verdict}", rows, _COLUMNS, caption=caption)


def _compared_rows(passed: list[Compared]) -> Iterator[tuple[str, ...]]:
    folders: dict[str, int] = {}
    for each in passed:
        parent = each.what.rpartition("/")[0]
        if not parent or each.what.endswith("/"):
            yield _compared_row(each)
        else:
            folders[parent] = folders.get(parent, 0) + 1
    for parent, count in folders.items():
        yield f"{parent}/", f"{count} file{'s' if count > 1 else ''}", "as expected", "yes"


def _compared_row(each: Compared) -> tuple[str, ...]:
    what = f"{each.rule} {each.what}" if each.rule else each.what
    actual = "as expected" if each.passed else _short(each.actual)
    return what, _short(each.expected), actual, {True: "yes", False: "no", None: ""}[each.passed]


def _short(text: str) -> str:
    """Return a text with its checksums cut to 12 digits."""
    return _CHECKSUM.sub(r"\1…", text)


def named_rules(ids: Sequence[str]) -> list[Rule]:
    """Return the rules of these IDs, or all of them.

    Raises:
        ConfigError: an ID is unknown.
    """
    return [rule for id in ids for rule in _named(id)] or list(RULES.values())


_ID = re.compile(r"([A-Z]{2,4})-?(\d{0,2})")


def _named(text: str) -> list[Rule]:
    """Return the rule of an ID (PYX-05, pyx5), or all rules of a group (PYX)."""
    if written := _ID.fullmatch(text.upper()):
        start = f"{written[1]}-{written[2].zfill(2)}" if written[2] else f"{written[1]}-"
        if rules := [rule for id, rule in RULES.items() if id.startswith(start)]:
            return rules
    near = difflib.get_close_matches(text.upper(), RULES, n=3, cutoff=_ALIKE) or _about(text)
    fix = "run `runstop rules` to list all rules"
    if near:
        fix = f"did you mean {', '.join(near)}? If not, {fix}"
    raise ConfigError(f"unknown rule {text!r}", where="command line", fix=fix)


_ALIKE = 0.7
_SHOWN = 4
"""How many rules a suggestion lists."""


def _about(name: str) -> list[str]:
    """Return the IDs of rules whose title, else whose fix, has these words."""
    if not (words := synonyms.PROBLEMS.get(name.lower(), name.lower()).split()):
        return []
    titled = [id for id, rule in RULES.items() if all(text in rule.title.lower() for text in words)]
    fixed = [id for id, rule in RULES.items() if all(text in rule.fix.lower() for text in words)]
    return (titled or fixed)[:_SHOWN]


def rule_sheet(rule: Rule) -> TextTable:
    signs = [("recognized by", sign.pattern.decode(errors="replace"), "") for sign in rule.signs]
    return TextTable(rule.id, [("what", rule.title, ""), ("fix", rule.fix, ""), *signs])


def rules_sheet(rules: Sequence[Rule]) -> TextTable:
    rows = [(rule.id, rule.title) for rule in rules]
    return TextTable(
        "rules",
        rows,
        ("rule", "what is wrong"),
        f"to see how to fix a rule, such as {rules[0].id}: runstop rules {rules[0].id}",
    )
