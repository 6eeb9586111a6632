"""The figures of a kernels task show the rates of its points; figures without data are not saved_figures."""

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench.contract.plan_kinds import KernelsPlan
from bench.errors import ConfigError
from bench.planning import compose
from bench.report import kernels, kinds
from bench.report.training import SetsReport
from bench.results import kind as trial_results
from helpers import kernels_log
from helpers.page import Page

SEED = ["gemm", "memcpy", "all_gather", "reduce_scatter", "collectives", "attention"]


def planned(*overrides: str) -> KernelsPlan:
    plan = compose.compose([*overrides, "cluster=dgxh200"])
    assert isinstance(plan, KernelsPlan)
    return plan


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Collect the figures by file name instead of saving them."""
    kept: dict[str, Figure] = {}

    def save(figure: Figure, path: Path) -> None:
        kept[path.stem] = figure
        path.touch()

    monkeypatch.setattr(kernels, "save", save)
    return kept


@pytest.mark.long
def test_rates_are_drawn_over_sizes(tmp_path: Path, saved_figures: dict[str, Figure]) -> None:
    """Every point takes 1 ms: a GEMM of M rows has 2 M N K / 1e9 TFLOP/s, a copy bytes / 1e6 GB/s."""
    log = kernels_log.write(planned("task=node"), tmp_path / "result_0.txt", time_us=lambda point: 1000.0)
    result = trial_results.read(log).of_kind
    assert result is not None
    files = kernels.draw(result, tmp_path, heading="h", note="n")
    assert [path.stem for path in files] == list(saved_figures) == SEED
    bf16 = curves(saved_figures["gemm"], 0)
    m, rates = bf16["N16384 K16384"]
    assert m == [4096, 8192, 12288, 16384]
    assert rates == [pytest.approx(2 * rows * 16384 * 16384 / 1e9) for rows in m]
    assert bf16["unaligned N11008 K4096"][0] == [666, 4109, 6157, 8205, 10253, 12301, 14349, 16397]
    assert bf16["peak"][1] == [989.4] * 2 and bf16["best known"][1] == [794.5] * 2
    assert "N8192 K8192" not in bf16, "the sustained point of that shape is no part of the document's figure"
    sizes, latencies = curves(saved_figures["memcpy"], 0)["device to host pinned"]
    assert latencies == [1000.0] * len(sizes) and sizes[0] == 1024 and sizes[-1] == 2**30
    assert curves(saved_figures["memcpy"], 1)["device to host pinned"][1] == [
        pytest.approx(size / 1e6) for size in sizes
    ]
    assert list(curves(saved_figures["all_gather"], 1)) == [f"all-gather of {n} ranks" for n in (2, 4, 8)]
    assert {name.split(" of ")[1] for name in curves(saved_figures["collectives"], 1)} == {"8 ranks"}, "all of them"
    lengths, _ = curves(saved_figures["attention"], 0)["math"]
    assert lengths == [512, 1024, 2048, 4096] and curves(saved_figures["attention"], 1)["cudnn"][0][-1] == 16384


def curves(figure: Figure, panel: int) -> dict[str, tuple[list[float], list[float]]]:
    lines = figure.axes[panel].get_lines()
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


@pytest.mark.long
def test_report_has_page_csv_and_figures(tmp_path: Path) -> None:
    plan = planned("task=attention")
    (tmp_path / "run").mkdir()
    slow = plan.points[0].name
    kernels_log.write(plan, tmp_path / "run/result_0.txt", failed=[slow])
    report = kinds.load([tmp_path / "run"])
    page = report.write(tmp_path / "out", title="attention <b>")
    assert sorted(path.name for path in page.parent.iterdir()) == ["attention.png", "kernels.csv", "report.html"]
    header, *rows = (tmp_path / "out/kernels.csv").read_text().splitlines()
    assert header.startswith("trial,point,kernel,variant,ranks,latency_us") and len(rows) == len(plan.points) - 1
    assert rows[0].startswith('run/result_0,"attention backward math 32 x 512, 32 heads of 128, 32 of keys",attention')
    text = page.read_text()
    assert f'<span class="value">{len(plan.points) - 1}</span> <span class="unit">of {len(plan.points)}' in text
    assert f"<li>{slow} was not measured: rank 0: no such kernel</li>" in text
    bests, points = (
        text.partition(f"{title}</h2>")[2].partition("</table>")[0] for title in ("each kernel", "All points")
    )
    assert (bests.count("<tr><td"), points.count("<tr><td")) == (2, len(plan.points) - 1)
    charts = Page(page).charts
    assert list(charts) == ["attention_backward", "attention_forward"] and Page(page).runs_only_ours
    assert "attention &lt;b&gt;" in text and "data:image/png;base64," in text and text.count("<script>") == 1
    assert page == report.write(tmp_path / "out", title="again"), "over our own page"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/kernels.csv").write_text("mine")
    with pytest.raises(ConfigError, match="did not write and does not overwrite: kernels.csv"):
        report.write(tmp_path / "other", title="h")


def test_csv_escapes_formulas_from_logs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = kernels_log.write(planned("task=attention"), tmp_path / "run/result_0.txt")
    log.write_text(log.read_text().replace('"implementation": "made up"', '"implementation": "=1+1"'))
    assert ",'=1+1\n" in kinds.load([tmp_path / "run"]).csv_text()


def test_runs_of_different_kinds_are_refused(tmp_path: Path, written_log: Callable[..., Path]) -> None:
    training = written_log()
    (tmp_path / "run").mkdir()
    kernels_log.write(planned("task=attention"), tmp_path / "run/result_0.txt")
    assert isinstance(kinds.load([training]), SetsReport)
    with pytest.raises(ConfigError, match="one report cannot have runs") as error:
        kinds.load([tmp_path / "run", training])
    assert str(training) == error.value.where
