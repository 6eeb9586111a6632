"""The common layout of all figures: size, colours, title and footer."""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.mlperf.reader import printable
from bench.mlperf.result import UNVERIFIED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TRAIN_COLOR, EVAL_COLOR, TARGET_COLOR, QUIET_COLOR = "#9db4c8", "#1f5a8c", "#c0392b", "#c9d3dc"
"""Blues and one red that differ in hue and lightness: distinct in greyscale and for the colour-blind."""
_WIDTH_INCHES, _NOTE_LETTERS = 8, 125
MAX_HEADING, _MAX_WHERE = 75, 500
"""Maximum characters. Long names of logs or folders would leave no room for the drawing."""
INK, FAINT_INK = "#222222", "#666666"
CURVE_INTERVAL_COLOR = "#e08a00"


def shortened(name: str, *, limit: int = 54) -> str:
    name = printable(name)
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def footer(where: str | None, num_runs: int) -> str:
    """Return the footer of a figure: verification status, hardware and number of runs."""
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    return f"{UNVERIFIED} {shortened(where or 'hardware not logged', limit=_MAX_WHERE)}, n = {runs}"


def canvas(height_inches: float, heading: str, note: str, *, panels: int = 1) -> "tuple[Figure, Sequence[Axes]]":
    """Return a figure with its title, its footer and a row of empty panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    heading = shortened(heading, limit=MAX_HEADING)
    figure.suptitle(heading, x=0.01, ha="left", fontweight="bold", fontsize=10.5, parse_math=False)
    wrapped = "\n".join(textwrap.wrap(printable(note).replace(" = ", "\xa0=\xa0"), _NOTE_LETTERS))
    figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=7.5, color=FAINT_INK, parse_math=False)
    subplots = [figure.add_subplot(1, panels, number + 1) for number in range(panels)]
    for axes in subplots:
        axes.set_axisbelow(True)
        axes.grid(color="#ececec")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(labelsize=8, color="#999999")
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
        axes.locator_params(axis="x", nbins=6 if panels == 1 else 5)
    return figure, subplots


def save(figure: "Figure", path: Path) -> None:
    """Lay the figure out and write it. Without this, matplotlib draws it twice to find the layout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter that the font lacks is drawn as a box
        if layout := figure.get_layout_engine():
            layout.execute(figure)
            figure.set_layout_engine("none")
        figure.savefig(path, format="png")


def empty(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT_INK)


COLORS = ("#1f5a8c", "#e07b00", "#0f9488", "#8250a0", "#a0741c", "#5b6670", "#4a9fe0", "#c05a8a", "#6b8e23", "#7a4b2a")
"""Colours of compared series, in this order. Red is reserved for invalid trials and targets."""
INVALID_COLOR = "#c0392b"
PUBLISHED_COLOR = "#b4bfc9"
"""Colour of published results; their bars are also hatched."""
BAND_COLOR = "rgba(180, 191, 201, 0.35)"
INTERVAL_COLOR = "#30363c"


def pale(color: str) -> str:
    """Return a colour mixed with white, for a published figure next to a measured one."""
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - _STRENGTH * (255 - part)):02x}" for part in parts)


_STRENGTH = 0.45
