"""The cells of a study's tables as text."""

from bench.report.numbers import digits, number_text
from bench.results.study import Cell, Mark, Published


def cell_text(cell: Cell) -> str:
    """Return a mark, or a number with its deviation over runs: "* 1,234.5 ± 6.7"; the deviation has two digits."""
    if cell.value is None:
        return str(cell.mark)
    decimals = digits(cell.value)
    number = number_text(cell.value)
    if cell.deviation is not None:
        number += f" ± {cell.deviation:,.{max(decimals, _decimals_of_two_digits(cell.deviation))}f}"
    return f"{cell.mark} {number}".strip() if cell.mark is not Mark.measured else number


def _decimals_of_two_digits(deviation: float) -> int:
    return 0 if deviation >= 10 or deviation == 0 else 1 if deviation >= 1 else 2


def published_text(figure: Published) -> str:
    """Return a published figure as its document has it, with what is meant where that is misprinted."""
    if not figure.reason or figure.value is None:
        return figure.printed
    return f"{number_text(figure.value)} (printed {figure.printed!r})"
