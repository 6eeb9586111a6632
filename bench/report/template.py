"""Fill the templates of pages. Text from logs is escaped, and cannot steer what shows it."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.mlperf.reader import clean
from bench.report.tables import minutes_text, number_text

if TYPE_CHECKING:
    from jinja2 import Environment


_FOLDER = Path(__file__).parent
_FORMS: dict[str, Callable[[float], str]] = {
    "minutes": minutes_text,
    "number": number_text,
    "count": "{:,.0f}".format,
    "ratio": "{:.3f}".format,
    "value": "{:#.4g}".format,
}


def page(template: str, context: Mapping[str, Any]) -> str:
    """Return an HTML page; None is blank."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> "Environment":
    """Return what reads the templates; it compiles each of them once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: _blank_or_form(form) for name, form in _FORMS.items()}
    return environment


def _shown(value: Any) -> Any:
    """Return what stands in the place of a value; a Markup is a str that was made safe before."""
    return "" if value is None else clean(value) if type(value) is str else value


def _blank_or_form(form: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else form(value)


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
