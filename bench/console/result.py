"""Show what trials are worth: one result, a set of them, their score, and the package of a submission."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from bench.console.sheet import Row, Sheet
from bench.contract.modules import ModuleTimes
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.official import Verdict
from bench.mlperf.package import Package
from bench.mlperf.package.entry import Entry
from bench.mlperf.result import NO_TARGET, UNVERIFIED, Result, Span
from bench.mlperf.score import Score
from bench.mlperf.titles import title
from bench.mlperf.trial_set import name
from bench.report.compare import claim
from bench.report.sets import TrialSet
from bench.report.tables import TRAINING_ONLY, apart_rows, memory_row, minutes_text, telemetry_rows, value_text
from bench.report.throughput import RATIO, compared
from bench.results import modules
from bench.rules.finding import Finding

if TYPE_CHECKING:
    from bench.rules.finding import Finding


def verdict_sheet(result: Result, verdicts: Sequence[Verdict], *, more: Sequence[Row] = ()) -> Sheet:
    """Return what the trial is worth; a number that the log does not prove is blank, with the reason beside it."""
    rows = [_time_row(result), _valid_row(result)]
    rows += [] if not result.has_target else [_samples_row(result), _loss_row(result), _target_row(result)]
    rows += _untargeted_losses(result)
    rows += [_official_row(verdict, result.division) for verdict in verdicts]
    rows += [*speed_rows(result), _evaluation_row(result), _init_row(result)]
    rows += [_trial_row(number, trial) for number, trial in enumerate(result.trials)] if result.trials[1:] else []
    return Sheet(title(result), [*rows, *more], caption=f"{UNVERIFIED} n = 1 run")


def speed_rows(result: Result) -> list[Row]:
    """Return how fast a trial trained, and what it took of its GPUs as far as the log says."""
    rows = [_step_row(result), *_total_rows(result), _throughput_row(result), *_real_tokens_row(result)]
    rows += [] if result.tflop_per_sample is None else [_arithmetic_row(result)]
    rows += [] if result.peak_memory_gib is None and result.has_target else [memory_row(result.peak_memory_gib)]
    return [*rows, *apart_rows(result), *telemetry_rows(result.telemetry)]


def findings_sheet(findings: "Sequence[Finding]") -> Sheet:
    """Return where a log differs from that of a valid trial, worst first."""
    ordered = sorted(findings, key=lambda finding: finding.severity)
    rows = [(f.rule, f.severity, str(f.line or ""), f.what) for f in ordered]
    return Sheet("findings", rows, columns=("rule", "severity", "line", "what"))


def _time_row(result: Result) -> Row:
    name = "run_start → run_stop (min)"
    if result.minutes is not None:
        return name, f"{result.minutes:.2f}", "" if result.has_target else NO_TARGET
    clock = ("LOG-01", "LOG-02", "LOG-03", "LOG-04", "LOG-21")
    return name, "", next((f.what for f in result.findings if f.rule in clock), "")


def _valid_row(result: Result) -> Row:
    errors = [finding for finding in result.findings if finding.severity == "error"]
    why = "; ".join(f"{e.rule}{f' line {e.line}' if e.line else ''}: {e.what}" for e in errors[:3])
    return "valid trial", "yes" if result.valid else "no", why + (f"; {len(errors) - 3} more" if errors[3:] else "")


def _samples_row(result: Result) -> Row:
    if result.samples_to_target is not None:
        return "samples to target", f"{result.samples_to_target:,}", ""
    why = "no evaluation that reaches the target says its samples"
    return "samples to target", "", why if _target(result) else "the log names no target"


def _target(result: Result) -> str | None:
    """Return what is to be reached; several goals are always those of a benchmark."""
    if result.target is not None:
        return f"{result.target:g}"
    known = BENCHMARKS.get(result.benchmark or "")
    return " and ".join(map(str, known.goals)) if known else None


def _loss_row(result: Result) -> Row:
    goal = _target(result)
    target = f"target {goal}" if goal else "no target"
    if result.eval_final is None:
        return "final evaluation", "", f"none in the log; {target}"
    return "final evaluation", f"{result.eval_final:.4f}", target


def _target_row(result: Result) -> Row:
    if _target(result) is None:
        return "target reached", "", "the log names no target"
    return "target reached", "yes" if result.converged else "no", ""


def _step_row(result: Result) -> Row:
    name, s = "median step time (ms)", result.step_time_ms
    if s is None:
        return name, "", "the log does not time its steps"
    return name, f"{s.median:,.1f}", f"p10 {s.p10:,.1f}, p90 {s.p90:,.1f}, n = {s.count}"


def _total_rows(result: Result) -> list[Row]:
    """Return how long all steps took, and an epoch; no row for what the log does not list."""
    rows, epochs = [], result.epoch_times_s
    if result.steps_time_s is not None:
        name = f"time of {len(result.step_times_ms):,} steps (s)"
        rows.append((name, f"{result.steps_time_s:,.1f}", TRAINING_ONLY))
    if epochs:
        each = f"mean of {len(epochs)} epochs ({', '.join(f'{time_s:,.1f}' for time_s in epochs[:_MAX_EPOCHS])}"
        more = ", …); " if epochs[_MAX_EPOCHS:] else "); "
        of = each + more if epochs[1:] else ""
        rows.append(("time of an epoch (s)", f"{fmean(epochs):,.1f}", of + TRAINING_ONLY))
    return rows


_MAX_EPOCHS = 10


def _real_tokens_row(result: Result) -> list[Row]:
    """Return the speed without padding, where rows are padded."""
    share = result.real_token_share
    if share is None or share >= 1:
        return []
    rate = "" if result.real_tokens_s_gpu is None else f"{result.real_tokens_s_gpu:,.0f} tokens/s/GPU"
    return [("without padding", rate, f"{100 * share:.1f} % of all tokens are real")]


def _untargeted_losses(result: Result) -> list[Row]:
    """Return the losses at the end of a run; of random rows they mean nothing."""
    rows = []
    if result.train_loss is not None:
        rows.append(("last training loss", f"{result.train_loss:.4f}", ""))
    if not result.has_target and not result.has_random_rows and result.eval_final is not None:
        rows.append(("final evaluation", f"{result.eval_final:.4f}", "no target"))
    return rows


def _throughput_row(result: Result) -> Row:
    name, rate = "training throughput", result.throughput_samples_s
    if rate is None:
        return name, "", "the log does not time its samples"
    if result.tokens_s_gpu is None:
        unnamed = "sequence length" if result.num_gpus else "GPUs"
        why = "" if result.num_gpus else result.gpus_in_doubt
        return name, f"{rate:,.3f} samples/s", f"no tokens/s/GPU: {why or f'the log names no {unnamed}'}"
    return name, f"{rate:,.3f} samples/s", f"{result.tokens_s_gpu:,.0f} tokens/s/GPU on {result.num_gpus} GPUs"


def _arithmetic_row(result: Result) -> Row:
    name, work = "model arithmetic", f"{result.tflop_per_sample:,.4g} TFLOP a sample"
    if result.tflops_gpu is None:
        why = "the samples are not timed" if result.num_gpus else "not measured on GPUs"
        return name, "", f"{work}; no TFLOP/s: {why}"
    share = (
        "no MFU: the cluster names no peak rate"
        if result.mfu is None
        else f"MFU {100 * result.mfu:.1f} % {result.mfu_counts}"
    )
    return name, f"{result.tflops_gpu:,.1f} TFLOP/s/GPU", f"{share}; {work}"


def _evaluation_row(result: Result) -> Row:
    time = "" if result.eval_time_s is None else f"{result.eval_time_s:,.1f} s each"
    if not result.has_target:
        return "evaluations", f"{len(result.evaluations)}", time
    at = [f"{e.value:.4f} at {e.samples:,} samples" for e in result.evaluations if e.samples is not None]
    half = _MAX_EVALUATIONS // 2
    left_out = len(at) - 2 * half
    shown = at if len(at) <= _MAX_EVALUATIONS else [*at[:half], f"{left_out} more", *at[-half:]]
    return "evaluations", f"{len(result.evaluations)}", "; ".join(filter(None, (time, ", ".join(shown))))


_MAX_EVALUATIONS = 40
"""A log may hold thousands; more than these are counted, not listed."""


def _init_row(result: Result) -> Row:
    if result.init_s is None:
        return "initialisation (s)", "", "no init_start and init_stop"
    return "initialisation (s)", f"{result.init_s:,.1f}", "before the clock"


def settings_row(result: Result) -> Row:
    """Return what the log says of how the run was set up."""
    seed = {} if result.seed is None else {"seed": result.seed}
    settings = ", ".join(f"{key} {value}" for key, value in (seed | result.hyperparameters).items())
    return "settings", "", settings


def _trial_row(number: int, trial: Span) -> Row:
    time = "not finished" if trial.minutes is None else f"{trial.minutes:.2f} min, {trial.status}"
    seed = "" if trial.seed is None else f", seed {trial.seed}"
    return f"trial {number} of the log", time, f"lines {trial.first_line} to {trial.last_line}{seed}"


def _official_row(verdict: Verdict, division: str | None) -> Row:
    name = f"official rules {verdict.ruleset}, {division or 'no division'}"
    first = verdict.messages[0].splitlines()[0] if verdict.messages else ""
    more = f" ({len(verdict.messages) - 1} more)" if verdict.messages[1:] else ""
    return name, {True: "passed", False: "failed", None: ""}[verdict.passed], first + more


def modules_sheet(result: Result, times: ModuleTimes) -> Sheet:
    """Return one line per part, of the profile in a trial's log."""
    title = f"where the time of a step goes: {result.file}"
    caption = "\n".join(modules.notes(result, times))
    return Sheet(title, modules.lines(times), columns=modules.COLUMNS, caption=caption, num_optional=2)


