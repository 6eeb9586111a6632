"""Write a study: tables as Markdown, CSV, LaTeX and an HTML page, figures as PNG."""

import re
from functools import partial
from pathlib import Path

from bench.report import output_folder, template
from bench.report.study import page
from bench.report.study.latex import latex
from bench.report.study.layout import layout_of
from bench.report.study.markdown import markdown
from bench.report.study.records import csv
from bench.results.study import StudyResult

PAGE = "index.html"
_FILES = re.compile(r"index\.html|table\.(md|csv|tex)|(bars|scaling|cdf)_\d+\.png|(pairs|step_time_distribution)\.png")
"""Names of the files of a study's report."""


def write_study(result: StudyResult, out: Path) -> list[Path]:
    """Implement `bench.report.write_study`."""
    output_folder.write(out, partial(_write, result, out), page=PAGE, names=_FILES)
    return [out / name for name in ("table.md", "table.csv", "table.tex", PAGE)] + sorted(out.glob("*.png"))


def _write(result: StudyResult, out: Path, part: Path) -> None:
    """Write all files into `part`, with links that are relative to `out`."""
    layout = layout_of(result, out.resolve())
    documents = {
        "table.md": markdown(result, layout),
        "table.csv": csv(result),
        "table.tex": latex(result, layout),
        PAGE: template.page("study/study.html.j2", page.context(result, layout, part)),
    }
    for name, content in documents.items():
        (part / name).write_text(content, encoding="utf-8")
