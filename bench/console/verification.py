"""Show what was checked of a run folder."""

import re
from collections.abc import Iterator

from bench.console.sheet import Sheet
from bench.rules.registry import RULES
from bench.runs.verification import Compared, Verification

_CHECKSUM = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
_COLUMNS = ("what", "expected", "found", "verified")


def sheet(verification: Verification) -> Sheet:
    """Return what was compared, what is wrong first; files of one folder that are as expected share a row."""
    failed = [each for each in verification.compared if each.passed is False]
    fine = [each for each in verification.compared if each.passed is not False]
    verdict = "not verified" if failed else "verified"
    rules = dict.fromkeys(each.rule for each in failed if each.rule)
    caption = "\n".join(f"{rule}: {RULES[rule].title}; {RULES[rule].fix}" for rule in rules)
    rows = [*map(_row, failed), *_rows(fine)]
    return Sheet(f"{verification.folder}: {verdict}", rows, _COLUMNS, caption=caption)


def _rows(fine: list[Compared]) -> Iterator[tuple[str, ...]]:
    folders: dict[str, int] = {}
    for each in fine:
        parent = each.what.rpartition("/")[0]
        if not parent or each.what.endswith("/"):
            yield _row(each)
        else:
            folders[parent] = folders.get(parent, 0) + 1
    for parent, count in folders.items():
        yield f"{parent}/", f"{count} file{'s' if count > 1 else ''}", "as expected", "yes"


def _row(each: Compared) -> tuple[str, ...]:
    what = f"{each.rule} {each.what}" if each.rule else each.what
    found = "as expected" if each.passed else _short(each.found)
    return what, _short(each.expected), found, {True: "yes", False: "no", None: ""}[each.passed]


def _short(text: str) -> str:
    """Return a text with its checksums cut to what one compares by eye."""
    return _CHECKSUM.sub(r"\1…", text)
