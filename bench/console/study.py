"""Show a study: its tables next to published figures, its comparisons, and the planned cost of its arms."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.contract.schema import BackendName
from bench.report.cells import cell_text, published_text
from bench.report.costs import amount
from bench.report.statements import STATEMENT_HEADINGS, STATEMENTS_CAPTION, statement_rows
from bench.report.tables import TextTable, number_text
from bench.results.reference import ReferenceResult
from bench.results.study import Column, Difference, PlannedArm, StudyResult, Table
from bench.texts import counted, short_commits

INTERVALS = "in brackets: 95 % interval of the mean over runs"
COEFFICIENTS = "coefficients: ratio to the reference arm, with 95 % interval over pairs of runs"
MARKS = {
    "*": "* calculated from a shorter run",
    "~": "~ estimated by the plan, not measured",
    "X": "X not recommended",
    "-": "- no result",
}


def sheets(result: StudyResult) -> Iterator[TextTable]:
    """Yield the tables of a study, and the reasons for empty and marked cells."""
    *others, last = [_pivot(result, table) for table in result.tables] or [_arms(result)]
    yield from others
    yield replace(last, caption=_caption(result))
    remarks = list(dict.fromkeys(_remarks(result)))
    if remarks:
        yield TextTable("remarks", remarks, columns=("arm", "column", "reason"))
    if result.differences:
        yield _differences(result.differences, margin=result.margin)
    if result.statements:
        yield TextTable("statements", statement_rows(result), STATEMENT_HEADINGS, STATEMENTS_CAPTION)
    if result.references:
        measured = [(_arm_on(one), one.measurement, one.text, str(one.verdict)) for one in result.references]
        yield TextTable("reference values", measured, columns=("arm", "measurement", "result", "verdict"))
    if result.publications:
        rows = [(one.name, one.title, one.place, one.hardware, one.date) for one in result.publications]
        yield TextTable("published figures", rows, columns=("name", "title", "where", "hardware", "date"))


def _arm_on(one: ReferenceResult) -> str:
    return f"{one.platform}: {one.arm}" if one.platform else one.arm


def _arms(result: StudyResult) -> TextTable:
    """Return one row for each arm, one column for each measurement, and the published figures next to them."""
    published = {
        (column.measurement, one.publication): f"{column.title}, {one.publication}"
        for column in result.columns
        for row in result.rows
        for one in row.published.get(column.measurement, ())
    }
    rows = []
    for row in result.rows:
        cells = [row.cells[column.measurement] for column in result.columns]
        figures = {(name, one.publication): published_text(one) for name, ones in row.published.items() for one in ones}
        n = max((cell.n for cell in cells), default=0)
        rows.append((row.arm, *map(cell_text, cells), str(n), *(figures.get(key, "") for key in published)))
    columns = ("arm", *map(_heading, result.columns), "runs", *published.values())
    return TextTable(f"{result.name}: {result.title}", rows, columns)


def _pivot(result: StudyResult, table: Table) -> TextTable:
    """Return one table; below each of our numbers is the published one."""
    rows: list[tuple[str, ...]] = []
    for key, arms in table.rows:
        rows.append((*key, *(_number(result, table, arm) for arm in arms)))
        for name in dict.fromkeys(one.publication for one in result.publications_of(table, arms)):
            figures = (_figure(result, table, arm, name) for arm in arms)
            rows.append((*key[:-1], f"  {name}", *figures))
    across = [" ".join(key) for key in table.columns]
    title = f"{table.title}: {_heading(table.column)}"
    return TextTable(title, rows, (*table.row_labels, *across))


def _number(result: StudyResult, table: Table, arm: str | None) -> str:
    return "" if arm is None else cell_text(result.row(arm).cells[table.column.measurement])


def _figure(result: StudyResult, table: Table, arm: str | None, publication: str) -> str:
    ones = () if arm is None else result.row(arm).published.get(table.column.measurement, ())
    return ", ".join(published_text(one) for one in ones if one.publication == publication)


def _heading(column: Column) -> str:
    return f"{column.title} ({column.unit})" if column.unit else column.title


def _caption(result: StudyResult) -> str:
    marks = {str(cell.mark) for row in result.rows for cell in row.cells.values()}
    lines = [
        "mean ± standard deviation over runs" if any(c.n > 1 for r in result.rows for c in r.cells.values()) else "",
        INTERVALS if any(c.has_interval_of_mean for r in result.rows for c in r.cells.values()) else "",
        COEFFICIENTS if any(cell.text for row in result.rows for cell in row.cells.values()) else "",
        *(text for mark, text in MARKS.items() if mark in marks),
        *result.notes,
        " · ".join(
            filter(None, (result.hardware, result.date, result.commit and f"commit {short_commits(result.commit)}"))
        ),
        result.command,
    ]
    return "\n".join(filter(None, lines))


def _remarks(result: StudyResult) -> Iterator[tuple[str, str, str]]:
    """Yield the reasons for marked cells: arm, column and reason.

    A reason that all columns of an arm share, or all arms of a published figure, is given once.
    """
    for row in result.rows:
        reasons = [row.cells[column.measurement].reason for column in result.columns]
        if len(set(reasons)) == 1 and reasons[0]:
            yield row.arm, "all", reasons[0]
            continue
        for column, reason in zip(result.columns, reasons, strict=True):
            if reason:
                yield row.arm, column.title, reason
    of_published: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        for column in result.columns:
            for one in row.published.get(column.measurement, ()):
                if one.reason:
                    of_published.setdefault((f"{column.title}, {one.publication}", one.reason), []).append(row.arm)
    for (what, reason), arms in of_published.items():
        yield arms[0] if len(arms) == 1 else f"{len(arms)} arms", what, reason


def _differences(differences: Sequence[Difference], *, margin: float) -> TextTable:
    rows = []
    for one in differences:
        comparison = one.comparison
        verdict = "; ".join((comparison.text, *comparison.notes)) if comparison else f"not compared: {one.reason}"
        pairs = str(len(comparison.first)) if comparison else ""
        rows.append((f"{one.first} / {one.second}", one.measurement, pairs, _percent(one), verdict))
    caption = f"differences between runs of the same block; 95 % confidence; margin ±{100 * margin:g} %"
    return TextTable("comparisons", rows, ("arms", "measurement", "pairs", "difference (%)", "verdict"), caption)


def _percent(one: Difference) -> str:
    c = one.comparison
    if c is None or c.ratio is None or c.low is None or c.high is None:
        return ""
    mean, low, high = (100 * (ratio - 1) for ratio in (c.ratio, c.low, c.high))
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def plan_sheet(name: str, arms: Sequence[PlannedArm], blocks: Sequence[Sequence[str]]) -> TextTable:
    """Return the planned cost of each arm; `blocks` lists the arms without a result in each block.

    Money is shown only if all prices are in the same currency.
    """
    currency = _currency(arms)
    rows = [
        (
            f"{arm.name} (model {arm.model})" if arm.model else arm.name,
            "yes" if arm.runs else str(arm.mark),
            arm.layout,
            str(arm.num_ranks or ""),
            _of(arm.micro_batch_size, arm.global_batch_size),
            _text(arm.step_time_ms),
            _memory(arm),
            "" if arm.gpu_hours is None else f"{arm.gpu_hours:,.3g}",
            *([] if not currency else ["" if arm.cost is None else amount(arm.cost)]),
            str(arm.walltime_min or ""),
            "; ".join(filter(None, (_change(arm), arm.note, arm.reason))),
        )
        for arm in arms
    ]
    columns = (
        "arm",
        "can run",
        "layout",
        "ranks",
        "batch",
        "step time (ms)",
        "memory (GiB)",
        "GPU-hours",
        *([f"cost ({currency})"] if currency else []),
        "limit (min)",
    )
    needs = [f"before a launch: {one}" for one in dict.fromkeys(one for arm in arms for one in arm.before_launch)]
    order = [f"block {number}: {' · '.join(block)}" for number, block in enumerate(blocks, 1) if block]
    return TextTable(
        f"{name}: {counted(len(rows), 'arm')}",
        rows,
        (*columns, "note"),
        caption="\n".join([_total(arms, blocks), *needs, *order]),
    )


def _change(arm: PlannedArm) -> str:
    return f"differs from its label: {' '.join(arm.changed)}" if arm.changed else ""


def _total(arms: Sequence[PlannedArm], blocks: Sequence[Sequence[str]]) -> str:
    by_name = {arm.name: arm for arm in arms}
    left = [by_name[name] for block in blocks for name in block]
    num_done = sum(arm.runs for arm in arms) * len(blocks) - len(left)
    if not left:
        return f"all {num_done} runs are done" if num_done else "no arm can run"
    known = sum(arm.gpu_hours for arm in left if arm.gpu_hours is not None)
    unknown = len({arm.name for arm in left if arm.gpu_hours is None})
    total = f"{len(left)} of {len(left) + num_done} runs to do"
    total += "; step time, memory and GPU-hours per run are estimates"
    if known:
        total += f"; {number_text(known)} GPU-hours in total"
    if (currency := _currency(arms)) and (costs := [arm.cost for arm in left if arm.cost is not None]):
        total += f", {amount(sum(costs))} {currency}"
    limit_min = sum(arm.walltime_min or 0 for arm in left if arm.backend != BackendName.local.name)
    total += f"; time limits add up to {limit_min / 60:,.1f} h" if limit_min else ""
    return total + (f"; {counted(unknown, 'arm')} without an estimate" if unknown else "")


def _currency(arms: Sequence[PlannedArm]) -> str:
    """Return the currency of the arms' prices; empty if there is none, or if they have several."""
    currencies = {arm.currency for arm in arms if arm.currency}
    return currencies.pop() if len(currencies) == 1 else ""


def _of(micro: int | None, whole: int | None) -> str:
    return f"{micro} of {whole}" if micro and whole else ""


def _text(number: float | None) -> str:
    return "" if number is None else number_text(number)


def _memory(arm: PlannedArm) -> str:
    if arm.memory_gib is None:
        return ""
    return f"{arm.memory_gib:.1f}" + (f" of {arm.capacity_gib:g}" if arm.capacity_gib else "")
