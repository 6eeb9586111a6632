"""Print the answers of `--json`: convert results to the classes of `bench.answers.schema`, one line for each.

A verb that is about several things (runs, logs, rules) prints one line for each of them; every other verb prints one
line. No line is an array, and every line has the field `schema`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from bench import masked_json
from bench.answers import schema
from bench.contract import codec

if TYPE_CHECKING:
    from bench.contract.cluster import Gpu
    from bench.contract.plan import Plan
    from bench.diagnosis import Explanation
    from bench.fetch.download import Planned
    from bench.fetch.record import Record as FetchRecord
    from bench.history.compare import Compared
    from bench.history.nodes import NodeHistory
    from bench.history.regression import HistoryRun, Judgement, TaskHistory
    from bench.images.importer import Imported
    from bench.images.store import Entry as StoredImage
    from bench.images.store import Record
    from bench.mlperf.package import Package
    from bench.mlperf.result import Span
    from bench.mlperf.results_repository import Entry
    from bench.mlperf.score import Score
    from bench.planning.layouts import Layout
    from bench.prediction.scale import Scaling
    from bench.preflight import Checked
    from bench.results import imported
    from bench.results.comparison import Comparison
    from bench.results.kind import Judged
    from bench.results.study import PlannedArm, StudyResult
    from bench.results.tuning import Tried, Tuning
    from bench.rules.finding import Finding
    from bench.rules.registry import Rule
    from bench.runs.goodput import Goodput
    from bench.runs.run import Run
    from bench.runs.summary import Summary
    from bench.runs.verification import Verification
    from bench.watch.lines import View

S = TypeVar("S", bound=msgspec.Struct)


def show(*answers: msgspec.Struct) -> None:
    """Print answers, one line for each."""
    for answer in answers:
        print(line(answer), flush=True)


def line(answer: msgspec.Struct) -> str:
    """Return an answer as one line of strict JSON with secrets masked."""
    return masked_json.line(msgspec.to_builtins(answer, enc_hook=str))


def utc(time_ms: float | None) -> str | None:
    """Return a time such as 2026-11-22T07:53:04Z; None for one outside the range of datetime."""
    try:
        return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return None


def _of(answer: type[S], /, *sources: object, **given: Any) -> S:
    """Return an answer whose other fields are attributes with the same names, of the first source that has one."""
    *first, last = sources
    others = [name for name in answer.__struct_fields__ if name not in given]
    same = {name: getattr(next((one for one in first if hasattr(one, name)), last), name) for name in others}
    return answer(**given, **same)


def run(run: "Run", results: "Summary", *, reason: str, outcomes: Sequence[str]) -> schema.Run:
    return _of(
        schema.Run,
        results.tags,
        results,
        run=str(run.folder),
        jobs=tuple(run.jobs),
        state=run.state_name,
        job_state=run.state and run.state.native_state,
        is_active=run.is_active,
        reason=reason,
        outcomes=tuple(map(str, outcomes)),
        exit_code=run.status and run.status.exit_code,
        rule=run.status and run.status.rule,
        started=None if results.started_s is None else utc(results.started_s * 1000),
        time_to_train_min=results.minutes,
    )


def verdict(file: Path, judged: "Judged", *, loads: Sequence[Mapping[str, str]] | None = None) -> schema.TrialVerdict:
    """Return the verdict on a log; only a serving task has loads."""
    from bench.results.kind import KINDS

    result = judged.result
    return _of(
        schema.TrialVerdict,
        result,
        file=str(file),
        kind=judged.kind.name,
        valid=judged.of_kind.valid,
        problems=tuple(judged.problems),
        measurements=judged.of_kind.measurements,
        official=judged.verdicts if KINDS[judged.kind].has_official_rules else None,
        loads=msgspec.convert(loads, tuple[schema.ServedLoad, ...] | None),
        started=utc(result.run_start_ms),
        stopped=utc(result.run_stop_ms),
        time_to_train_min=result.minutes,
        evaluations=tuple(_evaluation(one, line=one.line) for one in result.evaluations),
        step_time_ms=result.step_time_ms and result.step_time_ms.median,
        step_time_spread_ms=result.step_time_ms,
        spans=tuple(map(_span, result.trials)),
    )


def _span(span: "Span") -> schema.Span:
    times = {"started": utc(span.run_start_ms), "stopped": utc(span.run_stop_ms), "time_to_train_min": span.minutes}
    return _of(schema.Span, span, **times)


def _evaluation(evaluated: Any, *, line: int | None) -> schema.Evaluation:
    return _of(schema.Evaluation, evaluated, line=line, time=utc(evaluated.time_ms))


def imported_load(file: Path, load: "imported.Summary") -> schema.ImportedLoad:
    times = {
        f"{name}_{share}_s": getattr(load, f"{name}_{share}")
        for name in ("latency", "ttft", "tpot")
        for share in ("p50", "p99")
    }
    return _of(schema.ImportedLoad, load, file=str(file), **times)


def diagnosis(explanation: "Explanation") -> schema.Diagnosis:
    from bench.rules import RULES

    also = tuple(_of(schema.Clue, clue, title=RULES[clue.rule].title, evidence=clue.text) for clue in explanation.also)
    return _of(schema.Diagnosis, explanation, also=also)


def goodput(measured: "Goodput") -> schema.Goodput:
    from bench.runs.goodput import RESTARTS, Part

    parts = tuple(
        schema.TimePart(
            part=part.name,
            what=part.value,
            is_restart=part in RESTARTS,
            seconds=seconds,
            share=measured.share(seconds),
            gpu_hours=measured.gpu_hours(seconds),
        )
        for part, seconds in measured.seconds.items()
    )
    trials = tuple(
        schema.TrialTime(
            trial=one.trial,
            outcome=str(one.outcome),
            num_attempts=one.num_attempts,
            seconds={part.name: value for part, value in one.seconds.items()},
        )
        for one in measured.trials
    )
    effective_s = measured.seconds[Part.training]
    return _of(
        schema.Goodput,
        measured,
        run=str(measured.folder),
        effective_training_s=effective_s,
        parts=parts,
        trials=trials,
    )


def rule(rule: "Rule") -> schema.Rule:
    signs = tuple(
        schema.LogPattern(weight=sign.weight.name, pattern=sign.pattern.decode(errors="replace")) for sign in rule.signs
    )
    return _of(schema.Rule, rule, rule=rule.id, signs=signs)


def score(scored: "Score") -> schema.Score:
    return _of(
        schema.Score,
        scored,
        run=scored.folder,
        results=tuple(_of(schema.ScoredTrial, one, time_to_train_min=one.minutes) for one in scored.results),
        olympic_min=scored.olympic_minutes,
        official_min=scored.official_minutes,
        interval_min=scored.interval_minutes,
        samples_distribution={str(samples): count for samples, count in scored.samples_distribution.items()},
    )


def published_system(entry: "Entry") -> schema.PublishedSystem:
    return _of(
        schema.PublishedSystem,
        entry,
        time_to_train_min=entry.minutes,
        olympic_min=entry.olympic_minutes,
        samples_to_target=entry.mean_samples,
        samples_distribution={str(samples): count for samples, count in entry.samples},
        step_time_ms=None if entry.step_time_s is None else 1000 * entry.step_time_s,
    )


_RENAMED_COLUMNS = {"run_start": "started", "minutes": "time_to_train_min"}


def trial(row: Mapping[str, Any]) -> schema.Trial:
    """Return a row of a report, whose columns are those of its CSV."""
    named = {_RENAMED_COLUMNS.get(name, name): value for name, value in row.items()}
    return msgspec.convert(named | {"trial": str(named["trial"])}, schema.Trial, from_attributes=True)


def package(packed: "Package") -> schema.Package:
    from bench.mlperf.result import UNVERIFIED

    folder, checks = packed.request.folder, packed.checked.checks.items()
    return _of(
        schema.Package,
        packed,
        folder=str(folder),
        org=packed.request.org,
        systems=tuple(sorted({entry.system for entry in packed.entries})),
        benchmarks=tuple(sorted({entry.benchmark for entry in packed.entries})),
        files=tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())),
        scaling_factors=dict(packed.checked.scaling),
        energy_j=dict(packed.energy_j),
        todo=tuple(f"{file}: {field}" for file, fields in packed.todo.items() for field in fields),
        checkers={name: _of(schema.Checker, check) for name, check in checks},
        note=UNVERIFIED,
    )


def verification(verified: "Verification") -> schema.Verification:
    return _of(schema.Verification, verified, run=verified.folder, checks=verified.compared)


def plan_line(plan: "Plan") -> str:
    """Return the content of plan.json as one line, with its schema first. Plans contain no secrets to mask."""
    named = {"schema": schema.Plan.__struct_config__.tag}
    return json.dumps(named | codec.plain(plan), allow_nan=False)


def layout(layout: "Layout") -> schema.Layout:
    return _of(schema.Layout, layout)


def scaling(scaling: "Scaling", name: str) -> schema.Scaling:
    """Return the estimates of `runstop plan --scale`, with the terms of each step."""
    return msgspec.convert({"task": name, "marked": "estimated", **codec.plain(scaling)}, schema.Scaling)


def tuning(tuning: "Tuning") -> schema.Tuning:
    return _of(schema.Tuning, tuning, settings=tuple(map(_tuned, tuning.tried)))


def _tuned(tried: "Tried") -> schema.TunedSettings:
    candidate = tried.candidate
    return _of(
        schema.TunedSettings,
        candidate,
        tried,
        outcome=str(tried.outcome),
        estimated_step_ms=candidate.step_ms,
        estimated_low_ms=candidate.low_ms,
        estimated_high_ms=candidate.high_ms,
        step_times_ms=tried.values_ms,
        low_ms=tried.low_ms,
        high_ms=tried.high_ms,
        slower_low_percent=tried.slower_low,
        slower_high_percent=tried.slower_high,
    )


def doctor(plan: "Plan", tiers: Sequence[Sequence["Checked"]]) -> schema.Doctor:
    from bench import preflight
    from bench.rules.finding import errors

    every = [one for checked in tiers for one in checked]
    findings = preflight.findings(every)
    return schema.Doctor(
        plan=plan.name,
        tier=every[-1].tier,
        passed=not errors(findings),
        findings=tuple(findings),
        checks=tuple(_of(schema.Check, one, num_findings=len(one.findings)) for one in every),
    )


def _compared_values(kind: type[S], comparison: "Comparison", **more: Any) -> S:
    plain = {"pairing": str(comparison.pairing), "verdict": str(comparison.verdict)}
    return _of(kind, comparison, **plain | more)


def comparison(compared: "Compared") -> schema.Comparison:
    first, second = (tuple(str(folder) for folder in run_set.folders) for run_set in compared.run_sets)
    return _compared_values(
        schema.Comparison,
        compared.comparison,
        runs=(first, second),
        differences={name: (one, other) for name, one, other in compared.differences},
        notes=(*compared.comparison.notes, *compared.notes),
    )


def history_run(history: "TaskHistory", run: "HistoryRun") -> schema.HistoryRun:
    from bench.runs import tags

    names = dict.fromkeys(name for trial in run.trials for name in trial.measurements)
    return _of(
        schema.HistoryRun,
        tags.read(run.folder),
        history,
        run=str(run.folder),
        started=utc(run.began_ms),
        trials=tuple(trial.trial for trial in run.trials),
        values={name: tuple(run.values(name)) for name in names},
        facts=dict(run.trials[-1].facts),
    )


def node(history: "NodeHistory", *, since_ms: float) -> schema.Node:
    from bench.history.node_verdicts import VerdictKind
    from bench.history.nodes import reason

    is_bad = history.is_bad(since_ms=since_ms)
    findings = tuple(
        schema.NodeFinding(run=str(run), kind=str(one.kind), time=utc(one.time_ms), rule=one.rule, what=one.what)
        for run, one in history.verdicts
        if one.kind.is_bad
    )
    return schema.Node(
        node=history.node,
        backend=history.backend,
        runs=tuple(map(str, history.runs)),
        passed_checks=len(history.select(VerdictKind.passed)),
        findings=findings,
        last_seen=utc(history.last_seen_ms),
        is_left_out=is_bad,
        reason=reason(history) if is_bad else None,
    )


def regression(judgement: "Judgement") -> schema.Regression:
    history = judgement.task_history
    newest = str(history.runs[-1].folder)
    return _of(schema.Regression, judgement, history, verdict=str(judgement.change), run=newest)


def study_plan(folder: Path, arms: Sequence["PlannedArm"], order: Iterable[Sequence[str]]) -> schema.StudyPlan:
    return schema.StudyPlan(
        folder=str(folder),
        arms=tuple(arms),
        gpu_hours={arm.name: arm.gpu_hours for arm in arms},
        cost={arm.name: arm.cost for arm in arms},
        order=tuple(map(tuple, order)),
    )


def study(result: "StudyResult") -> schema.Study:
    differences = tuple(
        _of(
            schema.Difference,
            one,
            comparison=one.comparison and _compared_values(schema.ComparedValues, one.comparison),
        )
        for one in result.differences
    )
    return _of(schema.Study, result, differences=differences)


def progress(time_ms: int, views: Sequence["View"]) -> schema.Progress:
    from bench.mlperf.result import UNVERIFIED

    return schema.Progress(time=utc(time_ms), trials=tuple(map(_watched, views)), note=UNVERIFIED)


def _watched(view: "View") -> schema.WatchedTrial:
    from bench.watch.prediction import goal

    progress, outlook = view.progress, view.outlook
    target = goal(progress, view.planned)
    coming = tuple(
        _of(schema.Coming, one, time_to_train_min=one.minutes, low_min=one.minutes_low, high_min=one.minutes_high)
        for one in outlook.coming
    )
    return _of(
        schema.WatchedTrial,
        view,
        outlook,
        progress,
        target=target and target.value,
        hottest_gpu=view.hottest,
        started=utc(progress.run_start_ms),
        stopped=utc(progress.run_stop_ms),
        last_record=utc(progress.last_ms),
        evaluations=tuple(_evaluation(one, line=None) for one in progress.evaluations),
        step_time_median_ms=progress.step_time_ms,
        coming=coming,
        time_to_train_range_min=outlook.minutes_range,
    )


def image(
    file: Path, *, size_bytes: int | None, record: "Record | None", findings: Sequence["Finding"]
) -> schema.Image:
    return schema.Image(
        file=str(file), passed=not findings, findings=tuple(findings), record=record, size_bytes=size_bytes
    )


def listed_image(entry: "StoredImage") -> schema.Image:
    return image(entry.path, size_bytes=entry.size_bytes, record=entry.record, findings=entry.faults)


def imported_image(imported: "Imported") -> schema.Image:
    record = imported.record
    return msgspec.structs.replace(
        image(imported.path, size_bytes=record.size_bytes, record=record, findings=()), is_new=imported.is_new
    )


def download_plan(planned: "Planned") -> schema.DownloadPlan:
    return _of(
        schema.DownloadPlan,
        planned,
        planned.repo,
        repo=planned.repo.name,
        folder=str(planned.request.folder),
        total_bytes=planned.bytes,
    )


def download(folder: Path, record: "FetchRecord", wrong: Sequence[tuple[str, str]]) -> schema.Download:
    return _of(
        schema.Download,
        record,
        folder=str(folder),
        passed=record.complete and not wrong,
        is_complete=record.complete,
        wrong_files=tuple(schema.WrongFile(file=file, what=what) for file, what in wrong),
    )


def calibration(file: Path, gpu: "Gpu", *, skipped: Sequence[str], link_error: str | None) -> schema.Calibration:
    return schema.Calibration(file=str(file), skipped=tuple(skipped), link_error=link_error, gpu=gpu)
