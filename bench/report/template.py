"""Fill the templates of pages and documents. Text from logs is escaped, and cannot steer what shows it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import secrets
from bench.mlperf.reader import printable
from bench.report.numbers import minutes_text, number_text

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


def clean(text: str) -> str:
    """Return text from a log as it may be shown: no secrets, nothing that steers a terminal or breaks a line."""
    return printable(secrets.masked(text))


def page(template: str, context: Mapping[str, Any]) -> str:
    """Return an HTML page; None is blank."""
    environment = _environment(_blank_or(clean), autoescape=True)
    environment.filters |= {name: _blank_or_form(form) for name, form in _FORMS.items()}
    return environment.get_template(template).render(context)


def document(template: str, context: Mapping[str, Any], *, escape: Callable[[str], str]) -> str:
    """Return a text in another format, whose escape is applied to every value that is not marked as safe."""
    environment = _environment(_blank_or(lambda text: escape(clean(text))), autoescape=False)
    return environment.get_template(template).render(context)


def _environment(finalize: Callable[[Any], Any], *, autoescape: bool) -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=autoescape,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _blank_or(shown: Callable[[str], str]) -> Callable[[Any], Any]:
    """Return what shows a value of a template; a Markup is a str that was made safe before."""
    return lambda value: "" if value is None else shown(value) if type(value) is str else value


def _blank_or_form(form: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else form(value)
