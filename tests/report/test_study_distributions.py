"""The cumulative distributions on the page of a study, against numpy's."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench import report
from bench.report.study import distributions, page
from bench.report.study.distributions import distributions_of
from bench.results.study import Column, Row, StudyResult, Table
from helpers import serving, serving_log, study_results
from helpers.page import unpainted

BURST = ("task.serving.arrivals=[burst]", "task.serving.rates=[]", "task.serving.server.batches_tokens=false")
RATE = Column(measurement="output_throughput", title="output", unit="tokens/s", higher_is_better=True)
Times = Sequence[float | None]
SERVERS = ("vLLM", "SGLang")
MODELS = ("7B", "13B")


def study(folder: Path, runs: dict[str, list[Times]], *, tables: bool = True, **changed: object) -> StudyResult:
    """Return a study whose arms have these latencies, one list for each run."""
    plan = serving.planned(*BURST)
    rows = []
    for arm, of_arm in runs.items():
        server, model = arm.split()
        for number, times in enumerate(of_arm, 1):
            run = folder / f"{arm}.{number}"
            run.mkdir(parents=True)
            serving_log.write(plan, run / "result_0.txt", {"burst": times}, server=server, **changed)
        cell = study_results.measured(arm, tuple(float(n) for n, _ in enumerate(of_arm, 1)), 1.0, 0.1)
        rows.append(Row(arm=arm, labels={"server": server, "model": model}, cells={"output_throughput": cell}))
    table = Table(
        title="Output",
        column=RATE,
        row_labels=("model",),
        column_labels=("server",),
        columns=tuple((server,) for server in SERVERS),
        rows=tuple(((m,), tuple(f"{s} {m}" if f"{s} {m}" in runs else None for s in SERVERS)) for m in MODELS),
    )
    changes = {"rows": tuple(rows), "columns": (RATE,), "differences": (), "tables": (table,) if tables else ()}
    return study_results.precisions(folder, title="Servers", **changes)


def ecdf(times: Times, at: float) -> float:
    """Return the percentage of all requests answered within a time."""
    return 100 * float(np.mean([time is not None and time <= at for time in times]))


def logs(result: StudyResult) -> dict[str, list]:
    return {arm: list(of_arm.values()) for arm, of_arm in page.logs_of(result).items()}


def test_a_figure_for_each_model_has_a_curve_for_each_server(tmp_path: Path) -> None:
    """Latencies and times to the first token, over all runs; a server has the same colour in every figure."""
    random = np.random.default_rng(1)
    runs = {arm: [list(random.gamma(3, 2, 40)) for _ in range(2)] for arm in ("vLLM 7B", "SGLang 7B", "SGLang 13B")}
    runs["vLLM 7B"][1][7] = None
    result = study(tmp_path, runs)
    figures = distributions_of(result, logs(result))
    assert [figure.title for figure in figures] == [
        *("Latency (burst): 7B", "Time to the first token (burst): 7B"),
        *("Latency (burst): 13B", "Time to the first token (burst): 13B"),
    ]
    assert [[curve.name for curve in figure.curves] for figure in figures] == [[*SERVERS]] * 2 + [["SGLang"]] * 2
    assert figures[0].curves[1].color == figures[2].curves[0].color != figures[0].curves[0].color
    for curve in figures[0].curves:
        every = [time for times in runs[f"{curve.name} 7B"] for time in times]
        for seconds, percent in curve.points[1:]:
            assert percent == pytest.approx(ecdf(every, seconds + 1e-6))
    assert figures[0].curves[0].points[-1][1] == pytest.approx(100 * 79 / 80), "a failed request is never answered"
    assert figures[1].curves[1].points[-1][0] == pytest.approx(max(max(t) for t in runs["SGLang 7B"]) / 4)


def test_no_times_to_the_first_token_of_a_server_that_batches_tokens(tmp_path: Path) -> None:
    result = study(tmp_path, {"vLLM 7B": [[1.0, 2.0]]}, tables=False, together=0.5)
    (figure,) = distributions_of(result, logs(result))
    assert (figure.title, figure.curves[0].name) == ("Latency (burst)", "vLLM 7B")
    other = study_results.precisions(tmp_path / "training")
    assert distributions_of(other, logs(other)) == [], "logs of training have no requests"


@pytest.mark.long
def test_the_page_has_the_same_curves_as_the_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: dict[str, Figure] = {}
    save = distributions.save

    def saved(figure: Figure, path: Path) -> None:
        figures[path.stem] = figure
        save(figure, path)

    monkeypatch.setattr(distributions, "save", saved)
    result = study(tmp_path / "study", {"vLLM 7B": [[4.0, 1.0, 3.0, 2.0]], "SGLang 7B": [[None, 8.0, 2.0, 4.0]]})
    with unpainted():
        report.write_study(result, tmp_path / "out")
    assert {"cdf_1.png", "cdf_2.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    axes = figures["cdf_1"].axes[0]
    lines = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {
        "vLLM": ([1, 1, 2, 3, 4], [0, 25, 50, 75, 100]),
        "SGLang": ([2, 2, 4, 8], [0, 25, 50, 75]),
    }
    assert axes.get_xlabel() == "seconds from arrival to the last token" and axes.get_xlim()[0] == 0
    html = (tmp_path / "out" / "index.html").read_text()
    embedded = re.search(r'<script[^>]*id="charts"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert embedded
    (view,) = json.loads(embedded[1])["cdf_1"]["views"]
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in view["traces"]} == lines
