"""What makes a page interactive: the plotting library, our own script, and the policy that allows these two alone.

The library is plotly.js, as the `plotly` package ships it: MIT licence, well kept, and its figures are plain JSON that
is documented key by key, so that Python writes data and no code. It works from a file, without a network. Its price is
its size, 4.8 MB in each page. Bokeh's script has 1.3 MB, but its documents must be made by Bokeh's own objects, which
are numbered anew in each process, so that the same input would not give the same page; and it brings a web server
along. No package on PyPI ships plotly's smaller bundles, or uPlot.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from bench.mlperf.reader import clean

Chart = dict[str, Any]
"""What page.js draws: a list of views, each a name, plotly's traces, and what its layout adds to that of the page."""
Trace = dict[str, Any]


def context(*, has_charts: bool = True) -> dict[str, Any]:
    """Return what the base template needs: both scripts, and the policy that lets no other run or load anything.

    A page without charts does without the plotting library.
    """
    scripts = (_library(), _own_script()) if has_charts else (_own_script(),)
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    return {"policy": policy, "scripts": scripts}


@cache
def _library() -> str:
    from plotly.offline import get_plotlyjs

    return _closed(get_plotlyjs())


@cache
def _own_script() -> str:
    return _closed((Path(__file__).parent / "page.js").read_text(encoding="utf-8"))


def _closed(script: str) -> str:
    """Return a script after making sure that it does not end its own element."""
    assert "</script" not in script.lower() and "<!--" not in script
    return script


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def chart(*views: Chart) -> Chart:
    """Return a chart that shows one view at a time, which its reader chooses; empty views are left out."""
    return {"views": [view for view in views if view["traces"]]}


def view(name: str, traces: Sequence[Trace], **layout: Any) -> Chart:
    return {"name": name, "traces": list(traces), "layout": layout}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": text(title)}, **more}


def text(value: str, *, limit: int = 80) -> str:
    """Return text of a log as plotly shows it: neither tags nor templates, which plotly would obey, and not endless."""
    value = clean(value).replace("%{", "% {")
    return escape(value if len(value) <= limit else f"{value[: limit - 1]}…", quote=False)