def throughput_sheets(trials: TrialSet) -> list[Sheet]:
    """Return the speed of a set, and the published systems beside it, as tables."""
    speed = compared(trials)
    caption = f"{trials.hardware or 'hardware not logged'}, n = {speed.measured.num_runs}"
    own = Sheet(f"{trials.name}: throughput", speed.rows, caption=caption)
    if speed.no_peers:
        return [own, Sheet("published systems", [("not compared", "", speed.no_peers)])]
    rates = ("samples/s", "tokens/s/GPU", "TFLOP/s/GPU")
    columns = ("system", "batch", "mean step time (ms)", *rates, "official min", "ratio")
    cells = [
        (
            line.name,
            str(line.global_batch_size),
            f"{line.step_time_ms:,.0f}",
            f"{line.samples_s:.3f}",
            f"{line.tokens_s_gpu:,.0f}",
            value_text(line.tflops_gpu, "{:,.0f}"),
            value_text(line.official_minutes, "{:.2f}"),
            f"{line.ratio:.3f}",
        )
        for line in speed.lines
    ]
    title = f"beside published systems with {speed.measured.num_gpus} GPUs"
    return [own, Sheet(title, cells, columns=columns, caption=RATIO)]


def report_sheet(sets: Sequence[TrialSet], written: Path | None) -> Sheet:
    """Return one line per set for the terminal, and where the page is."""
    rows = []
    for trials in sets:
        claimed = claim(trials)
        minutes = "" if claimed.minutes is None else minutes_text(claimed.minutes)
        why = f"; no score: {claimed.why_no_score}" if claimed.why_no_score else ""
        runs = f"{claimed.num_valid} of {len(trials.results)}"
        rows.append((trials.name, trials.hardware or "not logged", runs, minutes, claimed.what + why))
    columns = ("set", "hardware", "valid runs", "minutes", "of what")
    return Sheet(str(written or "not written: -o OUT does"), rows, columns=columns, caption=UNVERIFIED)


