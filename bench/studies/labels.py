"""Names of arms whose model the command line replaces, so that no row says 7B next to the numbers of another model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from bench.contract.model import Model
from bench.results.statement import StatementResult
from bench.results.study import Difference, PlannedArm, Row, StudyResult, Table

MODEL = "model"
"""The label that names the model of an arm."""
_NOT_SIZES = ("name", "source", "weights")
"""Fields of a model that are not its sizes."""


def of_replacement(new: Model, old: Model) -> str:
    """Return the name of a model that replaces the model of an arm; empty if the sizes are the same."""
    if _sizes(new) == _sizes(old):
        return ""
    return new.name if new.name != old.name else f"{new.name} of other sizes"


def _sizes(model: Model) -> dict[str, object]:
    return {name: value for name, value in asdict(model).items() if name not in _NOT_SIZES}


def renamed(result: StudyResult, planned: Mapping[str, PlannedArm]) -> StudyResult:
    """Return a result whose arms name the models that they ran."""
    models = {name: arm.model for name, arm in planned.items() if arm.model}
    if not models:
        return result
    names = {row.arm: _name(row, models[row.arm]) for row in result.rows if row.arm in models}
    shown = ", ".join(dict.fromkeys(models.values()))
    return replace(
        result,
        title=f"{result.title}, with model {shown}",
        rows=tuple(_row(row, names, models) for row in result.rows),
        tables=tuple(_table(table, result, names, models) for table in result.tables),
        differences=tuple(
            replace(renamed_difference(one, names), reason=_with_names(one.reason, names)) for one in result.differences
        ),
        order=tuple(tuple(names.get(name, name) for name in block) for block in result.order),
        notes=(*result.notes, f"the arms ran the model {shown}, which the command line sets"),
        statements=tuple(_statement(one, names, shown) for one in result.statements),
        references=tuple(replace(one, arm=names.get(one.arm, one.arm)) for one in result.references),
    )


def _label(value: str, model: str) -> str:
    return f"{model} instead of {value}"


def _name(row: Row, model: str) -> str:
    """Return the name of an arm with the model that it ran in place of its label, or behind the name."""
    value = row.labels.get(MODEL, "")
    parts = row.arm.split(" ")
    if value not in parts:
        return f"{row.arm} ({model})"
    return " ".join(_label(part, model) if part == value else part for part in parts)


def _row(row: Row, names: Mapping[str, str], models: Mapping[str, str]) -> Row:
    if row.arm not in names:
        return row
    labels = {name: _label(value, models[row.arm]) if name == MODEL else value for name, value in row.labels.items()}
    return replace(row, arm=names[row.arm], labels=labels)


def _table(table: Table, result: StudyResult, names: Mapping[str, str], models: Mapping[str, str]) -> Table:
    """Return a table with renamed arms, whose keys name the model that all of their arms ran."""
    across = list(zip(*(arms for _, arms in table.rows), strict=True))
    columns = [_key(key, table.column_labels, arms, models) for key, arms in zip(table.columns, across, strict=True)]
    rows = [(_key(key, table.row_labels, arms, models), arms) for key, arms in table.rows]
    return replace(
        table,
        columns=tuple(columns),
        rows=tuple((key, tuple(None if arm is None else names.get(arm, arm) for arm in arms)) for key, arms in rows),
    )


def _key(
    key: tuple[str, ...], labels: Sequence[str], arms: Sequence[str | None], models: Mapping[str, str]
) -> tuple[str, ...]:
    of_arms = {models.get(arm, "") for arm in arms if arm is not None}
    if len(of_arms) != 1 or not (model := of_arms.pop()):
        return key
    return tuple(_label(value, model) if name == MODEL else value for name, value in zip(labels, key, strict=True))


def renamed_difference(one: Difference, names: Mapping[str, str]) -> Difference:
    """Return a difference whose arms have other names."""
    first, second = (names.get(name, name) for name in (one.first, one.second))
    compared = replace(one.comparison, names=(first, second)) if one.comparison else None
    return replace(one, first=first, second=second, comparison=compared)


def _statement(one: StatementResult, names: Mapping[str, str], models: str) -> StatementResult:
    return replace(
        one,
        text=f"{one.text} (judged with model {models})",
        reason=_with_names(one.reason, names),
        intervals=tuple(
            replace(each, name=_with_names(each.name, names), reason=_with_names(each.reason, names))
            for each in one.intervals
        ),
    )


def _with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the arms renamed; a longer name goes before one that is a part of it, or of another word."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: names[match[0]], text)
