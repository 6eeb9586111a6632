"""Show what trials are worth: one result, a set of them, their score, and the package of a submission."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.mlperf.package import Package
from bench.mlperf.package.entry import Entry
from bench.mlperf.result import UNVERIFIED
from bench.mlperf.score import Score
from bench.mlperf.titles import title
from bench.mlperf.trial_set import name
from bench.report.tables import Row, TextTable
from bench.rules.finding import Finding

if TYPE_CHECKING:
    from bench.rules.finding import Finding


def score_sheets(scored: Score) -> list[TextTable]:
    """Return what each run adds, and what the set is worth or what keeps it from being a score."""
    hardware = "GPUs not logged" if scored.num_gpus is None else f"{scored.num_gpus} GPUs"
    caption = f"{UNVERIFIED} {hardware}, n = {_runs(scored)}, {scored.num_failed} failed"
    rows = [_score_row(scored), *map(_finding_row, scored.findings)]
    rows += [_olympic_row(scored), *(("not counted", "", why) for why in scored.dropped_reasons)]
    rows += [_factor_row(scored), _reference_row(scored), _score_samples_row(scored)]
    rows += (("checkers disagree", "", text) for text in scored.disagreements)
    runs = TextTable("runs", [_run_cells(scored, n) for n in range(scored.num_runs)], columns=_COLUMNS)
    return [runs, TextTable(title(scored.results[0]), [*rows, ("folder", scored.folder, "")], caption=caption)]


_COLUMNS = ("log", "minutes", "samples to target", "seed", "valid", "official")


def _run_cells(scored: Score, place: int) -> tuple[str, ...]:
    result, official = scored.results[place], scored.compliance[place]
    return (
        name(result),
        "" if result.minutes is None else f"{result.minutes:.3f}",
        "" if result.samples_to_target is None else f"{result.samples_to_target:,.0f}",
        "" if result.seed is None else str(result.seed),
        "yes" if result.valid else "no",
        {True: "passed", False: "failed", None: ""}[official.passed],
    )


def _finding_row(finding: Finding) -> Row:
    """Return what keeps a set from being a score; a warning does not, and says that it is one."""
    return finding.rule, "warning" if finding.severity == "warning" else "", finding.what


def _score_row(scored: Score) -> Row:
    what = f"score by ruleset {scored.ruleset} (min)"
    if scored.official_minutes is None:
        return what, "none", ""
    spread = "90 % interval {:.3f} to {:.3f}".format(*scored.interval_minutes) if scored.interval_minutes else ""
    return what, f"{scored.official_minutes:.3f}", spread


def _olympic_row(scored: Score) -> Row:
    required = f" of {scored.num_runs_required} that a score takes" if scored.num_runs_required else ""
    runs = f"{_runs(scored)}{required}"
    if scored.olympic_minutes is None:
        return "olympic mean (min)", "", f"{runs}, {scored.num_failed} failed: too few that count"
    return "olympic mean (min)", f"{scored.olympic_minutes:.3f}", runs


def _runs(scored: Score) -> str:
    return "1 run" if scored.num_runs == 1 else f"{scored.num_runs} runs"


def _factor_row(scored: Score) -> Row:
    return "RCP factor", "" if scored.rcp_factor is None else f"{scored.rcp_factor:.4f}", scored.rcp.message


def _reference_row(scored: Score) -> Row:
    ours, mean, least = scored.olympic_samples, scored.rcp_mean_samples, scored.rcp_min_samples
    value = "" if ours is None else f"{ours:,.1f}"
    if mean is None or least is None:
        return "samples, olympic mean", value, ""
    return "samples, olympic mean", value, f"reference {mean:,.1f}, accepted from {least:,.1f} on"


def _score_samples_row(scored: Score) -> Row:
    runs = ", ".join(f"{samples:,}: {count}" for samples, count in scored.samples_distribution.items())
    return "runs by samples to target", runs, "" if runs else "no run that counts says its samples"


def package_sheet(package: Package) -> TextTable:
    """Return what was written, what the official checkers say of it, and what a person must fill in."""
    rows: list[Row] = [_entry_row(entry, package.checked.scaling) for entry in package.entries]
    for checker, check in package.checked.checks.items():
        rows.append((f"official {checker} checker", "passed" if check.passed else "failed", ""))
        rows += ((f"official {checker} checker", "", message.splitlines()[0]) for message in check.messages)
    rows += ((finding.rule, finding.severity, finding.what) for finding in package.findings)
    rows += (("to fill in", file, ", ".join(fields)) for file, fields in package.todo.items())
    verdict = "every official checker passes" if package.passed else "not fit for submission"
    rows.append(("package", str(package.request.folder), verdict))
    title = f"submission of {package.request.org}, {package.division}, ruleset {package.ruleset}"
    return TextTable(title, rows, caption=UNVERIFIED)


def _entry_row(entry: Entry, scaling: Mapping[str, float]) -> Row:
    factor = scaling.get(f"results/{entry.system}/{entry.benchmark}/scaling.json")
    scaled = "" if factor is None else f"minutes are scaled by {factor:.7f}"
    return f"{entry.system}/{entry.benchmark}", f"{len(entry.results)} runs", scaled
