"""The cells of a study's tables as text."""

import math

from bench.report.tables import MOST_DECIMALS, digits, number_text
from bench.results.study import Cell, Mark, Published


def cell_text(cell: Cell) -> str:
    """Return a mark, or a number and its standard deviation over runs, such as "* 1,234.5 ± 6.7".

    The deviation has two significant digits (whole numbers keep all digits), the number as many decimals.
    A coefficient has its interval in brackets instead, and so has the mean in a column that shows intervals.
    """
    if cell.value is None:
        return str(cell.mark)
    number = cell.text or number_text(cell.value)
    if cell.has_interval_of_mean and cell.low is not None and cell.high is not None:
        decimals = _decimals((cell.high - cell.low) / 2, cell.value)
        number = f"{cell.value:,.{decimals}f} ({cell.low:,.{decimals}f} to {cell.high:,.{decimals}f})"
    elif cell.deviation is not None:
        decimals = _decimals(cell.deviation, cell.value)
        number = f"{cell.value:,.{decimals}f} ± {cell.deviation:,.{decimals}f}"
    return f"{cell.mark} {number}".strip() if cell.mark is not Mark.measured else number


def _decimals(deviation: float, value: float) -> int:
    """Return the decimals for two significant digits of a deviation; if it is 0, for four digits of the value."""
    if deviation == 0:
        return digits(value)
    return max(0, min(MOST_DECIMALS, 1 - math.floor(math.log10(deviation))))


def in_column_unit(figure: Published) -> str:
    """Return a published figure in the unit of its column, in the document's own notation if the number is the same."""
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
    """Return a published figure; a corrected one is followed by the printed text."""
    if not figure.reason or in_column_unit(figure) == figure.printed:
        return in_column_unit(figure)
    return f"{in_column_unit(figure)} (printed {figure.printed!r})"
