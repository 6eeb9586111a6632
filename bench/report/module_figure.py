"""Draw where the time of a step goes: one stacked bar for each phase, with the parts that take longest."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract.modules import TITLES, ModuleTimes, Part, Phase
from bench.report.canvas import INK, canvas, save
from bench.results.modules import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    Part.qkv: "#1f5a8c",
    Part.output: "#5b8db8",
    Part.attention: "#e08a00",
    Part.scores: "#e08a00",
    Part.softmax: "#ffb84d",
    Part.values: "#b36e00",
    Part.rope: "#f2c879",
    Part.fc1: "#0b6e4f",
    Part.activation: "#8fc9ae",
    Part.fc2: "#3fa07c",
    Part.adapters: "#7b4ea3",
    Part.norm: "#b79fd1",
    Part.head: "#8c564b",
    Part.loss: "#c9a79d",
    Part.weights: "#6f7d3c",
    Part.adamw: "#274060",
    Part.communication: "#c0392b",
    Part.copies: "#e79a90",
    Part.gap: "#e4e4e4",
}
OTHER, OTHER_COLOR = "all other parts", "#9aa3ab"
_LEAST_SHARE, _LEAST_TO_LABEL = 0.01, 0.06
"""Of the longest bar: what is less belongs to the other parts; what is less has no number in it."""
_BAR_INCHES, _MARGIN_INCHES = 0.42, 1.9


def module_figure(profiles: Sequence[tuple[str, ModuleTimes]], path: Path, *, heading: str, note: str) -> None:
    """Draw profiles, each with its name, as a PNG: a bar for each phase, in milliseconds a step from zero."""
    bars = [
        (f"{name} {phase}" if len(profiles) > 1 else str(phase), segments(times, phase))
        for name, times in profiles
        for phase in PHASES
    ]
    figure, (axes,) = canvas(_MARGIN_INCHES + _BAR_INCHES * len(bars), heading, note)
    longest = max(sum(found.values()) for _, found in bars)
    for place, (_, found) in enumerate(bars):
        _draw_bar(axes, place, found, longest)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.set_xlim(left=0)
    handles, labels = axes.get_legend_handles_labels()
    drawn = dict(zip(labels, handles, strict=True))
    names = [name for name in (*(TITLES[part] for part in COLORS), OTHER) if name in drawn]
    figure.legend([drawn[name] for name in names], names, loc="outside right upper", fontsize=7, frameon=False)
    save(figure, path)


def segments(times: ModuleTimes, phase: Phase) -> dict[str, float]:
    """Return the milliseconds of a phase by what a legend names; parts that can hardly be seen are one of them."""
    of_phase: dict[Part, float] = {row.part: row.time_ms for row in times.rows if row.phase is phase}
    shown = {part: ms for part, ms in of_phase.items() if part in COLORS and ms >= _LEAST_SHARE * times.step_ms}
    other_ms = sum(of_phase.values()) - sum(shown.values())
    return {TITLES[part]: ms for part, ms in shown.items()} | ({OTHER: other_ms} if other_ms > 0 else {})


def _draw_bar(axes: "Axes", place: int, found: dict[str, float], longest: float) -> None:
    colors, left = {TITLES[part]: color for part, color in COLORS.items()} | {OTHER: OTHER_COLOR}, 0.0
    for title, ms in found.items():
        axes.barh(place, ms, left=left, color=colors[title], label=title, edgecolor="white", linewidth=0.4)
        if ms >= _LEAST_TO_LABEL * longest:
            color, middle = _ink(colors[title]), left + ms / 2
            axes.text(middle, place, f"{ms:,.1f}", ha="center", va="center", fontsize=7, color=color)
        left += ms


def _ink(color: str) -> str:
    """Return a colour of letters that can be read on a bar."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "#ffffff"
