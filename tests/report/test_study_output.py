"""A study as Markdown, CSV, LaTeX, figures and a page: whole files are compared with golden files."""

import dataclasses
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from bench import report, studies
from bench.cli import main
from bench.errors import ConfigError
from bench.report import cells
from bench.report.cells import cell_text
from bench.report.study import bars as study_bars
from bench.report.study import layout, pairs, scaling
from bench.report.study.bars import bars_of
from bench.report.study.scaling import scalings_of
from bench.report.study.texts import comparison_rows
from bench.results.comparison import compare
from bench.results.study import Cell, Difference, Mark, Published
from bench.texts import short_commits
from helpers import golden, study_results
from helpers.page import Page, unpainted

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The output folder of a study of precisions; only its run bf16.1 has a log."""
    run = tmp_path / "study" / "bf16.1"
    run.mkdir(parents=True)
    (run / "result_0.txt").touch()
    with unpainted():
        report.write_study(study_results.precisions(tmp_path / "study"), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.long
@pytest.mark.parametrize("name", ["table.md", "table.csv", "table.tex"])
def test_documents_equal_the_golden_files(written: Path, name: str) -> None:
    golden.require((written / name).read_text(), GOLDEN / name, variable="WRITE_GOLDEN")


@pytest.mark.long
def test_a_table_of_labels_has_a_line_of_published_figures_below_each_of_ours(tmp_path: Path) -> None:
    report.write_study(study_results.scaling(tmp_path / "study"), tmp_path)
    lines = (tmp_path / "table.md").read_text().splitlines()
    start = lines.index("| method | GPUs = 1 | GPUs = 2 | GPUs = 4 |")
    assert lines[start + 3] == "| published, P1 | 60.0 | 118.0 | 230.0 |"
    assert lines[start + 4].startswith("| Z3 | 80.50 ± 0.50 (") and lines[start + 4].endswith(" | -<sup>1</sup> |")


@pytest.mark.starts
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not here")
def test_latex_takes_the_tables(written: Path) -> None:
    paper = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table.tex}\end{document}"
    (written / "paper.tex").write_text(paper)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=written,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.long
def test_foreign_text_is_escaped(tmp_path: Path) -> None:
    evil = r'</script><script>alert(1)</script> | \input{/etc/passwd} *b* $x$ %{y} [a](http://x) "' + "\x1b[2J\n"
    result = study_results.precisions(tmp_path / "study", title=evil, hardware=evil, notes=(evil,))
    report.write_study(result, tmp_path / "out")
    page = Page(tmp_path / "out" / "index.html")
    assert page.runs_only_ours and all(url.startswith(("data:", "../study/", "#")) for url in page.loads)
    latex, markdown = ((tmp_path / "out" / name).read_text() for name in ("table.tex", "table.md"))
    assert r"\input{/etc" not in latex.split(r"\begin{table}")[1] and r"\textbackslash{}input\{/etc/passwd\}" in latex
    assert r"\</script\>" in markdown and r"\[a\](http" in markdown and "\x1b" not in latex + markdown
    assert not any(line.startswith(r"\input") for line in latex.splitlines())


@pytest.mark.long
def test_page_links_numbers_to_runs_and_is_reproducible(written: Path, tmp_path: Path) -> None:
    page = Page(written / "index.html")
    logs = [url for url in page.loads if url.startswith("../")]
    assert logs[:5] == [
        *("../study/bf16.1/result_0.txt", "../study/bf16.2", "../study/bf16.3", "../study/bf16.4"),
        "../study/bf16.1/result_0.txt",
    ]
    assert page.runs_only_ours
    for shown in ("1 × NVIDIA H200", "2026-11-22", "0123abcd", "published [P1]", "570.80", "over steps 31 to 130"):
        assert shown in page.text
    first, second = ({}, {})
    for files in (first, second):
        report.write_study(study_results.precisions(tmp_path / "study"), written)
        files.update({path.name: path.read_bytes() for path in written.iterdir()})
    assert first == second
    assert {"index.html", "table.md", "table.csv", "table.tex", "bars_1.png", "bars_2.png", "pairs.png"} == first.keys()


def test_other_page_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(ConfigError, match=r"does not overwrite: index\.html"):
        report.write_study(study_results.precisions(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("value", "deviation", "text"),
    [
        (17_326.25, 26.7, "17,326 ± 27"),
        (236.4, 0.2449, "236.40 ± 0.24"),
        (0.92418, 0.00031, "0.92418 ± 0.00031"),
        (1500.4, 231.0, "1,500 ± 231"),
        (236.4, 0.0, "236.4 ± 0.0"),
        (236.4, None, "236.4"),
        (0.0031274, None, "0.00313"),
        (0.0031274, 0.0, "0.00313 ± 0.00000"),
    ],
)
def test_digits_follow_the_deviation(value: float, deviation: float | None, text: str) -> None:
    assert cell_text(Cell(mark=Mark.measured, value=value, deviation=deviation)) == text
    assert cell_text(Cell(mark=Mark.calculated, value=value, deviation=deviation)) == f"* {text}"


def test_whiskers_are_the_t_interval_of_the_mean(tmp_path: Path) -> None:
    bars = bars_of(study_results.precisions(tmp_path))[0]
    values = (17_310.0, 17_342.0, 17_298.0, 17_355.0)
    low, high = stats.t.interval(0.95, 3, loc=mean(values), scale=stdev(values) / 2)
    bar = next(bar for _, _, bar, _ in bars.places())
    assert bar.half_width == pytest.approx((high - low) / 2)
    error = next(trace["error_x"] for trace in study_bars.bars_chart(bars)["views"][0]["traces"] if "error_x" in trace)
    assert error["array"][0] == bar.half_width and len(error["array"]) == 2, "one run has no interval"


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures instead of saving them."""
    collected: list[Figure] = []
    for module in (study_bars, pairs, scaling):
        monkeypatch.setattr(module, "save", lambda figure, path: collected.append(figure))
    return collected


