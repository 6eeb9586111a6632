"""Show plans and results of each kind of task: tables for the terminal, and report files."""

import csv
import importlib
import io
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

from bench.contract.plan import Plan
from bench.contract.task import Kind
from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.report import output_folder, trials_page
from bench.report.sets import sets_in
from bench.report.tables import Row, TextTable, inert
from bench.report.template import Card, Charts
from bench.results import kind as kinds
from bench.results.kind import KINDS, Judged, KindResult

if TYPE_CHECKING:
    from bench.report.drawings import Shown

PAGE = "report.html"
MOST_PROBLEMS = 5
"""The number of problems that a row lists; the others are counted."""
P = TypeVar("P", bound=Plan)
R = TypeVar("R", bound=KindResult)


@dataclass(frozen=True, slots=True)
class ShownTrial(Generic[R]):
    """One trial with its verdict, and its name in tables and pages."""

    name: str
    judged: Judged

    @property
    def kind_result(self) -> R:
        """The result of the trial's kind: training, generation, serving or kernels."""
        return cast(R, self.judged.of_kind)

    @property
    def valid_row(self) -> Row:
        """Whether the trial is valid, and if not, why."""
        problems = self.judged.problems
        shown = "; ".join(problems[:MOST_PROBLEMS])
        more = f"; {len(problems) - MOST_PROBLEMS} more" if problems[MOST_PROBLEMS:] else ""
        return "valid trial", "yes" if self.kind_result.valid else "no", shown + more


class Report(Protocol):
    """The output of `runstop report` for some run folders."""

    @property
    def valid(self) -> bool:
        """Whether the result is valid."""

    def tables(self, page: Path | None) -> Iterable[TextTable]:
        """Return the tables for the screen; `page` is the path of the written page, if any."""

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return one row for each trial, for JSON."""

    def csv_text(self) -> str:
        """Return the results as CSV."""

    def write(self, out: Path, *, title: str | None) -> Path:
        """Write the page, its tables and figures into a folder, and return the page's path.

        Raises:
            ConfigError: the folder cannot be created or written, or has files of these names from elsewhere.
        """


class KindReport(ABC, Generic[P, R]):
    """Shows tasks of one kind."""

    work: ClassVar[str]
    """What its runs do, as a verb: generate, load a server."""
    page_shows: ClassVar[str]
    """The content of its page, such as: every answer, and its figure."""

    @abstractmethod
    def plan_rows(self, plan: P) -> list[tuple[str, str]]:
        """Return the rows of a plan (name, value) that are specific to this kind."""

    @abstractmethod
    def tables(self, trial: ShownTrial[R], *, more: Sequence[Row] = ()) -> list[TextTable]:
        """Return the result of a trial as tables; `more` are additional rows for the first table."""

    @abstractmethod
    def load(self, paths: Sequence[Path], *, num_gpus: int | None) -> Report:
        """Return the report of run folders and logs.

        Raises:
            ConfigError: the runs cannot be shown together.
            LogError: a log cannot be read.
        """

    def detail_tables(self, trial: ShownTrial[R]) -> list[TextTable]:
        """Return additional tables of `parse` and `report`."""
        return []

    def parse_rows(self, trial: ShownTrial[R]) -> list[Row]:
        """Return additional rows of `parse` for the first table."""
        return []

    def json_fields(self, result: R) -> dict[str, Any]:
        """Return the fields of `bench.answers.schema.TrialVerdict` that only this kind has."""
        return {}

    def files(self, folder: Path, trial: int, result: R) -> list[Row]:
        """Draw the figures of a finished trial, and return rows with its files."""
        return []

    def next_step(self, plan: P, folder: str) -> str:
        """Return a suggested next command after a successful run; empty if there is none."""
        return f"to see {self.page_shows}: runstop report {folder} -o page"


class TrialsKindReport(KindReport[P, R]):
    """Shows kinds of tasks whose trials are shown separately, not as a set."""

    table_name: ClassVar[str]
    table_columns: ClassVar[Sequence[str]]
    figure_names: ClassVar[Sequence[str]] = ()
    """Names of all PNG files that a page may have, without .png."""

    @abstractmethod
    def title(self, trial: ShownTrial[R]) -> str:
        """Return the name of the task and its hardware."""

    @abstractmethod
    def table_rows(self, trial: ShownTrial[R]) -> Iterator[Sequence[object]]:
        """Yield the rows of the CSV table, without the trial's name."""

    def cards(self, trial: ShownTrial[R]) -> list[Card]:
        """Return the main numbers, shown at the top of the page."""
        return []

    def figures(self, trials: Sequence[ShownTrial[R]], out: Path, *, heading: str) -> "list[Shown]":
        """Draw the figures of some trials into a folder, and return them with their charts."""
        return []

    def charts(self, trials: Sequence[ShownTrial[R]]) -> Charts:
        """Return the charts of some trials with their titles, without drawing files."""
        return {}

    def load(self, paths: Sequence[Path], *, num_gpus: int | None) -> "TrialsReport[R]":
        trials: list[ShownTrial[R]] = [ShownTrial(name, kinds.read(file)) for name, file in _logs(paths)]
        if num_gpus is not None:
            raise ConfigError(
                "--num-gpus is only for training logs, but this log is not a training log",
                where=trials[0].judged.result.file,
                fix="remove --num-gpus",
            )
        return TrialsReport(self, trials)


