"""Read a study's folder: all that is to be shown of it, from its run folders' logs."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.results.comparison import compare, values_by_block
from bench.results.study import Column, Difference, PlannedArm, Publication, StudyResult
from bench.studies import arms as arms_of
from bench.studies import checks, library, session, tables
from bench.studies import folder as folders
from bench.studies.arms import Arm
from bench.studies.folder import Kept
from bench.studies.session import State
from bench.studies.spec import Pair, Study
from bench.studies.tables import ArmRuns


def read(folder: Path, *, runs: int | None = None) -> StudyResult:
    """Return a study's tables; nothing is composed, started or asked of the user.

    `runs` is how many of each arm count; without it as many as the study says.

    Raises:
        ConfigError: it is not a study's folder, or nobody means so many runs.
    """
    kept, planned = folders.kept(folder), folders.planned(folder)
    study = kept.study if runs is None else library.with_runs(kept.study, runs)
    arms = [arm for arm in arms_of.of(study, where=folders.STUDY) if arm.name in planned]
    standings = session.of(folder, [(arm, planned[arm.name]) for arm in arms], num_runs=study.runs, ask=False)
    found = [tables.read(arm, planned[arm.name], study, standings) for arm in arms]
    columns = (*tables.columns(study), *tables.coefficient_columns(study))
    rows = [tables.row(runs, study, kept.publications) for runs in found]
    return StudyResult(
        name=kept.name,
        title=study.title,
        question=study.question,
        source=study.source,
        folder=str(folder.absolute()),
        columns=columns,
        rows=tables.with_coefficients(rows, found, study),
        tables=tuple(tables.pivot(table, arms, columns) for table in study.tables),
        differences=tuple(_difference(pair, found, columns, margin=study.margin) for pair in study.pairs),
        publications=tuple(
            Publication(name=name, title=table.title, place=table.place, hardware=table.hardware, date=table.date)
            for name, table in kept.publications.items()
        ),
        cluster=kept.cluster,
        command=kept.command,
        commit=_all_of(found, "commit"),
        date=_dates(found),
        hardware=_hardware(found),
        order=tuple(arms_of.blocks(list(planned.values()), runs=study.runs, seed=study.seed)),
        margin=study.margin,
        notes=(*_notes(kept, study, found), *_further_runs(folder, arms, planned, study)),
    )


def _difference(pair: Pair, found: Sequence[ArmRuns], columns: Sequence[Column], *, margin: float) -> Difference:
    """Return what the blocks that both arms have say about a pair."""
    column = next(column for column in columns if column.measurement == pair.measurement)
    by_arm = {runs.arm.name: runs for runs in found}
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


def _why_no_value(name: str, by_arm: Mapping[str, ArmRuns]) -> str:
    """Return why an arm has no number at all; empty where it has one."""
    if name not in by_arm:
        return "not planned yet"
    runs = by_arm[name]
    if not runs.planned.runs:
        return runs.planned.reason
    return "" if runs.proven else "; ".join(dict.fromkeys(runs.missing.values()))


def _all_of(found: Sequence[ArmRuns], fact: str) -> str:
    return ", ".join(dict.fromkeys(one.facts[fact] for runs in found for _, one in runs.proven if fact in one.facts))


def _hardware(found: Sequence[ArmRuns]) -> str:
    """Return the accelerators of the runs, or their processors where there are none."""
    accelerators = _all_of(found, "accelerator")
    return _all_of(found, "host processor model name") if accelerators in ("", "cpu") else accelerators


def _dates(found: Sequence[ArmRuns]) -> str:
    """Return the days, in UTC, on which the first and the last run began."""
    times = [one.began_ms for runs in found for _, one in runs.proven if one.began_ms is not None]
    days = [_day(time_ms) for time_ms in (min(times), max(times))] if times else []
    return " to ".join(dict.fromkeys(filter(None, days)))


def _day(time_ms: int) -> str:
    """Return a time of a log as a date; empty for one that no calendar holds."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return ""


def _notes(kept: Kept, study: Study, found: Sequence[ArmRuns]) -> list[str]:
    notes = []
    missing = sum(len(runs.missing) for runs in found)
    total = missing + sum(len(runs.proven) for runs in found)
    if missing:
        notes.append(f"{total - missing} of {total} runs are proven")
    if study.window is not None:
        steps, skipped = study.window.steps, study.window.skip_steps
        notes.append(f"step times and rates are over {steps} steps, after {skipped} that are not counted")
    return [*notes, *_other_units(kept)]


def _further_runs(folder: Path, arms: Sequence[Arm], planned: Mapping[str, PlannedArm], study: Study) -> Iterator[str]:
    """Yield how many proven runs lie in blocks beyond those that the study counts: `--runs` asked for them once."""
    blocks = (int(path.suffix[1:]) for path in folder.glob("*.*/") if path.suffix[1:].isdecimal())
    last = max((block for block in blocks if block <= checks.MAX_RUNS), default=0)
    if last <= study.runs:
        return
    every = session.of(folder, [(arm, planned[arm.name]) for arm in arms], num_runs=last, ask=False)
    further = sum(block >= study.runs and run.state is State.proven for (_, block), run in every.runs.items())
    if further:
        yield f"{further} proven runs of further blocks are not counted: --runs {last} counts them"


def _other_units(kept: Kept) -> Iterator[str]:
    """Yield which published figures are in another unit than the column in which they stand."""
    for column in kept.study.columns:
        figures = [figure for table in kept.publications.values() for figure in table.figures]
        units = {one.unit for one in figures if one.measurement == column.measurement and one.value is not None}
        if column.unit and (others := sorted(units - {column.unit})):
            yield f"{column.title}: published in {', '.join(others)}, not in {column.unit}"
