"""Merge the results of a study on several clusters into one, whose tables have a column for each platform.

A published table that names its platform is shown in the column of the cluster with the same GPU and the same NCCL
variables, or in a column of its own if there is none.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.errors import ConfigError
from bench.results.statement import StatementResult, StatementVerdict
from bench.results.study import (
    Cell,
    Column,
    Difference,
    Mark,
    Platform,
    Publication,
    Published,
    Row,
    StudyResult,
    Table,
)
from bench.studies.labels import renamed_difference

PLATFORM = "platform"
"""The label of the columns."""
_NO_RUNS = Cell(mark=Mark.no_result, reason="no runs on this platform")
_NO_ARM = Cell(mark=Mark.no_result, reason="the study in this folder has no such arm")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One column: the result of a study, or a platform of published tables only."""

    name: str
    result: StudyResult | None
    publications: frozenset[str]
    """The published tables that are shown in this column."""

    def arm(self, name: str) -> str:
        """Return the name of an arm in the merged result, where every platform has it."""
        return f"{self.name}: {name}"


def merged(results: Sequence[StudyResult]) -> StudyResult:
    """Return one result with a column for each platform, the document's own ones included.

    Raises:
        ConfigError: the folders have different studies, or a folder is given twice.
    """
    _check(results)
    first = results[0]
    known = {one.name: one for result in results for one in result.publications}
    sides = _sides(results, list(known.values()))
    groups = _groups(list(known.values()))
    arms = list(dict.fromkeys(row.arm for result in results for row in result.rows))
    root = Path(os.path.commonpath([Path(result.folder).parent for result in results]))
    rows = [_below(root, side, _row(side, arm, results, groups)) for side in sides for arm in arms]
    return replace(
        first,
        folder=str(root),
        rows=tuple(rows),
        tables=tuple(_tables(first, sides, results)),
        differences=tuple(one for side in sides for one in _differences(side)),
        publications=tuple(_grouped(name, members) for name, members in _by_group(known, groups).items()),
        cluster=", ".join(result.cluster for result in results),
        command=f"runstop study {shlex.join(result.folder for result in results)} --table",
        commit=_joined(result.commit for result in results),
        date=_joined(result.date for result in results),
        hardware="; ".join(f"{s.name}: {s.result.hardware}" for s in sides if s.result and s.result.hardware),
        order=(),
        notes=tuple(dict.fromkeys(note for side in sides for note in _notes(side, results))),
        statements=tuple(one for side in sides for one in _statements(side, first, groups)),
        references=tuple(
            replace(one, platform=side.name) for side in sides if side.result for one in side.result.references
        ),
        platforms=tuple(_platform(side) for side in sides),
    )


def _check(results: Sequence[StudyResult]) -> None:
    first = results[0]
    for number, other in enumerate(results[1:], 1):
        where = other.folder
        if other.folder in [one.folder for one in results[:number]]:
            raise ConfigError("this folder is given twice", where=where, fix="give every folder only once")
        if other.name != first.name:
            raise ConfigError(
                f"this folder has the study {other.name}, but {first.folder} has the study {first.name}",
                where=where,
                fix="give folders of the same study on several clusters",
            )
        if [one.measurement for one in other.columns] != [one.measurement for one in first.columns]:
            raise ConfigError(
                f"the study in this folder does not have the same columns as the study in {first.folder}",
                where=where,
                fix="give folders with results of the same version of the study",
            )


def _sides(results: Sequence[StudyResult], publications: Sequence[Publication]) -> list[_Side]:
    """Return the columns: clusters without a platform of the document first, then the platforms in its order."""
    general = frozenset(one.name for one in publications if one.platform is None)
    platforms: dict[str, list[Publication]] = {}
    for one in publications:
        if one.platform is not None:
            platforms.setdefault(one.platform.name, []).append(one)
    of_result = {result.folder: _platform_of(result, publications) for result in results}
    names = _names(results, of_result)
    alone = [
        _Side(name=names[result.folder], result=result, publications=general)
        for result in results
        if of_result[result.folder] is None
    ]
    sides = list(alone)
    for platform, tables in platforms.items():
        own = general | {one.name for one in tables}
        mine = [result for result in results if of_result[result.folder] == platform]
        sides += [_Side(name=names[result.folder], result=result, publications=own) for result in mine]
        sides += [] if mine else [_Side(name=platform, result=None, publications=own - general)]
    return sides


def _platform_of(result: StudyResult, publications: Sequence[Publication]) -> str | None:
    """Return the document's platform that has the GPU and the NCCL variables of a study's folder."""
    known = [one.platform for one in publications if one.platform and one.platform.gpu in result.device]
    variables = {name for platform in known for name in platform.environment}
    for platform in known:
        if all(platform.environment.get(name, "") == result.environment.get(name, "") for name in variables):
            return platform.name
    return None


def _names(results: Sequence[StudyResult], of_result: Mapping[str, str | None]) -> dict[str, str]:
    """Return the heading of each folder's column; folders of the same name also have their path."""
    names = {}
    for result in results:
        platform = of_result[result.folder]
        names[result.folder] = f"{platform} ({result.cluster})" if platform else result.cluster
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {
        folder: f"{name}, {Path(folder).parent.parent.name}" if name in shared else name
        for folder, name in names.items()
    }


