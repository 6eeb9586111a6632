"""Tables as data frames of pandas, whose texts neither a terminal nor a spreadsheet takes for an order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.mlperf.reader import clean

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> "DataFrame":
    """Return a data frame in which whole numbers stay whole where some are missing."""
    from pandas import DataFrame

    return DataFrame([[inert(value) for value in row] for row in rows], columns=columns).convert_dtypes()


def inert(value: Any) -> Any:
    """Return a value as it may be written: logs are not ours."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
