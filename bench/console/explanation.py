"""Show why a run failed."""

from bench.console.sheet import Sheet
from bench.diagnosis import Explanation
from bench.rules import RULES


def sheet(said: Explanation) -> Sheet:
    """Return the explanation as rows to print."""
    where = f"{said.file}:{said.line}" if said.file else ""
    rows = [
        ("rule", said.rule or "none", said.title),
        *([("evidence", said.evidence, where)] if said.evidence else []),
        *([("so far", said.detail, "")] if said.detail else []),
        *([("fix", said.fix, "")] if said.fix else []),
        *(("also", clue.rule, f"{RULES[clue.rule].title} ({clue.file}:{clue.line})") for clue in said.also),
        *(("line", line, "") for line in said.lines),
    ]
    return Sheet(said.run, rows)
