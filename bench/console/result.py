"""Show the score of a set of trials, and the package of a submission."""

from collections.abc import Mapping
from statistics import median

from bench.mlperf.package import Package
from bench.mlperf.package.entry import Entry
from bench.mlperf.published import systems
from bench.mlperf.result import UNVERIFIED
from bench.mlperf.score import Score
from bench.mlperf.titles import title
from bench.mlperf.trial_set import name
from bench.report.compare import rank
from bench.report.tables import Row, TextTable
from bench.rules.finding import Finding
from bench.texts import counted


def score_sheets(scored: Score) -> list[TextTable]:
    """Return a table of the runs, and one with the score or the reasons why there is none."""
    hardware = "GPU count not in the logs" if scored.num_gpus is None else f"{scored.num_gpus} GPUs"
    caption = f"{UNVERIFIED} {hardware}, n = {_runs(scored)}, {scored.num_failed} failed"
    rows = [_score_row(scored), *map(_finding_row, scored.findings)]
    rows += [_olympic_row(scored), *(("not counted", "", why) for why in scored.dropped_reasons)]
    rows += [_factor_row(scored), _reference_row(scored), _score_samples_row(scored), *_published_rows(scored)]
    rows += (("checkers disagree", "", text) for text in scored.disagreements)
    runs = TextTable("runs", [_run_cells(scored, n) for n in range(scored.num_runs)], columns=_COLUMNS)
    return [runs, TextTable(title(scored.results[0]), [*rows, ("folder", scored.folder, "")], caption=caption)]


_COLUMNS = ("log", "minutes", "samples to target", "seed", "valid", "MLPerf checker")


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
    """Return a problem of the set; only a warning shows its severity."""
    return finding.rule, "warning" if finding.severity == "warning" else "", finding.what


def _score_row(scored: Score) -> Row:
    what = f"score (min), ruleset {scored.ruleset}"
    if scored.official_minutes is None:
        return what, "none", ""
    spread = "90 % interval {:.3f} to {:.3f}".format(*scored.interval_minutes) if scored.interval_minutes else ""
    return what, f"{scored.official_minutes:.3f}", spread


def _olympic_row(scored: Score) -> Row:
    required = f" of {scored.num_runs_required} required" if scored.num_runs_required else ""
    runs = f"{_runs(scored)}{required}"
    if scored.olympic_minutes is None:
        return "olympic mean (min)", "", f"{runs}, {scored.num_failed} failed: too few counted runs"
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
    return "samples, olympic mean", value, f"reference {mean:,.1f}, accepted minimum {least:,.1f}"


def _score_samples_row(scored: Score) -> Row:
    runs = ", ".join(f"{samples:,}: {count}" for samples, count in scored.samples_distribution.items())
    return "runs by samples to target", runs, "" if runs else "no counted run logs its samples"


def _published_rows(scored: Score) -> list[Row]:
    """Return the published scores of the benchmark on as many GPUs; none for logs that are not a submission."""
    if scored.benchmark is None or scored.num_gpus is None or any(one.rule == "SCO-06" for one in scored.findings):
        return []
    peers = [one for one in systems(scored.benchmark) if one.num_gpus == scored.num_gpus and one.is_score]
    if not peers:
        return []
    best = min(peers, key=lambda one: one.official_minutes)
    middle = median(one.official_minutes for one in peers)
    ours = scored.official_minutes
    place = "" if ours is None else f"; this score would be number {rank(ours, peers)}"
    value = f"{best.official_minutes:.3f} best, {middle:.3f} median"
    return [(f"published (min), {scored.num_gpus} GPUs", value, f"{counted(len(peers), 'system')}; {best.name}{place}")]


def package_sheet(package: Package) -> TextTable:
    """Return what was written, the verdicts of the official checkers, and what the user must fill in."""
    rows: list[Row] = [_entry_row(entry, package.checked.scaling) for entry in package.entries]
    rows += ((folder, f"{energy_j / 1000:,.1f} kJ", _ENERGY) for folder, energy_j in package.energy_j.items())
    for checker, check in package.checked.checks.items():
        rows.append((f"MLPerf's {checker} checker", "passed" if check.passed else "failed", ""))
    for finding in package.findings:
        rows.append((finding.rule, finding.severity, f"{finding.what} ({finding.where}); {finding.fix}"))
    rows += (("to fill in", file, ", ".join(fields)) for file, fields in package.todo.items())
    verdict = "all official checkers passed" if package.passed else "cannot be submitted"
    rows.append(("package", str(package.request.folder), verdict))
    title = f"submission of {package.request.org}, {package.division}, ruleset {package.ruleset}"
    return TextTable(title, rows, caption=UNVERIFIED)


_ENERGY = "energy of a run, unscaled: mean of the runs that count in the score"


def _entry_row(entry: Entry, scaling: Mapping[str, float]) -> Row:
    factor = scaling.get(f"results/{entry.system}/{entry.benchmark}/scaling.json")
    scaled = "" if factor is None else f"minutes scaled by {factor:.7f}"
    return f"{entry.system}/{entry.benchmark}", counted(len(entry.results), "run"), scaled
