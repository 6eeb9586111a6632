"""Build the rows, cells and tables of a study from its run folders and the published figures."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from bench.errors import LogError
from bench.results import cost
from bench.results.comparison import Pairing, values_by_block
from bench.results.efficiency import coefficient
from bench.results.published import PublishedTable
from bench.results.study import Cell, Column, Mark, PlannedArm, Published, Row, Table
from bench.studies import measured
from bench.studies.arms import Arm
from bench.studies.measured import Measured
from bench.studies.session import RunStatus, RunStatuses, State
from bench.studies.spec import Coefficients, Pivot, Relative, Study, matches

ESTIMATES = {
    "estimated_step_time": "step_time_ms",
    "estimated_throughput_per_gpu": "tokens_s_gpu",
    "estimated_memory": "memory_gib",
}
"""Columns with estimates of the plan, and the fields of PlannedArm."""
SIZES = {
    "estimated_weights": "weights_gb",
    "estimated_states": "states_gib",
    "estimated_gpus_of_40_gb": "gpus_of_40_gb",
}
"""Columns with sizes that need no plan, and the fields of PlannedArm."""
COEFFICIENT, OF_LABEL = "efficiency_coefficient", "of"
"""The measurement of published coefficients, and the label with the measurement that they are of."""
BATCHES = ("micro_batch_size", "global_batch_size")
"""Columns with values of the plan, which are shown once a run is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRuns:
    """One arm, and its valid runs."""

    arm: Arm
    planned: PlannedArm
    valid: Sequence[tuple[RunStatus, Measured]]
    missing: Mapping[int, str]
    """By block, why it has no value."""
    too_large: tuple[int, ...]
    """Micro-batches that ran out of memory."""


def read(arm: Arm, planned: PlannedArm, study: Study, statuses: RunStatuses) -> ArmRuns:
    """Return the valid runs of an arm, and why the others are not valid."""
    valid: list[tuple[RunStatus, Measured]] = []
    missing: dict[int, str] = {}
    for block in range(study.runs if planned.runs else 0):
        run = statuses.runs[arm.name, block]
        if run.state is not State.valid:
            missing[block] = f"{run.state}{f': {run.reason}' if run.reason else ''}"
            continue
        try:
            valid.append((run, measured.of_run(run.folder, arm, window=study.window)))
        except LogError as error:
            missing[block] = error.what
    too_large = statuses.too_large.get(arm.name, ())
    return ArmRuns(arm=arm, planned=planned, valid=valid, missing=missing, too_large=too_large)


def row(runs: ArmRuns, study: Study, publications: Mapping[str, PublishedTable]) -> Row:
    """Return a row; an arm whose work the command line has changed has no published figures."""
    names = [column.measurement for column in study.columns]
    publications = {} if runs.planned.changed else of_arm(runs.arm, study, publications)
    coefficients = {
        one.column: _published(runs.arm, COEFFICIENT, publications, coefficient_of=one.measurement)
        for one in study.coefficients
    }
    relative = [one.name for one in study.relatives]
    return Row(
        arm=runs.arm.name,
        labels=runs.arm.labels,
        cells={name: _noted(_cell(name, runs), runs.arm.note) for name in names},
        published={name: _published(runs.arm, name, publications) for name in (*names, *relative)} | coefficients,
        facts=agreed([one.facts for _, one in runs.valid]),
    )


def of_arm(arm: Arm, study: Study, publications: Mapping[str, PublishedTable]) -> dict[str, PublishedTable]:
    """Return the published tables that the study shows next to an arm."""
    return {
        name: table
        for name, table in publications.items()
        if matches(arm.all_labels, study.published_match.get(name, {}))
    }