@dataclass(frozen=True, slots=True)
class TrialsReport(Generic[R]):
    """The trials of some folders, shown separately."""

    shown: TrialsKindReport[Any, R]
    trials: Sequence[ShownTrial[R]]

    @property
    def valid(self) -> bool:
        return all(trial.kind_result.valid for trial in self.trials)

    def tables(self, page: Path | None) -> Iterator[TextTable]:
        for trial in self.trials:
            yield from self.shown.tables(trial)
            yield from self.shown.detail_tables(trial)

    def rows(self) -> Iterator[dict[str, Any]]:
        for trial in self.trials:
            measured = [asdict(one) for one in trial.kind_result.measurements]
            yield {"trial": trial.name, "valid": trial.kind_result.valid, "measurements": measured}

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
        figures = self.shown.figures(self.trials, out, heading=heading)
        (out / PAGE).write_text(trials_page.page(self, figures, heading), encoding="utf-8")


def report_of(kind: Kind) -> KindReport[Any, Any]:
    """Return the report class of a kind; its module is imported on first use."""
    shown: KindReport[Any, Any] = importlib.import_module(KINDS[kind].shown_by).REPORT
    return shown


def load(paths: Sequence[Path], *, num_gpus: int | None = None) -> Report:
    """Return the report of logs, run folders and folders of run folders, whose tasks are all of one kind.

    Raises:
        ConfigError: the runs are of different kinds.
        LogError: a log cannot be read.
    """
    sources: dict[Kind, list[str]] = {}
    for name, file in _logs(paths):
        sources.setdefault(kinds.kind_of(logs.read(file)), []).append(name if name == str(file) else str(file.parent))
    if len(sources) > 1:
        (first, _), *others = sources.items()
        raise ConfigError(
            f"one report cannot have runs that {report_of(first).work} and runs that {report_of(others[0][0]).work}",
            where=", ".join(dict.fromkeys(others[0][1])),
            fix="write a separate report for every kind of run",
        )
    return report_of(next(iter(sources), Kind.train)).load(paths, num_gpus=num_gpus)


def _logs(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each log with its name: RUN/FILE for logs of a run folder, else the given path."""
    for path in itertools.chain.from_iterable(map(sets_in, paths)):
        for file in sorted(path.glob("result_*.txt")) if path.is_dir() else [path]:
            if file.is_file():
                yield (f"{file.parent.name}/{file.stem}" if path.is_dir() else str(file)), file