def test_interactive_and_static_bars_of_a_study_are_equal(tmp_path: Path, saved_figures: list[Figure]) -> None:
    """Published bars are hatched, calculated ones dotted; X and - are text."""
    bars = bars_of(study_results.precisions(tmp_path))[0]
    study_bars.draw_bars(bars, tmp_path, note="")
    (axes,) = saved_figures[0].axes
    shown = {(bar.get_width(), bar.get_hatch()) for bar in axes.patches if bar.get_width()}
    assert shown == {(17_326.25, None), (23_420.0, None), (64_043.5, "////"), (9_120.5, "....")}
    assert [text.get_text() for text in axes.texts] == ["17,326", "64,044", "23,420", "* 9,120", "X", "-"]
    groups: dict[int, list[float]] = {}
    for group, _, _, y in bars.places():
        groups.setdefault(group, []).append(y)
    edges = [(min(ys), max(ys)) for ys in groups.values()]
    assert all(start - end > 1 for (_, end), (start, _) in pairwise(edges)), "a gap between groups, none within one"
    assert all(b - a == 1 for ys in groups.values() for a, b in pairwise(ys))
    view = study_bars.bars_chart(bars)["views"][0]
    on_page = {
        (x, shape)
        for trace in view["traces"]
        if trace.get("type") == "bar"
        for x, shape in zip(trace["x"], trace["marker"]["pattern"]["shape"], strict=True)
        if x
    }
    assert on_page == {(17_326.25, ""), (23_420.0, ""), (64_043.5, "/"), (9_120.5, ".")}
    longest, end = max(x for x, _ in on_page), view["layout"]["xaxis"]["range"][1]
    assert axes.get_xlim()[1] == end and longest < end < 1.1 * longest, "the longest bar fills the chart"
    assert [one["text"] for one in view["layout"]["annotations"]] == [text.get_text() for text in axes.texts]


def test_a_difference_shows_its_pairs_its_interval_and_the_margin(tmp_path: Path, saved_figures: list[Figure]) -> None:
    """By hand, of four pairs: the t-interval of the mean of the logarithms of their ratios."""
    (one,) = pairs.arm_differences(study_results.precisions(tmp_path))
    ratios = [23_401 / 17_310, 23_466 / 17_342, 23_380 / 17_298, 23_433 / 17_355]
    logs = np.log(ratios)
    low, high = stats.t.interval(0.95, 3, loc=logs.mean(), scale=logs.std(ddof=1) / 2)
    assert one.pairs == pytest.approx([100 * (ratio - 1) for ratio in ratios])
    assert (one.low, one.high) == pytest.approx((100 * np.expm1(low), 100 * np.expm1(high)))
    assert one.margin == pytest.approx((-1.9608, 2.0), abs=1e-4)
    points, mean_of_pairs = pairs.pairs_chart([one])["views"][0]["traces"]
    assert points["x"] == list(one.pairs) and mean_of_pairs["x"][0] + mean_of_pairs["error_x"]["array"][0] == one.high
    pairs.draw_pairs([one], tmp_path, note="")
    (axes,) = saved_figures[0].axes
    assert [list(line.get_xdata()) for line in axes.lines][1:3] == [list(one.pairs), [one.percent]]
    assert [
        (tick, label.get_text()) for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    ] == [(0, one.name)]


