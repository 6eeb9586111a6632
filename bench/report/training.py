"""Show training tasks: results of trials, and sets of trials; `training_plan` shows their plans."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import report
from bench.contract import run_files
from bench.contract.modules import ModuleTimes
from bench.contract.plan_kinds import TrainingPlan
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.official import Verdict
from bench.mlperf.result import NO_TARGET, UNVERIFIED, Result, Span
from bench.mlperf.titles import title
from bench.report import costs, figures, sets
from bench.report.compare import claim
from bench.report.kinds import KindReport, ShownTrial
from bench.report.sets import TrialSet
from bench.report.tables import (
    TRAINING_ONLY,
    Row,
    TextTable,
    findings_table,
    local_sgd_rows,
    memory_row,
    minutes_text,
    telemetry_rows,
    value_text,
)
from bench.report.throughput import RATIO, compared
from bench.report.training_plan import plan_rows
from bench.results import modules
from bench.results.training import TrainingResult
from bench.texts import counted


def verdict_table(result: Result, verdicts: Sequence[Verdict], *, more: Sequence[Row] = ()) -> TextTable:
    """Return the verdict and measurements of a trial; a number that the log does not have is blank with its reason."""
    rows = [_time_row(result), _valid_row(result)]
    rows += [] if not result.has_target else [_samples_row(result), _loss_row(result), _target_row(result)]
    rows += _untargeted_losses(result)
    rows += _program_rows(result)
    rows += [_official_row(verdict, result.division) for verdict in verdicts]
    rows += [*speed_rows(result), _evaluation_row(result), _init_row(result)]
    rows += costs.result_rows(TrainingResult(result=result).measurements)
    rows += [_trial_row(number, trial) for number, trial in enumerate(result.trials)] if result.trials[1:] else []
    return TextTable(title(result), [*rows, *more], caption=f"{UNVERIFIED} n = 1 run")


def speed_rows(result: Result) -> list[Row]:
    """Return speed, memory and GPU telemetry of a trial, as far as the log has them."""
    rows = [_step_row(result), *_total_rows(result), _throughput_row(result), *_real_tokens_row(result)]
    rows += [] if result.tflop_per_sample is None else [_arithmetic_row(result)]
    rows += [] if result.peak_memory_gib is None and result.has_target else [memory_row(result.peak_memory_gib)]
    return [*rows, *local_sgd_rows(result), *telemetry_rows(result.telemetry)]


def _time_row(result: Result) -> Row:
    name = "run_start → run_stop (min)"
    if result.minutes is not None:
        notes = [] if result.has_target else [NO_TARGET]
        notes += [] if result.resumed_samples is None else ["from run_start of the first attempt, lost time included"]
        return name, f"{result.minutes:.2f}", "; ".join(notes)
    timing_rules = ("LOG-01", "LOG-02", "LOG-03", "LOG-04", "LOG-21")
    return name, "", next((f.what for f in result.findings if f.rule in timing_rules), "")


def _valid_row(result: Result) -> Row:
    errors = [finding for finding in result.findings if finding.severity == "error"]
    why = "; ".join(f"{e.rule}{f' line {e.line}' if e.line else ''}: {e.what}" for e in errors[:3])
    return "valid trial", "yes" if result.valid else "no", why + (f"; {len(errors) - 3} more" if errors[3:] else "")


def _samples_row(result: Result) -> Row:
    if result.samples_to_target is not None:
        return "samples to target", f"{result.samples_to_target:,}", ""
    why = "no evaluation that reaches the target logs its samples"
    return "samples to target", "", why if _target(result) else "no target in the log"


def _target(result: Result) -> str | None:
    """Return the target of the evaluation; several targets are those of a benchmark."""
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
        return "target reached", "", "no target in the log"
    return "target reached", "yes" if result.converged else "no", ""


def _step_row(result: Result) -> Row:
    name, s = "median step time (ms)", result.step_time_ms
    if s is None:
        return name, "", "no step times in the log"
    return name, f"{s.median:,.1f}", f"p10 {s.p10:,.1f}, p90 {s.p90:,.1f}, n = {s.count}"


def _total_rows(result: Result) -> list[Row]:
    """Return the time of all steps and of an epoch, if the log has them."""
    rows, epochs = [], result.epoch_times_s
    if result.steps_time_s is not None:
        name = f"time of {len(result.step_times_ms):,} steps (s)"
        rows.append((name, f"{result.steps_time_s:,.1f}", TRAINING_ONLY))
    if epochs:
        each = f"mean of {len(epochs)} epochs ({', '.join(f'{time_s:,.1f}' for time_s in epochs[:_MAX_EPOCHS])}"
        more = ", …); " if epochs[_MAX_EPOCHS:] else "); "
        remark = each + more if epochs[1:] else ""
        rows.append(("time per epoch (s)", f"{fmean(epochs):,.1f}", remark + TRAINING_ONLY))
    return rows


_MAX_EPOCHS = 10


def _real_tokens_row(result: Result) -> list[Row]:
    """Return the throughput without padding tokens, if there is padding."""
    share = result.real_token_share
    if share is None or share >= 1:
        return []
    rate = "" if result.real_tokens_s_gpu is None else f"{result.real_tokens_s_gpu:,.0f} tokens/s/GPU"
    return [("without padding", rate, f"{100 * share:.1f} % of all tokens are not padding")]


def _untargeted_losses(result: Result) -> list[Row]:
    """Return the losses at the end of a run; losses on random data are left out."""
    rows = []
    if result.train_loss is not None:
        rows.append(("last training loss", f"{result.train_loss:.4f}", ""))
    if not result.has_target and not result.has_random_rows and result.eval_final is not None:
        rows.append(("final evaluation", f"{result.eval_final:.4f}", "no target"))
    return rows


def _program_rows(result: Result) -> list[Row]:
    """Return which numbers are the word of a user's program, and where its times contradict the runner's clock."""
    names = {"LOG-24": "by the program", "LOG-25": "contradiction"}
    return [(names[finding.rule], finding.titled, "") for finding in result.findings if finding.rule in names]


def _throughput_row(result: Result) -> Row:
    name, rate = "training throughput", result.throughput_samples_s
    if rate is None:
        return name, "", "no sample times in the log"
    if result.tokens_s_gpu is None:
        missing = "sequence length" if result.num_gpus else "GPU count"
        why = "" if result.num_gpus else result.gpu_count_conflict
        return name, f"{rate:,.3f} samples/s", f"no tokens/s/GPU: {why or f'{missing} not in the log'}"
    return (
        name,
        f"{rate:,.3f} samples/s",
        f"{result.tokens_s_gpu:,.0f} tokens/s/GPU on {counted(result.num_gpus or 0, 'GPU')}",
    )


def _arithmetic_row(result: Result) -> Row:
    name, work = "model FLOPs", f"{result.tflop_per_sample:,.4g} TFLOP per sample"
    if result.tflops_gpu is None:
        why = "no sample times" if result.num_gpus else "not measured on GPUs"
        return name, "", f"{work}; no TFLOP/s: {why}"
    share = (
        "no MFU: the cluster has no peak rate of its GPUs"
        if result.mfu is None
        else f"MFU {100 * result.mfu:.1f} % {result.mfu_counts}"
    )
    return name, f"{result.tflops_gpu:,.1f} TFLOP/s/GPU", f"{share}; {work}"


def _evaluation_row(result: Result) -> Row:
    time = "" if result.eval_time_s is None else f"{result.eval_time_s:,.1f} s each"
    if result.evaluation_share is not None:
        time += f", {100 * result.evaluation_share:.1f} % of run_start → run_stop"
    if not result.has_target:
        return "evaluations", f"{len(result.evaluations)}", time
    at = [f"{e.value:.4f} at {e.samples:,} samples" for e in result.evaluations if e.samples is not None]
    half = _MAX_EVALUATIONS // 2
    left_out = len(at) - 2 * half
    shown = at if len(at) <= _MAX_EVALUATIONS else [*at[:half], f"{left_out} more", *at[-half:]]
    return "evaluations", f"{len(result.evaluations)}", "; ".join(filter(None, (time, ", ".join(shown))))


_MAX_EVALUATIONS = 40
"""A log may have thousands of evaluations; the ones in between are counted, not listed."""


def _init_row(result: Result) -> Row:
    if result.init_s is None:
        return "initialisation (s)", "", "no init_start and init_stop"
    return "initialisation (s)", f"{result.init_s:,.1f}", "not timed"


def settings_row(result: Result) -> Row:
    """Return the settings in the log."""
    seed = {} if result.seed is None else {"seed": result.seed}
    settings = ", ".join(f"{key} {value}" for key, value in (seed | result.hyperparameters).items())
    return "settings", "", settings


def _trial_row(number: int, trial: Span) -> Row:
    time = "not finished" if trial.minutes is None else f"{trial.minutes:.2f} min, {trial.status}"
    seed = "" if trial.seed is None else f", seed {trial.seed}"
    return f"trial {number} of the log", time, f"lines {trial.first_line} to {trial.last_line}{seed}"


def _official_row(verdict: Verdict, division: str | None) -> Row:
    name = f"MLPerf checker {verdict.ruleset}, {division or 'no'} division"
    first = verdict.messages[0].splitlines()[0] if verdict.messages else ""
    more = f" ({len(verdict.messages) - 1} more)" if verdict.messages[1:] else ""
    return name, {True: "passed", False: "failed", None: ""}[verdict.passed], first + more


def modules_table(result: Result, times: ModuleTimes) -> TextTable:
    """Return the profile in a trial's log, one row per part."""
    title = f"step time breakdown: {result.file}"
    caption = "\n".join(modules.notes(result, times))
    return TextTable(title, modules.lines(times), columns=modules.columns(times), caption=caption, num_optional=2)


