"""The colours of figures and pages: apart in hue and in lightness, so that they stay apart for the colour-blind."""

COLORS = ("#1f5a8c", "#e07b00", "#0f9488", "#8250a0", "#a0741c", "#5b6670", "#4a9fe0", "#c05a8a", "#6b8e23", "#7a4b2a")
"""Of what is compared, in this order. Red is left for what is not valid, and for a target."""
INVALID_COLOR = "#c0392b"
PUBLISHED_COLOR = "#b4bfc9"
"""Of what somebody else has measured; its bars are hatched, too."""
BAND_COLOR = "rgba(180, 191, 201, 0.35)"
INTERVAL_COLOR = "#30363c"


def pale(color: str) -> str:
    """Return a colour mixed with white, for a published figure beside a measured one."""
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - _STRENGTH * (255 - part)):02x}" for part in parts)


_STRENGTH = 0.45
