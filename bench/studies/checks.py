"""Check a study for mistakes and contradictions before its arms are planned."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import msgspec

from bench.contract.schema import Device
from bench.errors import ConfigError
from bench.results import names
from bench.results.published import PublishedTable
from bench.results.reference import share
from bench.studies import arms as arms_of
from bench.studies.arms import NAME_LABEL, Arm
from bench.studies.spec import Pivot, Statement, Study, matches
from bench.texts import nearest

MAX_RUNS = 1000
"""The largest number of runs of each arm."""
_ALIKE = 0.85
"""A new name that is more similar than this to a known one counts as misspelt."""


def check(study: Study, *, where: str) -> None:
    """Raise ConfigError if a study refers to something that it does not define, or has a number out of range."""
    _check_numbers(study, where=where)
    arms = arms_of.build(study, where=where)
    _check_columns(study, where=where)
    _check_coefficients(study, arms, where=where)
    _check_relatives(study, arms, where=where)
    _check_published_match(study, arms, where=where)
    _check_pairs(study, arms, where=where)
    _check_statements(study, arms, where=where)
    _check_references(study, arms, where=where)
    _check_tables(study, arms, where=where)
    _check_shortened(study, arms, where=where)


def check_runs(runs: int, *, where: str) -> None:
    """Raise ConfigError for a number of runs of each arm out of range."""
    if not 1 <= runs <= MAX_RUNS:
        raise ConfigError(
            f"the study has {runs} runs of each arm, but must have 1 to {MAX_RUNS:,} runs",
            where=where,
            fix=f"set runs to a number from 1 to {MAX_RUNS:,}",
        )


def check_published(table: PublishedTable, *, where: str) -> None:
    """Raise ConfigError for a misspelt measurement."""
    for figure in table.figures:
        _check_measurement(figure.measurement, where=f"{where}: {figure.printed!r}")


def refuse_unknown(name: str, known: Sequence[str], *, noun: str, where: str) -> NoReturn:
    """Raise ConfigError for a name that does not exist, with the known ones."""
    near = nearest(name.lower(), known)
    offer = f"did you mean {near}? " if near else ""
    raise ConfigError(
        f"the {noun} {name!r} does not exist",
        where=where,
        fix=f"{offer}choose from {', '.join(sorted(known)) or 'none'}",
    )


def alike(name: str, known: Sequence[str]) -> bool:
    """Return whether a name is a misspelling of a known one. A known name with a word appended is a new name."""
    is_longer = any(name.startswith(f"{one}_") for one in known)
    return not is_longer and nearest(name, known, likeness=_ALIKE) is not None


def _check_numbers(study: Study, *, where: str) -> None:
    check_runs(study.runs, where=f"{where}: runs")
    window, batch = study.window, study.max_batch
    devices = [name for name in Device.__members__ if name != Device.auto.name]
    wrong = {
        f"device is {study.device}, but must be {' or '.join(devices)}": (
            study.device not in (None, *devices),
            f"set device to {' or '.join(devices)}",
        ),
        f"margin is {study.margin:g}, but must be between 0 and 1": (
            not 0 < study.margin < 1,
            "set margin to a number between 0 and 1, such as 0.05",
        ),
        f"window.steps is {window and window.steps} and window.skip_steps is {window and window.skip_steps}, but steps "
        "must be 1 or more, and skip_steps 0 or more": (
            window is not None and (window.steps < 1 or window.skip_steps < 0),
            "set window.steps to 1 or more, and window.skip_steps to 0 or more",
        ),
        f"max_batch.limit is {batch.limit if batch else 0}, but must be 1 or more": (
            batch is not None and batch.limit < 1,
            "set max_batch.limit to 1 or more",
        ),
    }
    for what, (is_wrong, fix) in wrong.items():
        if is_wrong:
            raise ConfigError(what, where=where, fix=fix)


def _check_columns(study: Study, *, where: str) -> None:
    if not study.columns:
        raise ConfigError("the study has no columns", where=where, fix="add a measurement such as step_time to columns")
    measurements = [column.measurement for column in study.columns]
    for number, column in enumerate(study.columns):
        name, place = column.measurement, f"{where}: columns[{number}]"
        _check_measurement(name, where=place)
        if name in measurements[:number]:
            what = f"two columns of the study have the same measurement, {name}"
            raise ConfigError(what, where=place, fix="remove one of these two columns")
        unit = names.UNITS.get(name, column.unit)
        if column.unit not in ("", unit):
            fix = f"set unit: {unit}" if unit else "remove unit"
            raise ConfigError(
                f"the column has the unit {column.unit!r}, but the unit of {name} is {unit or 'empty'}",
                where=place,
                fix=fix,
            )


def _check_coefficients(study: Study, arms: Sequence[Arm], *, where: str) -> None:
    """Raise ConfigError if coefficients refer to no column, or if an arm is in two of their groups."""
    labels = {NAME_LABEL, *(name for arm in arms for name in arm.labels)}
    for number, one in enumerate(study.coefficients):
        place = f"{where}: coefficients[{number}]"
        _require_column(study, one.measurement, where=place)
        for name in (*one.same, *(name for match in one.among for name in match)):
            if name not in labels:
                refuse_unknown(name, sorted(labels), noun="label", where=place)
        for match in one.among:
            if not any(matches(arm.all_labels, match) for arm in arms):
                raise ConfigError(
                    f"an entry of `among` has the labels {match}, but no arm of the study has these labels",
                    where=place,
                    fix="change this entry of `among` to labels that an arm has",
                )
        for arm in arms:
            if sum(matches(arm.all_labels, match) for match in one.among) > 1:
                fix = "change the entries of `among`, so that every arm matches only one entry"
                what = f"the arm {arm.name} of the study matches two entries of `among`"
                raise ConfigError(what, where=place, fix=fix)
        if one.measurement in [other.measurement for other in study.coefficients[:number]]:
            raise ConfigError(
                f"two entries of `coefficients` have the measurement {one.measurement}",
                where=place,
                fix="remove one of these two entries",
            )


def _check_relatives(study: Study, arms: Sequence[Arm], *, where: str) -> None:
    """Raise ConfigError if a relative column has no source, no reference or several, or the name of another column."""
    labels = {NAME_LABEL, *(name for arm in arms for name in arm.labels)}
    names_so_far = [column.measurement for column in study.columns]
    for number, one in enumerate(study.relatives):
        place = f"{where}: relatives[{number}]"
        _require_column(study, one.measurement, where=place)
        for name in (*one.same, *one.reference, *one.match):
            if name not in labels:
                refuse_unknown(name, sorted(labels), noun="label", where=place)
        if one.name in names_so_far:
            raise ConfigError(
                f"the name is {one.name!r}, but another column already has this name",
                where=place,
                fix="set name to a name that no other column has",
            )
        names_so_far.append(one.name)
        references = [arm for arm in arms if matches(arm.all_labels, one.reference)]
        if not references:
            what = f"`reference` has the labels {one.reference}, but no arm of the study has these labels"
            raise ConfigError(what, where=place, fix="change `reference` to labels that an arm of the study has")
        if not any(matches(arm.all_labels, one.match) for arm in arms):
            what = f"`match` has the labels {one.match}, but no arm of the study has these labels"
            raise ConfigError(what, where=place, fix="change `match` to labels that an arm of the study has")
        seen: dict[tuple[str, ...], str] = {}
        for arm in references:
            key = tuple(arm.all_labels.get(name, "") for name in one.same)
            if (other := seen.setdefault(key, arm.name)) != arm.name:
                raise ConfigError(
                    f"a group of arms has two reference arms, {other!r} and {arm.name!r}, but must have exactly one",
                    where=place,
                    fix="find a label in which these two arms differ, and add this label to `same` or to `reference`",
                )


def _check_published_match(study: Study, arms: Sequence[Arm], *, where: str) -> None:
    place = f"{where}: published_match"
    for name, match in study.published_match.items():
        if name not in study.published:
            refuse_unknown(name, study.published, noun="published table of this study", where=place)
        if not any(matches(arm.all_labels, match) for arm in arms):
            what = f"the entry {name} has the labels {match}, but no arm of the study has these labels"
            raise ConfigError(what, where=place, fix=f"change the entry {name} of published_match to labels of an arm")


def _check_measurement(name: str, *, where: str) -> None:
    if meant := names.misspelt(name):
        raise ConfigError(f"the measurement {name!r} does not exist", where=where, fix=f"did you mean {meant}?")


def _check_pairs(study: Study, arms: Iterable[Arm], *, where: str) -> None:
    known = [arm.name for arm in arms]
    for number, pair in enumerate(study.pairs):
        place = f"{where}: pairs[{number}]"
        for name in (pair.first, pair.second):
            if name not in known:
                refuse_unknown(name, known, noun="arm", where=place)
        if pair.first == pair.second:
            raise ConfigError(
                f"the pair compares the arm {pair.first} with itself",
                where=place,
                fix="set first and second of the pair to two different arms",
            )
        _require_column(study, pair.measurement, where=place)


def _check_statements(study: Study, arms: Sequence[Arm], *, where: str) -> None:
    """Raise ConfigError if a statement has no bound, or is about no arm."""
    labels = {NAME_LABEL, *(name for arm in arms for name in arm.labels)}
    for number, one in enumerate(study.statements):
        place = f"{where}: statements[{number}]"
        _check_bounds(study, one, where=place)
        for name in (*one.same, *(name for stated in one.arms for name in (*stated.first, *(stated.second or {})))):
            if name not in labels:
                refuse_unknown(name, sorted(labels), noun="label", where=place)
        for stated in one.arms:
            if not any(arms_of.stated_pairs(msgspec.structs.replace(one, arms=(stated,)), arms)):
                what = f"no arm of the study has the labels {stated.first} (key `first`)"
                fix = "change `first` to labels that an arm of the study has"
                if stated.second is not None:
                    same = f", with the same value of {' and '.join(one.same)} (key `same`)" if one.same else ""
                    what = f"no pair of arms has the labels {stated.first} (key `first`) and {stated.second} (key "
                    what += f"`second`){same}"
                    fix = "change `first` and `second` to labels of two different arms"
                    fix += ", or remove labels from `same`" if one.same else ""
                raise ConfigError(what, where=place, fix=fix)


def _check_references(study: Study, arms: Sequence[Arm], *, where: str) -> None:
    known = [arm.name for arm in arms]
    for number, one in enumerate(study.references):
        place = f"{where}: references[{number}]"
        _require_column(study, one.measurement, where=place)
        if one.arm not in known:
            refuse_unknown(one.arm, known, noun="arm", where=place)
        if share(one.tolerance) is None:
            what = f"the tolerance is {one.tolerance!r}, but must be a percentage above 0"
            raise ConfigError(what, where=place, fix="write tolerance: 3%")
        if not 0 < one.value < float("inf"):
            what = f"the value is {one.value:g}, but must be a number above 0"
            raise ConfigError(what, where=place, fix="write the value in the unit of the column")


def _check_bounds(study: Study, statement: Statement, *, where: str) -> None:
    """Raise ConfigError if a statement has neither a measurement with bounds nor `fits`, or both."""
    bounds = [bound for bound in (statement.at_least, statement.at_most) if bound is not None]
    if statement.fits is not None:
        keys = {
            "measurement": bool(statement.measurement),
            "at_least": statement.at_least is not None,
            "at_most": statement.at_most is not None,
            "second": any(stated.second for stated in statement.arms),
        }
        if extra := " and ".join(f"`{name}`" for name, is_set in keys.items() if is_set):
            what = f"the statement has the key `fits`, which cannot be used with {extra}"
            raise ConfigError(what, where=where, fix=f"remove {extra}, or remove `fits`")
        return
    _require_column(study, statement.measurement, where=where)
    if not bounds or min(bounds) <= 0 or bounds != sorted(bounds):
        at_least, at_most = ("not set" if one is None else one for one in (statement.at_least, statement.at_most))
        raise ConfigError(
            f"at_least is {at_least} and at_most is {at_most}, but these bounds must be positive numbers in "
            "ascending order",
            where=where,
            fix="set at_least or at_most to a positive number; if both keys are set, at_most must be larger",
        )


def _check_tables(study: Study, arms: Sequence[Arm], *, where: str) -> None:
    labels = {NAME_LABEL, *(name for arm in arms for name in arm.labels)}
    for number, table in enumerate(study.tables):
        place = f"{where}: tables[{number}]"
        for name in (*table.rows, *table.columns, *table.match):
            if name not in labels:
                refuse_unknown(name, sorted(labels), noun="label", where=place)
        calculated = [*(one.column for one in study.coefficients), *(one.name for one in study.relatives)]
        if table.measurement not in calculated:
            _require_column(study, table.measurement, where=place)
        _check_places(table, arms, where=place)


def _check_places(table: Pivot, arms: Sequence[Arm], *, where: str) -> None:
    """Raise ConfigError if a table has no row label, or if two arms have the same cell."""
    if not table.rows:
        raise ConfigError(
            f"the key `rows` of the table {table.title!r} is empty",
            where=where,
            fix="write the name of at least one label into `rows`, for example `rows: [arm]` for one row for each arm",
        )
    first: dict[tuple[str, ...], str] = {}
    for arm in arms:
        if not matches(arm.all_labels, table.match):
            continue
        place = tuple(arm.all_labels.get(label, "") for label in (*table.rows, *table.columns))
        if (other := first.setdefault(place, arm.name)) != arm.name:
            raise ConfigError(
                f"the arms {other!r} and {arm.name!r} are in the same cell of the table {table.title!r}",
                where=where,
                fix="find a label in which these arms differ, and add this label to `rows` or `columns`; or use "
                "`match` to leave out one of the arms",
            )
    if not first:
        raise ConfigError(
            f"`match` of the table {table.title!r} has the labels {table.match}, but no arm has these labels",
            where=where,
            fix="change `match` to labels that an arm of the study has",
        )


def _require_column(study: Study, measurement: str, *, where: str) -> None:
    columns = [column.measurement for column in study.columns]
    if measurement not in columns:
        refuse_unknown(measurement, columns, noun="column with the measurement", where=where)


def _check_shortened(study: Study, arms: Iterable[Arm], *, where: str) -> None:
    for arm in arms:
        short = arm.calculated
        if short is None:
            continue
        if not 0 < short.steps < short.of_steps:
            raise ConfigError(
                f"calculated.steps of the arm {arm.name} is {short.steps}, but must be 1 or more and less than "
                f"of_steps={short.of_steps}",
                where=where,
                fix="set steps to 1 or more, and of_steps to more than steps",
            )
        if study.window is not None:
            raise ConfigError(
                f"`window` of the study and `calculated` of the arm {arm.name} both set the number of steps",
                where=where,
                fix="remove `window` from the study, or `calculated` from this arm",
            )
