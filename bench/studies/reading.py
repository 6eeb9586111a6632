"""Build the result of a study, with all its tables, from the logs in its folder."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench.results import reference
from bench.results.comparison import compare, t_interval, values_by_block
from bench.results.reference import ReferenceResult, ReferenceVerdict
from bench.results.statement import CONFIDENCE
from bench.results.study import Column, Difference, PlannedArm, Publication, Row, StudyResult
from bench.studies import arms as arms_of
from bench.studies import checks, labels, library, session, statements, tables
from bench.studies import folder as folders
from bench.studies.arms import Arm
from bench.studies.folder import StoredStudy
from bench.studies.session import RunStatus, State
from bench.studies.spec import Pair, Reference, Study
from bench.studies.tables import ArmRuns


def read(folder: Path, *, runs: int | None = None) -> StudyResult:
    """Return the tables of a study, without composing or starting anything.

    `runs` is how many runs of each arm count, by default the number in the study.

    Raises:
        ConfigError: it is not a study's folder, or the number of runs is out of range.
    """
    stored, planned = folders.read(folder), folders.read_planned(folder)
    study = stored.study if runs is None else library.with_runs(stored.study, runs)
    arms = [arm for arm in arms_of.build(study, where=folders.STUDY) if arm.name in planned]
    statuses = session.run_statuses(
        folder, [(arm, planned[arm.name]) for arm in arms], num_runs=study.runs, must_query=False
    )
    of_arms = [tables.read(arm, planned[arm.name], study, statuses) for arm in arms]
    columns = (*tables.columns(study), *tables.coefficient_columns(study), *tables.relative_columns(study))
    rows = [tables.row(runs, study, stored.publications) for runs in of_arms]
    rows = [_with_intervals(row, study) for row in rows]
    result = StudyResult(
        name=stored.name,
        title=study.title,
        question=study.question,
        source=study.source,
        folder=str(folder.absolute()),
        columns=columns,
        rows=tables.with_relatives(tables.with_coefficients(rows, of_arms, study), of_arms, study),
        tables=tuple(tables.pivot(table, arms, columns) for table in study.tables),
        differences=tuple(_difference(pair, of_arms, columns, margin=study.margin) for pair in study.pairs),
        publications=tuple(
            Publication(
                name=name,
                title=table.title,
                place=table.place,
                hardware=table.hardware,
                date=table.date,
                platform=table.platform,
            )
            for name, table in stored.publications.items()
        ),
        cluster=stored.cluster,
        command=stored.command,
        commit=_all_of(of_arms, "commit"),
        date=_dates(of_arms),
        hardware=_hardware(of_arms),
        order=tuple(arms_of.blocks(list(planned.values()), runs=study.runs, seed=study.seed)),
        margin=study.margin,
        notes=(*_notes(stored, study, of_arms), *_further_runs(folder, arms, planned, study)),
        statements=statements.judged(study, of_arms, rows),
        references=tuple(_reference(one, of_arms, columns) for one in study.references),
        device=_single(one.device for one in planned.values() if one.device),
        environment=tables.agreed([one.environment for one in planned.values() if one.runs]),
    )
    return labels.renamed(result, planned)


def runs_of(folder: Path) -> tuple[list[RunStatus], dict[str, str]]:
    """Return the runs of a study with their states, and by arm, why it has no runs.

    Raises:
        ConfigError: it is not a study's folder.
    """
    stored, planned = folders.read(folder), folders.read_planned(folder)
    arms = [arm for arm in arms_of.build(stored.study, where=folders.STUDY) if arm.name in planned]
    pairs = [(arm, planned[arm.name]) for arm in arms]
    statuses = session.run_statuses(folder, pairs, num_runs=stored.study.runs, must_query=False)
    cannot_run = {name: one.reason or "it cannot run here" for name, one in planned.items() if not one.runs}
    return list(statuses.runs.values()), cannot_run


def _difference(pair: Pair, of_arms: Sequence[ArmRuns], columns: Sequence[Column], *, margin: float) -> Difference:
    """Compare the two arms of a pair over the blocks that both have."""
    column = next(column for column in columns if column.measurement == pair.measurement)
    by_arm = {runs.arm.name: runs for runs in of_arms}
    lacking = [f"{name}: {why}" for name in (pair.first, pair.second) if (why := _why_no_value(name, by_arm))]
    first, second = (
        {} if lacking else tables.by_block(by_arm[name], pair.measurement) for name in (pair.first, pair.second)
    )
    values = values_by_block(first, second)
    comparison = compare(
        *values,
        names=(pair.first, pair.second),
        measurement=column.title,
        unit=column.unit,
        higher_is_better=column.higher_is_better,
        margin=margin,
    )
    return Difference(
        first=pair.first,
        second=pair.second,
        measurement=pair.measurement,
        comparison=None if lacking else comparison,
        reason="; ".join(lacking),
    )


def _reference(spec: Reference, of_arms: Sequence[ArmRuns], columns: Sequence[Column]) -> ReferenceResult:
    """Compare the mean of an arm's valid runs with its reference value."""
    column = next(column for column in columns if column.measurement == spec.measurement)
    by_arm = {runs.arm.name: runs for runs in of_arms}
    reason = _why_no_value(spec.arm, by_arm)
    values = [] if reason else list(tables.by_block(by_arm[spec.arm], spec.measurement).values())
    result = ReferenceResult(
        arm=spec.arm,
        measurement=spec.measurement,
        unit=column.unit,
        reference=spec.value,
        tolerance=reference.share(spec.tolerance) or 0.0,
        verdict=ReferenceVerdict.not_measured,
        reason=reason or "not measured by its runs",
    )
    return reference.judged(result, values, higher_is_better=column.higher_is_better)


