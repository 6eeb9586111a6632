"""Short names for legends, and ticks of logarithmic axes."""

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from bench.report.tables import number_text

_LONG = 20
"""Names of at most this many characters are shown as they are."""
_MARKS = re.compile(r"[-./, ]+")
_WHEN = re.compile(r"\d{8}|\d{6}")
"""Date and time in the name of a run folder."""
_STEPS = ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
_FEWEST_TICKS, _MOST_TICKS = 4, 10


def short(names: Sequence[str]) -> list[str]:
    """Return a short label for each name: only the parts that differ, without date and time if the rest is unique.

    Names such as 20261126-034209-lora_tiny-local-e944 become lora_tiny-e944, or e944 if all are of the same task.
    """
    if len(names) < 2 or all(len(name) <= _LONG for name in names) or len(set(names)) < len(names):
        return [*names]
    parts = [[part for part in _MARKS.split(name) if part] for name in names]
    common = set.intersection(*map(set, parts))
    differing = [[part for part in of_name if part not in common] for of_name in parts]
    timeless = [[part for part in of_name if not _WHEN.fullmatch(part)] for of_name in differing]
    for chosen in (timeless, differing):
        labels = ["-".join(of_name) for of_name in chosen]
        if all(labels) and len(set(labels)) == len(labels):
            return labels
    return [*names]


def wrapped(name: str, *, width: int = 17, lines: int = 2) -> str:
    """Return a name in a few lines for the axis of a narrow chart; it is cut if it is longer. Markup is kept whole."""
    bold = name.startswith("<b>") and name.endswith("</b>")
    rows: list[str] = []
    for part in name.removeprefix("<b>").removesuffix("</b>").split():
        for piece in re.findall(rf"(?:&\w+;|.){{1,{width}}}", part):
            if rows and len(rows[-1]) + 1 + len(piece) <= width:
                rows[-1] += f" {piece}"
            else:
                rows.append(piece)
    if len(rows) > lines:
        last = "".join(re.findall(r"&\w+;|.", rows[lines - 1])[: width - 1])
        rows = [*rows[: lines - 1], f"{last.rstrip()}…"]
    text = "<br>".join(rows)
    return f"<b>{text}</b>" if bold else text


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis whose ticks are whole numbers where possible, such as 50, 100, 200."""
    ticks = log_ticks(low, high)
    return {"type": "log", "tickvals": ticks, "ticktext": [tick_text(tick) for tick in ticks]}


def log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks between two positive numbers: 1, 2 and 5 times the powers of ten, or more or fewer of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**power for power in range(first, min(last, sys.float_info.max_10_exp) + 1)]
    ticks: list[float] = []
    for steps in _STEPS:
        ticks = [step * power for power in powers for step in steps if low <= step * power <= high]
        if len(ticks) >= _FEWEST_TICKS:
            break
    if len(ticks) > _MOST_TICKS:
        ticks = [power for power in powers if low <= power <= high]
    return [float(f"{tick:.6g}") for tick in ticks]


def tick_text(tick: float) -> str:
    return f"{tick:,.10g}" if tick >= 1 else number_text(tick).rstrip("0")


def bytes_text(count: float) -> str:
    """Return a number of bytes in binary units, such as 4 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
