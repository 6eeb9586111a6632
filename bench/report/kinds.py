"""How each kind of task is shown: on the screen, and as files to hand on."""

import csv
import importlib
import io
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from bench.contract.plan import Plan
from bench.contract.task import Kind
from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.report import output_folder, template
from bench.report.sets import sets_in
from bench.report.tables import Row, TextTable, inert
from bench.results import kind as kinds
from bench.results.kind import KINDS, Judged, KindResult

PAGE = "report.html"
MOST_PROBLEMS = 5
"""So many problems are listed in a row; the others are counted."""
P = TypeVar("P", bound=Plan)
R = TypeVar("R", bound=KindResult)


@dataclass(frozen=True, slots=True)
class ShownTrial(Generic[R]):
    """The log of one trial, judged, and what a table or a page calls it."""

    name: str
    judged: Judged

    @property
    def found(self) -> R:
        """What it measured."""
        return cast(R, self.judged.of_kind)

    @property
    def valid_row(self) -> Row:
        """Whether the trial is valid, and what keeps it from being so."""
        problems = self.judged.problems
        shown = "; ".join(problems[:MOST_PROBLEMS])
        more = f"; {len(problems) - MOST_PROBLEMS} more" if problems[MOST_PROBLEMS:] else ""
        return "valid trial", "yes" if self.found.valid else "no", shown + more


class Report(Protocol):
    """What `runstop report` shows of some folders."""

    @property
    def valid(self) -> bool:
        """Whether what is shown is proven."""

    def tables(self, page: Path | None) -> Iterable[TextTable]:
        """Return the tables for the screen; `page` is where the page was written, if it was."""

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return one row for each trial, as JSON holds it."""

    def csv_text(self) -> str:
        """Return a table as CSV."""

    def write(self, out: Path, *, title: str | None) -> Path:
        """Write the page, its tables and figures into a folder, and return the page's path.

        Raises:
            ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
        """


class KindReport(ABC, Generic[P, R]):
    """How tasks of one kind are shown."""

    work: ClassVar[str]
    """What its runs do, in words: generate, load a server."""
    page_shows: ClassVar[str]
    """What its page shows: every answer, and its figure."""

    @abstractmethod
    def plan_rows(self, plan: P) -> list[tuple[str, str]]:
        """Return what a plan says, by name, without what every plan says."""

    @abstractmethod
    def tables(self, trial: ShownTrial[R], *, more: Sequence[Row] = ()) -> list[TextTable]:
        """Return what a trial is worth, as tables; `more` are rows for the first of them."""

    @abstractmethod
    def load(self, paths: Sequence[Path], *, num_gpus: int | None) -> Report:
        """Return the report of run folders and logs.

        Raises:
            ConfigError, LogError: they cannot be shown together, or a log cannot be read.
        """

    def detail_tables(self, trial: ShownTrial[R]) -> list[TextTable]:
        """Return the tables that `parse` and `report` show besides."""
        return []

    def parse_rows(self, trial: ShownTrial[R]) -> list[Row]:
        """Return the rows that `parse` adds to what a trial is worth."""
        return []

    def json_fields(self, found: R) -> dict[str, Any]:
        """Return what JSON has of a trial, besides what it has of every trial."""
        return {}

    def files(self, folder: Path, trial: int, found: R) -> list[Row]:
        """Return rows with the files of a trial that has just ended; figures are drawn now."""
        return []

    def next_step(self, plan: P, folder: str) -> str:
        """Return what one would type next after a run that succeeded; empty if nothing."""
        return f"{self.page_shows}: python -m bench report {folder} -o FOLDER"


class TrialsKindReport(KindReport[P, R]):
    """How tasks of a kind are shown whose trials are shown one by one."""

    table_name: ClassVar[str]
    table_columns: ClassVar[Sequence[str]]
    template: ClassVar[str] = "trials.html.j2"
    figure_names: ClassVar[Sequence[str]] = ()
    """Of all PNG files that a page may have, without .png."""

    @abstractmethod
    def title(self, trial: ShownTrial[R]) -> str:
        """Return the name of the task, and where it ran."""

    @abstractmethod
    def table_rows(self, trial: ShownTrial[R]) -> Iterator[Sequence[object]]:
        """Yield the rows of the CSV table, without the trial's name."""

    def page_context(self, trials: Sequence[ShownTrial[R]], out: Path, *, heading: str) -> dict[str, Any]:
        """Draw the figures into a folder, and return what the page's template needs: by default, the tables."""
        return {"sections": [{"name": trial.name, "tables": self.tables(trial)} for trial in trials]}

    def load(self, paths: Sequence[Path], *, num_gpus: int | None) -> "TrialsReport[R]":
        trials: list[ShownTrial[R]] = [ShownTrial(name, kinds.read(file)) for name, file in _logs(paths)]
        if num_gpus is not None:
            raise ConfigError(
                "--num-gpus with logs of a task that trains nothing",
                where=trials[0].judged.result.file,
                fix="leave that out: only logs of training have a use for it",
            )
        return TrialsReport(self, trials)