def test_the_ideal_keeps_the_rate_of_each_gpu(tmp_path: Path, saved_figures: list[Figure]) -> None:
    (shown,) = scalings_of(study_results.scaling(tmp_path))
    traces = scaling.scaling_chart(shown)["views"][0]["traces"]
    assert [(t["name"], t["x"], t["y"]) for t in traces] == [
        ("Naive", [1, 2, 4], [100.0, 191.0, 351.0]),
        ("ideal", [1, 4], [100.0, 400.0]),
        ("Naive, published [P1]", [1, 2, 4], [60.0, 118.0, 230.0]),
        ("Z3", [1, 2], [80.5, 159.667]),
        ("ideal", [1, 2], [80.5, 161.0]),
    ]
    assert traces[0]["customdata"][-1].endswith("87.8 % of ideal"), "351 / 400"
    scaling.draw_scaling(shown, tmp_path, note="")
    lines = {tuple(map(tuple, np.asarray(line.get_xydata()))) for line in saved_figures[0].axes[0].lines}
    assert {((1.0, 100.0), (2.0, 200.0), (4.0, 400.0)), ((1.0, 80.5), (2.0, 161.0))} <= lines
    low, high = saved_figures[0].axes[0].get_xlim()
    assert low == 0 and 4 < high < 5, "from left to right, with room for the last point"


def test_the_ideal_of_a_rate_per_gpu_is_level(tmp_path: Path) -> None:
    column = dataclasses.replace(study_results.RATE, measurement="throughput")
    result = dataclasses.replace(study_results.scaling(tmp_path), columns=(column,))
    (shown,) = scalings_of(result)
    assert scaling.scaling_chart(shown)["views"][0]["traces"][1]["y"] == [100.0, 100.0]


@pytest.mark.long
def test_study_without_runs_has_reasons_and_published_figures(tmp_path: Path) -> None:
    result = study_results.precisions(tmp_path, differences=(), hardware="", date="", commit="")
    nothing = dict.fromkeys(("throughput_per_gpu", "step_time"), Cell(mark=Mark.no_result, reason="not run yet"))
    empty = dataclasses.replace(result, rows=tuple(dataclasses.replace(row, cells=nothing) for row in result.rows))
    report.write_study(empty, tmp_path / "out")
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert "| bf16 | -<sup>1</sup> | -<sup>1</sup> |" in lines and "1. not run yet" in lines
    assert "No measurements. -: no result." in lines and "- hardware: not logged" in lines
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == ["bars_1.png"], "of what is published"


@pytest.mark.parametrize(
    ("printed", "value", "text", "remark"),
    [
        ("7,694.1", 7694.1, "7,694.1", ""),
        ("7694.1", 961.7625, "961.8", ""),
        ("640435", 64_043.5, "64,044", 'printed as "640435": a digit too many'),
        ("-", None, "-", "out of memory"),
        ("1.5±0.1", 1.5, "1.5±0.1", ""),
    ],
)
def test_published_figure_is_shown_in_the_unit_of_its_column(
    printed: str, value: float | None, text: str, remark: str
) -> None:
    """As printed if that is the same number; the printed unit is given with the document."""
    reason = remark.rpartition(": ")[2]
    figure = Published(publication="paper", printed=printed, value=value, reason=reason)
    assert (cells.in_column_unit(figure), layout.remark(figure)) == (text, remark)


@pytest.mark.long
def test_study_verb_writes_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / studies.STUDY).touch()
    monkeypatch.setattr(studies, "read", lambda folder, runs: study_results.precisions(folder))
    out = tmp_path / "out"
    several = ["--out", str(out)]
    for words, code in (
        ([str(tmp_path), *several], 0), (["--list", *several], 2), ([str(tmp_path), "cluster=dgx2"], 2),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main(["study", *words])
        assert stop.value.code == code
    printed = capsys.readouterr()
    assert printed.out.endswith(f"{out / 'index.html'}\n") and (out / "table.md").exists()
    assert "--out writes the tables of a study" in printed.err
    assert "cluster=dgx2 does not apply to the folder of a study" in printed.err


def test_a_difference_that_the_means_do_not_have_is_explained(tmp_path: Path) -> None:
    """Of four pairs in which the second system is once very slow, the mean is another effect than that of the pairs."""
    first, second = (30.0, 30.0, 30.0, 60.0), (20.0, 20.0, 20.0, 80.0)
    compared = compare(first, second, names=("a", "b"), measurement="step_time", unit="ms", higher_is_better=False)
    difference = Difference(first="a", second="b", measurement="step_time", comparison=compared)
    (row,) = comparison_rows(study_results.precisions(tmp_path, differences=(difference,)))
    ratio = (1.5**3 * 0.75) ** 0.25
    assert row.percent == f"{100 * (ratio - 1):+.2f} %" and row.values == "37.50 / 35.00"
    assert row.notes.startswith("difference: paired geometric mean; ratio of the means: +7.14 %")


def test_a_changed_work_tree_stays_marked_in_a_short_commit() -> None:
    assert short_commits(f"{'a1' * 20}-dirty, {'b2' * 20}") == "a1a1a1a1a1a1-dirty, b2b2b2b2b2b2"
