"""Efficiency coefficients of a study: the value of each arm over that of the best one among its like.

Both are taken over the runs of the same blocks. Every number says which arm it is a multiple of.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bench.results.comparison import Pairing, values_by_block
from bench.results.efficiency import coefficient
from bench.results.study import Cell, Column, Mark, Row
from bench.studies.spec import Coefficients, Study, matches
from bench.studies.tables import ArmRuns, by_block

REFERENCE = "the reference"


def columns(study: Study) -> tuple[Column, ...]:
    """Return the columns that a study declares of coefficients; fewer of a time are better, more of a rate."""
    of_values = {column.measurement: column for column in study.columns}
    return tuple(
        Column(measurement=c.column, title=c.title, unit="", higher_is_better=of_values[c.of].higher_is_better)
        for c in study.coefficients
    )


def with_coefficients(rows: Sequence[Row], found: Sequence[ArmRuns], study: Study) -> tuple[Row, ...]:
    """Return the rows with the cells of all coefficients. `found` has the runs of each row's arm."""
    cells: dict[str, dict[str, Cell]] = {row.arm: {} for row in rows}
    runs = {one.arm.name: one for one in found}
    for declared in study.coefficients:
        for group in _groups(rows, declared):
            for arm, cell in _of_group(group, runs, declared, study).items():
                cells[arm][declared.column] = cell
    alone = Cell(mark=Mark.no_result, reason="the study compares it with no other arm")
    names = [declared.column for declared in study.coefficients]
    return tuple(
        replace(row, cells={**row.cells, **{name: cells[row.arm].get(name, alone) for name in names}}) for row in rows
    )


def _groups(rows: Sequence[Row], declared: Coefficients) -> Iterator[list[Row]]:
    """Yield the arms that are compared with each other: those of one entry of `among`, with the same labels."""
    for match in declared.among:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            if matches({"arm": row.arm, **row.labels}, match):
                groups.setdefault(tuple(row.labels.get(name, "") for name in declared.same), []).append(row)
        yield from groups.values()


def _of_group(
    group: Sequence[Row], runs: Mapping[str, ArmRuns], declared: Coefficients, study: Study
) -> dict[str, Cell]:
    column = next(one for one in study.columns if one.measurement == declared.of)
    means = {row.arm: value for row in group if (value := row.cells[declared.of].value) is not None}
    if len(means) < 2:
        return {row.arm: _none(row.cells[declared.of]) for row in group}
    best = (max if column.higher_is_better else min)(means, key=lambda arm: means[arm])
    reference = next(row for row in group if row.arm == best).cells[declared.of]
    values = {arm: by_block(runs[arm], declared.of) for arm in means}
    return {
        row.arm: _cell(row.cells[declared.of], values_by_block(values[row.arm], values[best]), best, reference)
        if row.arm in means
        else _none(row.cells[declared.of])
        for row in group
    }


def _none(cell: Cell) -> Cell:
    """Return why an arm has no coefficient."""
    if cell.value is None:
        return Cell(mark=cell.mark, reason=cell.reason)
    return Cell(mark=Mark.no_result, reason="no other arm that it is compared with has a number")


def _cell(own: Cell, values: tuple[Sequence[float], Sequence[float]], best: str, reference: Cell) -> Cell:
    """Return the coefficient of an arm, or of the reference itself, which is 1 and has no interval."""
    mark = own.mark if own.mark is not Mark.measured else reference.mark
    if own is reference:
        return Cell(mark=mark, value=1.0, text="1", values=(1.0,) * own.n, reason=REFERENCE, runs=own.runs)
    if not values[0]:
        return Cell(mark=Mark.no_result, reason=f"no block has runs of it and of {best}")
    found = coefficient(*values, pairing=Pairing.block)
    ratios = tuple(one / other for one, other in zip(*values, strict=True))
    why = f"; no interval: {found.reason}" if found.low is None else ""
    return Cell(
        mark=mark,
        value=found.value,
        text=found.text,
        low=found.low,
        high=found.high,
        values=ratios,
        reason=f"relative to {best}{why}",
        runs=own.runs,
    )
