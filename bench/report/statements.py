"""The statements of a study with their verdicts, as rows of text."""

from bench.results.statement import StatementResult, range_text
from bench.results.study import StudyResult

STATEMENT_HEADINGS = ("statement", "measurement", "bound", "ratio", "n", "published", "decided by", "verdict")


def statement_rows(result: StudyResult) -> tuple[tuple[str, ...], ...]:
    """Return the cells of each statement, in the order of STATEMENT_HEADINGS; the ratio is the one that decides."""
    titles = {column.measurement: column.title for column in result.columns}
    titles |= {"": "GPU memory"}  # of statements whether arms fit
    return tuple(_statement_row(one, titles.get(one.measurement, one.measurement)) for one in result.statements)


def _statement_row(one: StatementResult, title: str) -> tuple[str, ...]:
    decided = one.decided_by
    published = (
        f"{range_text(each.low, each.high)} ({each.publication}{'' if each.within else ': outside'})"
        for each in one.published
    )
    return (
        f"{one.platform}: {one.text}" if one.platform else one.text,
        title,
        one.bounds.text,
        range_text(decided.low, decided.high) if decided else "",
        str(decided.n) if decided else "",
        "; ".join(published),
        one.reason,
        str(one.verdict),
    )


STATEMENTS_CAPTION = (
    "A ratio is that of two arms in the blocks that both have, with its 95 % interval; the one that decides is "
    "shown. A statement holds if the intervals of all its pairs of arms are within the bound, and does not hold if "
    "one is beyond it (with a higher confidence for several pairs). Published ratios have no interval."
)
