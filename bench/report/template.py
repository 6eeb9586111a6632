"""Render page templates. Text from logs is escaped, so that it cannot inject markup."""

import base64
import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.mlperf.reader import clean
from bench.report.tables import minutes_text, number_text, sentence
from bench.texts import short_commits

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


def page(template: str, context: Mapping[str, Any], *, folder: Path = _FOLDER) -> str:
    """Return an HTML page; None is rendered as empty text. The template is in the folder, or among those of reports."""
    return _environment(folder).get_template(template).render(context)


@cache
def _environment(folder: Path) -> "Environment":
    """Return the Jinja environment of a folder, which caches compiled templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, _FOLDER]),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sentence": sentence, "short_commits": short_commits} | {
        name: _blank_or_form(form) for name, form in _FORMS.items()
    }
    return environment


def _shown(value: Any) -> Any:
    """Return the text of a value; a Markup is already escaped."""
    return "" if value is None else clean(value) if type(value) is str else value


def _blank_or_form(form: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else form(value)


Chart = dict[str, Any]
"""A chart of page.js: a list of views, each with a name, plotly traces, and additions to the page's layout."""
Charts = dict[str, tuple[str, Chart]]
"""Titles and charts, by their ids in a page."""
Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One of the main numbers at the top of a page."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    is_bad: bool = False


def context(*, has_charts: bool = True) -> dict[str, Any]:
    """Return the variables of the base template: the scripts, and a security policy that allows only these.

    A page with charts includes the plotting library as gzip in base64: page.js unpacks it into a script element.
    """
    scripts = (library(), _own_script()) if has_charts else (_own_script(),)
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    return {"policy": policy, "script": _own_script(), "library": _packed_library() if has_charts else ""}


@cache
def library() -> str:
    """Return the plotting library."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def _packed_library() -> str:
    """Return the plotting library in 40 % of its size."""
    return base64.b64encode(gzip.compress(library().encode(), mtime=0)).decode()


@cache
def _own_script() -> str:
    """Return page.js, after checking that it cannot end its script element."""
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    assert "</script" not in script.lower() and "<!--" not in script
    return script


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def chart(*views: Chart) -> Chart:
    """Return a chart with one or more selectable views; empty views are left out."""
    return {"views": [view for view in views if view["traces"]]}


def view(name: str, traces: Sequence[Trace], *, narrow: Mapping[str, Any] | None = None, **layout: Any) -> Chart:
    """Return a view; `narrow` are additions to its layout on a narrow screen."""
    return {"name": name, "traces": list(traces), "layout": layout} | ({"narrow": dict(narrow)} if narrow else {})


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": text(title)}, **more}


def text(value: str, *, limit: int = 80) -> str:
    """Return text of a log for plotly: tags and templates are escaped, and long text is cut."""
    value = clean(value).replace("%{", "% {")
    return escape(value if len(value) <= limit else f"{value[: limit - 1]}…", quote=False)