def _groups(publications: Sequence[Publication]) -> dict[str, str]:
    """Return, by table, the name under which the tables of one document's table are shown on one line."""
    members: dict[tuple[str, str, str], list[str]] = {}
    for one in publications:
        key = (one.title, one.place, one.date) if one.platform else (one.name, "", "")
        members.setdefault(key, []).append(one.name)
    return {name: os.path.commonprefix(names).rstrip("_") or names[0] for names in members.values() for name in names}


def _by_group(known: Mapping[str, Publication], groups: Mapping[str, str]) -> dict[str, list[Publication]]:
    members: dict[str, list[Publication]] = {}
    for name, publication in known.items():
        members.setdefault(groups[name], []).append(publication)
    return members


def _grouped(name: str, members: Sequence[Publication]) -> Publication:
    if len(members) == 1:
        return replace(members[0], name=name)
    hardware = "; ".join(f"{one.platform.name if one.platform else one.name}: {one.hardware}" for one in members)
    return replace(members[0], name=name, hardware=hardware, platform=None)


def _row(side: _Side, arm: str, results: Sequence[StudyResult], groups: Mapping[str, str]) -> Row:
    """Return the row of an arm on one platform, with the published figures of this platform only."""
    of_arm = [row for result in results for row in result.rows if row.arm == arm]
    own = next((row for row in side.result.rows if row.arm == arm), None) if side.result else None
    source = own or of_arm[0]
    missing = _NO_RUNS if side.result is None else _NO_ARM
    published: dict[str, tuple[Published, ...]] = {}
    for row in of_arm:  # the same figures in every folder that names the table
        for measurement, figures in row.published.items():
            own_ones = (one for one in figures if one.publication in side.publications)
            shown = (replace(one, publication=groups[one.publication]) for one in own_ones)
            published[measurement] = tuple(dict.fromkeys((*published.get(measurement, ()), *shown)))
    return replace(
        source,
        arm=side.arm(arm),
        labels={PLATFORM: side.name, **source.labels},
        cells=own.cells if own else dict.fromkeys(source.cells, missing),
        published=published,
        facts=own.facts if own else {},
    )


def _below(root: Path, side: _Side, row: Row) -> Row:
    """Return a row whose run folders are relative to the common folder."""
    if side.result is None:
        return row
    folder = os.path.relpath(side.result.folder, root)
    moved = {
        name: replace(cell, runs=tuple(f"{folder}/{run}" for run in cell.runs)) for name, cell in row.cells.items()
    }
    return replace(row, cells=moved)


def _tables(first: StudyResult, sides: Sequence[_Side], results: Sequence[StudyResult]) -> Iterator[Table]:
    """Yield the study's tables with the platforms as columns; without tables, one for each measurement."""
    if not first.tables:
        arms = dict.fromkeys(row.arm for result in results for row in result.rows)
        for column in first.columns:
            yield _table(column.title, column, ("arm",), {(arm,): arm for arm in arms}, sides)
        return
    for table in first.tables:
        places = {
            (*across, *down): arm
            for number, across in enumerate(table.columns)
            for down, of_row in table.rows
            if (arm := of_row[number]) is not None
        }
        yield _table(table.title, table.column, (*table.column_labels, *table.row_labels), places, sides)


def _table(
    title: str,
    column: Column,
    labels: tuple[str, ...],
    arms: Mapping[tuple[str, ...], str],
    sides: Sequence[_Side],
) -> Table:
    return Table(
        title=title,
        column=column,
        row_labels=labels,
        column_labels=(PLATFORM,),
        columns=tuple((side.name,) for side in sides),
        rows=tuple((key, tuple(side.arm(arm) for side in sides)) for key, arm in arms.items()),
    )


def _differences(side: _Side) -> Iterator[Difference]:
    for one in side.result.differences if side.result else ():
        yield renamed_difference(one, {name: side.arm(name) for name in (one.first, one.second)})


def _statements(side: _Side, first: StudyResult, groups: Mapping[str, str]) -> Iterator[StatementResult]:
    """Yield the statements as judged on one platform, with the published ratios of this platform."""
    for one in side.result.statements if side.result else first.statements:
        published = tuple(
            replace(each, publication=groups[each.publication])
            for each in one.published
            if each.publication in side.publications
        )
        own = replace(one, platform=side.name, published=published)
        if side.result is None:
            own = replace(
                own, verdict=StatementVerdict.not_measured, reason=_NO_RUNS.reason, intervals=(), deciding=None
            )
        if side.result is not None or published:
            yield own


def _notes(side: _Side, results: Sequence[StudyResult]) -> Iterator[str]:
    """Yield the notes of a folder; those that all folders have are not repeated."""
    for note in side.result.notes if side.result else ():
        yield note if all(note in result.notes for result in results) else f"{side.name}: {note}"


def _platform(side: _Side) -> Platform:
    published = tuple(sorted(side.publications))
    if side.result is None:
        return Platform(name=side.name, publications=published)
    result = side.result
    runs = {run for row in result.rows for cell in row.cells.values() for run in cell.runs}
    return Platform(
        name=side.name,
        cluster=result.cluster,
        folder=result.folder,
        hardware=result.hardware,
        date=result.date,
        commit=result.commit,
        num_runs=len(runs),
        publications=published,
    )


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(part for text in texts for part in text.split(", ") if part))