def throughput_tables(trials: TrialSet) -> list[TextTable]:
    """Return the throughput of a set, and its comparison with published systems."""
    speed = compared(trials)
    caption = f"{trials.hardware or 'hardware not logged'}, n = {speed.measured.num_runs}"
    own = TextTable(f"{trials.name}: throughput", speed.rows, caption=caption)
    if speed.no_peers:
        return [own, TextTable("published systems", [("not compared", "", speed.no_peers)])]
    rates = ("samples/s", "tokens/s/GPU", "TFLOP/s/GPU")
    columns = ("system", "batch", "mean step time (ms)", *rates, "official minutes", "ratio")
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
    title = f"published systems with {speed.measured.num_gpus} GPUs"
    return [own, TextTable(title, cells, columns=columns, caption=RATIO)]


def sets_table(sets: Sequence[TrialSet], written: Path | None) -> TextTable:
    """Return one row per set; the title says how to write a page if none was written."""
    rows = []
    for trials in sets:
        claimed = claim(trials)
        minutes = "" if claimed.minutes is None else minutes_text(claimed.minutes)
        why = f"; no score: {claimed.why_no_score}" if claimed.why_no_score else ""
        runs = f"{claimed.num_valid} of {len(trials.results)}"
        rows.append((trials.name, trials.hardware or "not logged", runs, minutes, claimed.what + why))
    columns = ("set", "hardware", "valid runs", "minutes", "based on")
    title = "results" if written else "results (to write a page: -o FOLDER)"
    return TextTable(title, rows, columns=columns, caption=UNVERIFIED)


