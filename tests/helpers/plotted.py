"""What a figure of matplotlib shows: its texts, lines, bars and areas, and how they look."""

from collections import Counter
from collections.abc import Iterator

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text


def described(figure: Figure) -> list[object]:
    """Return the texts of a figure, what each panel shows, and how often which look occurs."""
    panels: list[object] = [text.get_text() for text in figure.texts]
    panels += [_panel(axes) for axes in figure.axes]
    panels.append({"inches": figure.get_size_inches().tolist(), "dpi": figure.dpi})
    counts = Counter(look for artist in figure.findobj() if artist.get_visible() for look in _looks(artist))
    panels.append(dict(sorted(counts.items())))
    return panels


def _panel(axes: Axes) -> dict[str, object]:
    legend = axes.get_legend()
    titles = [axes.get_title(), axes.get_title(loc="left"), axes.get_title(loc="right")]
    return {
        "names": [*titles, axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()],
        "limits": [*axes.get_xlim(), *axes.get_ylim()],
        "ticks": " | ".join(text.get_text() for text in (*axes.get_xticklabels(), *axes.get_yticklabels())),
        "texts": {f"{n} {text.get_text()}": text.get_position() for n, text in enumerate(axes.texts)},
        "legend": " | ".join(text.get_text() for text in legend.get_texts()) if legend else "",
        "lines": {f"{n} {line.get_label()}": _points(line) for n, line in enumerate(axes.get_lines())},
        "patches": dict(enumerate(map(str, axes.patches))),
        "areas": [[path.vertices.tolist() for path in one.get_paths()] for one in axes.collections],
        "spines": [name for name, spine in axes.spines.items() if spine.get_visible()],
    }


def _points(line: Line2D) -> list[object]:
    """Return the sums of a line's coordinates, and its points."""
    points = line.get_xydata().tolist()
    return [[sum(place) for place in zip(*points, strict=True)], points]


def _looks(artist: Artist) -> Iterator[str]:
    """Yield how a visible artist looks, in words; nothing for those that only hold others."""
    if isinstance(artist, Text):
        if artist.get_text():
            where = (artist.get_ha(), artist.get_va(), artist.get_rotation(), artist.get_fontweight())
            yield f"text {to_hex(artist.get_color())} {artist.get_fontsize():g} {where} {artist.get_parse_math()}"
    elif isinstance(artist, Line2D):
        marker = (artist.get_marker(), artist.get_markersize(), artist.get_markeredgecolor())
        style = (artist.get_linestyle(), artist.get_linewidth(), artist.get_drawstyle(), artist.get_solid_capstyle())
        yield f"line {to_hex(artist.get_color())} {artist.get_alpha()} {style} {marker} {artist.get_zorder()}"
    elif isinstance(artist, Patch):
        colors = (to_hex(artist.get_facecolor(), keep_alpha=True), to_hex(artist.get_edgecolor(), keep_alpha=True))
        yield f"patch {type(artist).__name__} {colors} {artist.get_linewidth()} {artist.get_hatch()}"
    elif isinstance(artist, Collection):
        colors = [to_hex(color, keep_alpha=True) for color in (*artist.get_facecolor(), *artist.get_edgecolor())]
        yield f"area {type(artist).__name__} {colors} {artist.get_linewidth()} {artist.get_zorder()}"
