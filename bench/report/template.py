"""Fill the templates of pages. Text from logs is escaped, and cannot steer what shows it."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.mlperf.reader import clean
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