@dataclass(frozen=True, slots=True)
class SetsReport:
    """Sets of trials compared with each other, with their scores or their throughput."""

    sets: Sequence[TrialSet]

    @property
    def valid(self) -> bool:
        return all(claim(trials).num_valid for trials in self.sets)

    def tables(self, page: Path | None) -> Iterator[TextTable]:
        yield sets_table(self.sets, page)
        for trials in self.sets:
            yield from () if trials.has_target else throughput_tables(trials)
        for result in (result for trials in self.sets for result in trials.results):
            if result.module_times is not None:
                yield modules_table(result, result.module_times)

    def rows(self) -> Iterable[Mapping[str, Any]]:
        return report.trial_rows(self.sets)

    def csv_text(self) -> str:
        return report.csv(self.sets)

    def write(self, out: Path, *, title: str | None) -> Path:
        return report.write(self.sets, out, title=title)


class TrainingReport(KindReport[TrainingPlan, TrainingResult]):
    """Shows training tasks."""

    work = "train"

    def plan_rows(self, plan: TrainingPlan) -> list[tuple[str, str]]:
        return plan_rows(plan)

    def tables(self, trial: ShownTrial[TrainingResult], *, more: Sequence[Row] = ()) -> list[TextTable]:
        return [verdict_table(trial.judged.result, trial.judged.verdicts, more=more)]

    def detail_tables(self, trial: ShownTrial[TrainingResult]) -> list[TextTable]:
        result = trial.judged.result
        modules_of_step = [] if result.module_times is None else [modules_table(result, result.module_times)]
        return [*modules_of_step, *([findings_table(result.findings)] if result.findings else [])]

    def parse_rows(self, trial: ShownTrial[TrainingResult]) -> list[Row]:
        return [settings_row(trial.judged.result), ("log", trial.name, "")]

    def files(self, folder: Path, trial: int, result: TrainingResult) -> list[Row]:
        """Draw the loss, except for random data."""
        if result.result.has_random_rows:
            return []
        path = folder / run_files.loss_figure(trial)
        figures.loss_figure(result.result, path)
        return [("figure", str(path), "")]

    def load(self, paths: Sequence[Path], *, num_gpus: int | None) -> SetsReport:
        return SetsReport(sets.load(paths, num_gpus=num_gpus))

    def next_step(self, plan: TrainingPlan, folder: str) -> str:
        if not plan.config.training.has_target:
            return f"to compare with published systems: runstop report {folder}"
        return f"to see the score of all trials: runstop score {folder}" if plan.trials[1:] else ""


REPORT = TrainingReport()