def score_sheets(scored: Score) -> list[Sheet]:
    """Return what each run adds, and what the set is worth or what keeps it from being a score."""
    hardware = "GPUs not logged" if scored.num_gpus is None else f"{scored.num_gpus} GPUs"
    caption = f"{UNVERIFIED} {hardware}, n = {_runs(scored)}, {scored.num_failed} failed"
    rows = [_score_row(scored), *map(_finding_row, scored.findings)]
    rows += [_olympic_row(scored), *(("not counted", "", why) for why in scored.dropped_reasons)]
    rows += [_factor_row(scored), _reference_row(scored), _score_samples_row(scored)]
    rows += (("checkers disagree", "", text) for text in scored.disagreements)
    runs = Sheet("runs", [_run_cells(scored, n) for n in range(scored.num_runs)], columns=_COLUMNS)
    return [runs, Sheet(title(scored.results[0]), [*rows, ("folder", scored.folder, "")], caption=caption)]


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


def package_sheet(package: Package) -> Sheet:
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
    return Sheet(title, rows, caption=UNVERIFIED)


def _entry_row(entry: Entry, scaling: Mapping[str, float]) -> Row:
    factor = scaling.get(f"results/{entry.system}/{entry.benchmark}/scaling.json")
    scaled = "" if factor is None else f"minutes are scaled by {factor:.7f}"
    return f"{entry.system}/{entry.benchmark}", f"{len(entry.results)} runs", scaled