@dataclass(frozen=True, slots=True)
class TrialsReport(Generic[R]):
    """The trials of some folders, one by one."""

    shown: TrialsKindReport[Any, R]
    trials: Sequence[ShownTrial[R]]

    @property
    def valid(self) -> bool:
        return all(trial.found.valid for trial in self.trials)

    def tables(self, page: Path | None) -> Iterator[TextTable]:
        for trial in self.trials:
            yield from self.shown.tables(trial)
            yield from self.shown.detail_tables(trial)

    def rows(self) -> Iterator[dict[str, Any]]:
        for trial in self.trials:
            measured = [asdict(one) for one in trial.found.measurements]
            yield {"trial": trial.name, "valid": trial.found.valid, "measurements": measured}

    def csv_text(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["trial", *self.shown.table_columns])
        for trial in self.trials:
            writer.writerows([inert(value) for value in (trial.name, *row)] for row in self.shown.table_rows(trial))
        return text.getvalue()

    def write(self, out: Path, *, title: str | None) -> Path:
        shown, heading = self.shown, title or self.shown.title(self.trials[-1])
        figures = "|".join(map(re.escape, shown.figure_names))
        names = re.compile(rf"{re.escape(PAGE)}|{re.escape(shown.table_name)}|({figures})\.png")
        output_folder.write(out, lambda part: self._write(part, heading), page=PAGE, names=names)
        return out / PAGE

    def _write(self, out: Path, heading: str) -> None:
        (out / self.shown.table_name).write_text(self.csv_text(), encoding="utf-8")
        context = {"title": heading, "charts": {}, "versions": {"runstop": version("runstop")}}
        context |= self.shown.page_context(self.trials, out, heading=heading)
        page = template.page(self.shown.template, context | template.context(has_charts=False))
        (out / PAGE).write_text(page, encoding="utf-8")


def of(kind: Kind) -> KindReport[Any, Any]:
    """Return how a kind is shown; what draws pages is imported now."""
    shown: KindReport[Any, Any] = importlib.import_module(KINDS[kind].shown_by).REPORT
    return shown


def load(paths: Sequence[Path], *, num_gpus: int | None = None) -> Report:
    """Return the report of logs, run folders and folders of such folders, whose tasks are all of one kind.

    Raises:
        ConfigError: some are of one kind, and some of another.
        LogError: a log cannot be read.
    """
    found: dict[Kind, list[str]] = {}
    for name, file in _logs(paths):
        found.setdefault(kinds.kind_of(logs.read(file)), []).append(name if name == str(file) else str(file.parent))
    if len(found) > 1:
        (first, _), *others = found.items()
        raise ConfigError(
            f"runs that {of(first).work}, and runs that {of(others[0][0]).work}, are not shown on one page",
            where=", ".join(dict.fromkeys(others[0][1])),
            fix="report each kind by itself",
        )
    return of(next(iter(found), Kind.train)).load(paths, num_gpus=num_gpus)


def _logs(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each log of the paths with its name: that of its run folder and file, or the path that was given."""
    for path in itertools.chain.from_iterable(map(sets_in, paths)):
        for file in sorted(path.glob("result_*.txt")) if path.is_dir() else [path]:
            if file.is_file():
                yield (f"{file.parent.name}/{file.stem}" if path.is_dir() else str(file)), file
