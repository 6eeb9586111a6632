"""Show why a run failed."""

from bench.console.sheet import Sheet
from bench.diagnosis import Explanation
from bench.rules import RULES


def sheet(explanation: Explanation) -> Sheet:
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
    return Sheet(explanation.run, rows)