def _why_no_value(name: str, by_arm: Mapping[str, ArmRuns]) -> str:
    """Return why an arm has no value at all; empty if it has one."""
    if name not in by_arm:
        return "not planned yet"
    runs = by_arm[name]
    if not runs.planned.runs:
        return runs.planned.reason
    return "" if runs.valid else "; ".join(dict.fromkeys(runs.missing.values()))


def _all_of(of_arms: Sequence[ArmRuns], fact: str) -> str:
    return ", ".join(dict.fromkeys(one.facts[fact] for runs in of_arms for _, one in runs.valid if fact in one.facts))


def _hardware(of_arms: Sequence[ArmRuns]) -> str:
    """Return the accelerators of the runs, or their processors if they have none."""
    accelerators = _all_of(of_arms, "accelerator")
    return _all_of(of_arms, "host processor model name") if accelerators in ("", "cpu") else accelerators


def _with_intervals(row: Row, study: Study) -> Row:
    """Return a row with the interval of the mean in the columns that show it, if there are several runs."""
    cells = dict(row.cells)
    for name in (column.measurement for column in study.columns if column.interval and cells[column.measurement].n > 1):
        low, _, high = t_interval(np.asarray(cells[name].values), confidence=CONFIDENCE)
        cells[name] = replace(cells[name], low=low, high=high)
    return replace(row, cells=cells)


def _single(values: Iterator[str]) -> str:
    """Return the value that all share; empty if there are several or none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else ""


def _dates(of_arms: Sequence[ArmRuns]) -> str:
    """Return the days, in UTC, on which the first and the last run began."""
    times = [one.began_ms for runs in of_arms for _, one in runs.valid if one.began_ms is not None]
    days = [_day(time_ms) for time_ms in (min(times), max(times))] if times else []
    return " to ".join(dict.fromkeys(filter(None, days)))


def _day(time_ms: int) -> str:
    """Return a time of a log as a date; empty if it is out of range."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return ""


def _notes(stored: StoredStudy, study: Study, of_arms: Sequence[ArmRuns]) -> list[str]:
    notes = []
    missing = sum(len(runs.missing) for runs in of_arms)
    total = missing + sum(len(runs.valid) for runs in of_arms)
    if missing:
        notes.append(f"{total - missing} of {total} runs are valid")
    if study.window is not None:
        steps, skipped = study.window.steps, study.window.skip_steps
        notes.append(f"step times and rates are from {steps} steps, after {skipped} skipped steps")
    changed = dict.fromkeys(one for runs in of_arms for one in runs.planned.changed)
    if changed and stored.publications:
        notes.append(f"arms whose work differs from their labels have no published figures: {' '.join(changed)}")
    return [*notes, *_other_units(stored), *_not_measured(stored)]


def _further_runs(folder: Path, arms: Sequence[Arm], planned: Mapping[str, PlannedArm], study: Study) -> Iterator[str]:
    """Yield a note about valid runs in blocks beyond `runs`, which an earlier call with `--runs` started."""
    blocks = (int(path.suffix[1:]) for path in folder.glob("*.*/") if path.suffix[1:].isdecimal())
    last = max((block for block in blocks if block <= checks.MAX_RUNS), default=0)
    if last <= study.runs:
        return
    every = session.run_statuses(folder, [(arm, planned[arm.name]) for arm in arms], num_runs=last, must_query=False)
    further = sum(block >= study.runs and run.state is State.valid for (_, block), run in every.runs.items())
    if further:
        yield f"{further} valid runs in later blocks are not counted; to count these runs: --runs {last}"


def _not_measured(stored: StoredStudy) -> Iterator[str]:
    """Yield why no arm measures published figures."""
    for name, table in stored.publications.items():
        reasons = Counter(figure.not_measured for figure in table.figures if figure.not_measured)
        for reason, count in reasons.items():
            yield f"{name}: no arm measures {count} of {len(table.figures)} figures: {reason}"


def _other_units(stored: StoredStudy) -> Iterator[str]:
    """Yield notes about published figures whose unit differs from that of their column."""
    for column in stored.study.columns:
        figures = [figure for table in stored.publications.values() for figure in table.figures]
        units = {one.unit for one in figures if one.measurement == column.measurement and one.value is not None}
        if column.unit and (others := sorted(units - {column.unit})):
            yield f"{column.title}: published in {', '.join(others)}, not in {column.unit}"
