"""The cells of a study's tables as text."""

import math

from bench.report.tables import MOST_DECIMALS, digits, number_text
from bench.results.study import Cell, Mark, Published


def cell_text(cell: Cell) -> str:
    """Return a mark, or a number and its deviation over runs, neither with more digits than the spread allows.

    A coefficient has its interval in brackets instead.

    The deviation has two digits, whole numbers all of theirs: "* 1,234.5 ± 6.7".
    """
    if cell.value is None:
        return str(cell.mark)
    number = cell.text or number_text(cell.value)
    if cell.deviation is not None:
        decimals = _decimals(cell.deviation, cell.value)
        number = f"{cell.value:,.{decimals}f} ± {cell.deviation:,.{decimals}f}"
    return f"{cell.mark} {number}".strip() if cell.mark is not Mark.measured else number


def _decimals(deviation: float, value: float) -> int:
    """Return how many decimals show two digits of a deviation; without one, four digits of the value."""
    if deviation == 0:
        return digits(value)
    return max(0, min(MOST_DECIMALS, 1 - math.floor(math.log10(deviation))))


def meant(figure: Published) -> str:
    """Return a published figure in the unit of its column: as its document has it, where that is the same number."""
    if figure.value is None or figure.printed == "" or _is_printed(figure.value, figure.printed):
        return figure.printed
    return number_text(figure.value)


def _is_printed(value: float, printed: str) -> bool:
    try:
        number = float(printed.partition("±")[0].strip(" *~%").replace(",", ""))
    except ValueError:
        return False
    return math.isclose(number, value, rel_tol=1e-9)


def published_text(figure: Published) -> str:
    """Return a published figure, with what its document has where that is corrected."""
    if not figure.reason or meant(figure) == figure.printed:
        return meant(figure)
    return f"{meant(figure)} (printed {figure.printed!r})"
