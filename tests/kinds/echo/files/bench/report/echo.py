"""How echo tasks are shown."""

from collections.abc import Iterator, Sequence

from bench.contract.echo_plan import EchoPlan
from bench.report.kinds import ShownTrial, TrialsKindReport
from bench.report.tables import Row, TextTable
from bench.results.echo import EchoResult


class EchoReport(TrialsKindReport[EchoPlan, EchoResult]):
    """One row for each word."""

    work, page_shows = "echo", "every word"
    table_name, table_columns = "words.csv", ("word",)

    def plan_rows(self, plan: EchoPlan) -> list[tuple[str, str]]:
        return [("words", " ".join(plan.words))]

    def title(self, trial: ShownTrial[EchoResult]) -> str:
        return f"echo: {trial.judged.result.platform}"

    def tables(self, trial: ShownTrial[EchoResult], *, more: Sequence[Row] = ()) -> list[TextTable]:
        rows = [("words", str(len(trial.kind_result.echoed)), ""), trial.valid_row, *more]
        return [TextTable(self.title(trial), rows, caption="n = 1 run")]

    def table_rows(self, trial: ShownTrial[EchoResult]) -> Iterator[Sequence[object]]:
        yield from ((text,) for text in trial.kind_result.echoed)


REPORT = EchoReport()
