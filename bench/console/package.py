"""Show what was packed for a submission."""

from collections.abc import Mapping

from bench.console.sheet import Row, Sheet
from bench.mlperf.package import Package
from bench.mlperf.package.entry import Entry
from bench.mlperf.result import UNVERIFIED


def sheet(package: Package) -> Sheet:
    """Return what was written, what the official checkers say of it, and what a person must fill in."""
    rows: list[Row] = [_entry_row(entry, package.checked.scaling) for entry in package.entries]
    for name, check in package.checked.checks.items():
        rows.append((f"official {name} checker", "passed" if check.passed else "failed", ""))
        rows += ((f"official {name} checker", "", message.splitlines()[0]) for message in check.messages)
    rows += ((finding.rule, finding.severity, finding.what) for finding in package.findings)
    rows += (("to fill in", file, ", ".join(fields)) for file, fields in package.todo.items())
    verdict = "every official checker passes" if package.passed else "not fit for submission"
    rows.append(("package", str(package.request.folder), verdict))
    title = f"submission of {package.request.org}, {package.division}, ruleset {package.ruleset}"
    return Sheet(title, rows, caption=UNVERIFIED)


def _entry_row(entry: Entry, scaling: Mapping[str, float]) -> Row:
    factor = scaling.get(f"results/{entry.system}/{entry.benchmark}/scaling.json")
    scaled = "" if factor is None else f"minutes are scaled by {factor:.7f}"
    return f"{entry.system}/{entry.benchmark}", f"{len(entry.results)} runs", scaled
