"""The numbers of a study as a flat table, one line each, for a spreadsheet or a data frame."""

from collections.abc import Iterator
from typing import Any

from bench.report.tables import frame
from bench.results.study import Cell, Published, Row, StudyResult

_FIRST = ("arm",)
_THEN = (
    *("measurement", "unit", "origin", "value", "deviation", "low", "high", "n", "values"),
    *("publication", "printed", "reason", "runs"),
)


def csv(result: StudyResult) -> str:
    """Return one line for each number of an arm: measured ones, then published ones."""
    labels = tuple(dict.fromkeys(name for row in result.rows for name in row.labels))
    records = [record for row in result.rows for record in _records(result, row)]
    lines = [[record.get(name) for name in (*_FIRST, *labels, *_THEN)] for record in records]
    return str(frame(lines, [*_FIRST, *labels, *_THEN]).to_csv(index=False, lineterminator="\n"))


def _records(result: StudyResult, row: Row) -> Iterator[dict[str, Any]]:
    for column in result.columns:
        arm = {"arm": row.arm, **row.labels, "measurement": column.measurement, "unit": column.unit}
        cell = row.cells.get(column.measurement)
        if cell is not None:
            yield arm | _measured(cell)
        yield from (arm | _published(one) for one in row.published.get(column.measurement, ()))


def _measured(cell: Cell) -> dict[str, Any]:
    return {
        "origin": cell.mark.name.replace("_", " "),
        "value": cell.value,
        "deviation": cell.deviation,
        "low": cell.low,
        "high": cell.high,
        "n": cell.n,
        "values": " ".join(map(repr, cell.values)),
        "reason": cell.reason,
        "runs": " ".join(cell.runs),
    }


def _published(one: Published) -> dict[str, Any]:
    return {
        "origin": "published",
        "value": one.value,
        "publication": one.publication,
        "printed": one.printed,
        "reason": one.reason,
    }