def agreed(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the facts in which all runs agree."""
    return {name: text for name, text in (facts[0] if facts else {}).items() if all(f.get(name) == text for f in facts)}


def _noted(cell: Cell, note: str | None) -> Cell:
    """Return a cell whose remark begins with the note of its arm."""
    return cell if note is None else replace(cell, reason="; ".join(filter(None, (note, cell.reason))))


def _cell(name: str, runs: ArmRuns) -> Cell:
    planned = runs.planned
    if (size := getattr(planned, SIZES.get(name, ""), None)) is not None:
        return Cell(mark=Mark.estimated, value=size, reason="calculated from the number of weights")
    if not planned.runs:
        return Cell(mark=planned.mark, reason=planned.reason)
    if name in ESTIMATES:
        estimate = getattr(planned, ESTIMATES[name])
        if estimate is None:
            return Cell(
                mark=Mark.no_result, reason="the plan has no estimate, because there are no measured rates of this GPU"
            )
        return Cell(mark=Mark.estimated, value=estimate, reason="estimated by the plan")
    of_runs = [(run, value) for run, one in runs.valid if (value := _value(name, run, one, planned)) is not None]
    if not of_runs:
        return Cell(mark=Mark.no_result, reason=_why_none(name, runs))
    values = tuple(value for _, value in of_runs)
    is_calculated = any(name in one.calculated for _, one in runs.valid)
    return Cell(
        mark=Mark.calculated if is_calculated else Mark.measured,
        value=fmean(values),
        deviation=stdev(values) if values[1:] else None,
        values=values,
        reason="; ".join(_remarks(runs, is_calculated=is_calculated)),
        runs=tuple(run.folder.name for run, _ in of_runs),
    )


def _value(name: str, run: RunStatus, measured: Measured, planned: PlannedArm) -> float | None:
    if name in BATCHES:
        size: int | None = getattr(planned, name)
        tried, first = run.name.batch, planned.micro_batch_size
        return size if size is None or tried is None or not first else size * tried / first
    return measured.numbers[name].value if name in measured.numbers else None


def _why_none(name: str, runs: ArmRuns) -> str:
    if name in (measured.EPOCH, cost.EPOCH) and any(one.has_random_rows for _, one in runs.valid):
        return "the rows are random, and only the rows of a data set have an epoch: set model.weights=checkpoint"
    if runs.valid:
        known = ", ".join(sorted(runs.valid[0][1].numbers))
        return f"the runs did not measure this; their measurements are {known}"
    return "; ".join(dict.fromkeys(runs.missing.values()))


def _remarks(runs: ArmRuns, *, is_calculated: bool) -> list[str]:
    short, total = runs.arm.calculated, len(runs.valid) + len(runs.missing)
    remarks = []
    if is_calculated and short is not None:
        remarks.append(f"calculated from {short.steps:,} of {short.of_steps:,} steps")
    if runs.too_large:
        remarks.append(f"out of memory with micro-batches of {', '.join(map(str, runs.too_large))}")
    if runs.missing:
        causes = "; ".join(dict.fromkeys(runs.missing.values()))
        remarks.append(f"{len(runs.missing)} of {total} runs have no value ({causes})")
    return remarks


def _published(
    arm: Arm, measurement: str, publications: Mapping[str, PublishedTable], *, coefficient_of: str = ""
) -> tuple[Published, ...]:
    """Return the figures whose labels the arm has; those of coefficients have the label `of`, too."""
    labels = {**arm.all_labels, OF_LABEL: coefficient_of} if coefficient_of else arm.all_labels
    return tuple(
        Published(publication=name, value=figure.value, printed=figure.printed, reason=figure.reason)
        for name, table in publications.items()
        for figure in table.figures
        if figure.measurement == measurement and figure.labels and matches(labels, figure.labels)
    )


def by_block(runs: ArmRuns, measurement: str) -> dict[Hashable, float]:
    """Return the values of an arm's valid runs by block."""
    return {run.name.block: one.numbers[measurement].value for run, one in runs.valid if measurement in one.numbers}


def columns(study: Study) -> tuple[Column, ...]:
    return tuple(
        Column(measurement=c.measurement, title=c.title, unit=c.unit, higher_is_better=c.higher_is_better)
        for c in study.columns
    )


def pivot(table: Pivot, arms: Sequence[Arm], all_columns: Sequence[Column]) -> Table:
    """Return a table whose rows and columns are labels, in the order of the arms."""
    mine = [arm for arm in arms if matches(arm.all_labels, table.match)]
    across = tuple(dict.fromkeys(_key(arm, table.columns) for arm in mine))
    down = tuple(dict.fromkeys(_key(arm, table.rows) for arm in mine))
    by_place = {(_key(arm, table.rows), _key(arm, table.columns)): arm.name for arm in mine}
    return Table(
        title=table.title,
        column=next(column for column in all_columns if column.measurement == table.measurement),
        row_labels=table.rows,
        column_labels=table.columns,
        columns=across,
        rows=tuple((key, tuple(by_place.get((key, place)) for place in across)) for key in down),
    )


def _key(arm: Arm, labels: Sequence[str]) -> tuple[str, ...]:
    return tuple(arm.all_labels.get(label, "") for label in labels)


REFERENCE = "the reference"


def coefficient_columns(study: Study) -> tuple[Column, ...]:
    """Return the columns of coefficients; lower is better for coefficients of times, higher for those of rates."""
    of_values = {column.measurement: column for column in study.columns}
    return tuple(
        Column(measurement=c.column, title=c.title, unit="", higher_is_better=of_values[c.measurement].higher_is_better)
        for c in study.coefficients
    )


def with_coefficients(rows: Sequence[Row], of_arms: Sequence[ArmRuns], study: Study) -> tuple[Row, ...]:
    """Return the rows with the cells of all coefficients; `of_arms` has the runs of each arm."""
    cells: dict[str, dict[str, Cell]] = {row.arm: {} for row in rows}
    runs = {one.arm.name: one for one in of_arms}
    for declared in study.coefficients:
        for group in _groups(rows, declared):
            for arm, cell in _of_group(group, runs, declared, study).items():
                cells[arm][declared.column] = cell
    alone = Cell(mark=Mark.no_result, reason="the study does not compare this arm with another arm")
    names = [declared.column for declared in study.coefficients]
    return tuple(
        replace(row, cells={**row.cells, **{name: cells[row.arm].get(name, alone) for name in names}}) for row in rows
    )


def _groups(rows: Sequence[Row], declared: Coefficients) -> Iterator[list[Row]]:
    """Yield the groups of arms that are compared: those of one entry of `among` with equal labels `same`."""
    for match in declared.among:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            if matches({"arm": row.arm, **row.labels}, match):
                groups.setdefault(tuple(row.labels.get(name, "") for name in declared.same), []).append(row)
        yield from groups.values()


def _of_group(
    group: Sequence[Row], runs: Mapping[str, ArmRuns], declared: Coefficients, study: Study
) -> dict[str, Cell]:
    column = next(one for one in study.columns if one.measurement == declared.measurement)
    means = {row.arm: value for row in group if (value := row.cells[declared.measurement].value) is not None}
    if len(means) < 2:
        return {row.arm: _none(row.cells[declared.measurement]) for row in group}
    best = (max if column.higher_is_better else min)(means, key=lambda arm: means[arm])
    reference = next(row for row in group if row.arm == best).cells[declared.measurement]
    values = {arm: by_block(runs[arm], declared.measurement) for arm in means}
    return {
        row.arm: _coefficient_cell(
            row.cells[declared.measurement], values_by_block(values[row.arm], values[best]), best, reference
        )
        if row.arm in means
        else _none(row.cells[declared.measurement])
        for row in group
    }


def _none(cell: Cell) -> Cell:
    """Return the cell of an arm without a coefficient."""
    if cell.value is None:
        return Cell(mark=cell.mark, reason=cell.reason)
    return Cell(mark=Mark.no_result, reason="no other arm of the same group has a value")


def _coefficient_cell(own: Cell, values: tuple[Sequence[float], Sequence[float]], best: str, reference: Cell) -> Cell:
    """Return the coefficient of an arm; that of the reference is 1 and has no interval."""
    mark = own.mark if own.mark is not Mark.measured else reference.mark
    if own is reference:
        return Cell(mark=mark, value=1.0, text="1", values=(1.0,) * own.n, reason=REFERENCE, runs=own.runs)
    if not values[0]:
        return Cell(mark=Mark.no_result, reason=f"no block has valid runs of both this arm and {best}")
    result = coefficient(*values, pairing=Pairing.block)
    ratios = tuple(one / other for one, other in zip(*values, strict=True))
    why = f"; no interval: {result.reason}" if result.low is None else ""
    return Cell(
        mark=mark,
        value=result.value,
        text=result.text,
        low=result.low,
        high=result.high,
        values=ratios,
        reason=f"relative to {best}{why}",
        runs=own.runs,
    )


def relative_columns(study: Study) -> tuple[Column, ...]:
    """Return the columns with values relative to a reference arm."""
    return tuple(
        Column(measurement=one.name, title=one.title, unit="", higher_is_better=one.higher_is_better)
        for one in study.relatives
    )


def with_relatives(rows: Sequence[Row], of_arms: Sequence[ArmRuns], study: Study) -> tuple[Row, ...]:
    """Return the rows with the cells of all values relative to a reference arm."""
    runs = {one.arm.name: one for one in of_arms}
    return tuple(
        replace(row, cells={**row.cells, **{one.name: _relative(row, rows, runs, one) for one in study.relatives}})
        for row in rows
    )


def reference_of(labels: Mapping[str, str], every: Sequence[Mapping[str, str]], declared: Relative) -> int | None:
    """Return the position of the arm to which an arm is relative: that with the labels of the reference and of `same`.

    `labels` and `every` have the labels of the arm and of all arms.
    """
    for position, other in enumerate(every):
        if matches(other, declared.reference) and all(other.get(n) == labels.get(n) for n in declared.same):
            return position
    return None


def _relative(row: Row, rows: Sequence[Row], runs: Mapping[str, ArmRuns], declared: Relative) -> Cell:
    """Return the value of an arm divided by that of its reference, or by which share it is lower."""
    own = row.cells[declared.measurement]
    position = reference_of(_labels(row), [_labels(one) for one in rows], declared)
    if not matches(_labels(row), declared.match):
        return Cell(mark=Mark.no_result, reason="the study does not compare this arm with another arm")
    if own.value is None:
        return Cell(mark=own.mark, reason=own.reason)
    if position is None:
        return Cell(mark=Mark.no_result, reason="the study has no reference for this arm")
    arm, reference = rows[position].arm, rows[position].cells[declared.measurement]
    if reference.value is None:
        return Cell(mark=Mark.no_result, reason=f"the reference {arm} has no value: {reference.reason}")
    values = values_by_block(by_block(runs[row.arm], declared.measurement), by_block(runs[arm], declared.measurement))
    cell = _coefficient_cell(own, values, arm, reference)
    return _reduction(cell) if declared.is_reduction and cell.value is not None else cell


def _labels(row: Row) -> dict[str, str]:
    return {"arm": row.arm, **row.labels}


def _reduction(ratio: Cell) -> Cell:
    """Return 1 minus a ratio, with its interval."""
    assert ratio.value is not None
    value, low, high = 1 - ratio.value, ratio.high and 1 - ratio.high, ratio.low and 1 - ratio.low
    interval = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    values = tuple(1 - one for one in ratio.values)
    return replace(ratio, value=value, values=values, low=low, high=high, text=f"{value:.3g}{interval}")
