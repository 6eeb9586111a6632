"""One table of a study on several clusters: a column for each platform, with the published figures of that platform."""

from pathlib import Path
from typing import Any

import pytest
from test_spec import written

from bench import cli, report, studies
from bench.console import study as study_sheets
from bench.errors import ConfigError
from bench.results.statement import StatementVerdict
from bench.results.study import PlannedArm, StudyResult
from bench.studies import folder as folders
from bench.studies import library
from bench.studies.folder import StoredStudy
from helpers import answers
from helpers.page import unpainted
from helpers.study_runs import valid_run

STUDY = """
title: t
question: q
source: s
axes: {model: {7B: [], 13B: []}, method: {Naive: [], Z3: []}}
columns:
  - {measurement: step_time, title: step time, unit: ms, higher_is_better: false}
pairs: [{first: 7B Z3, second: 7B Naive, measurement: step_time}]
statements:
  - {text: Z3 is slower., measurement: step_time, at_least: 1, same: [model],
     arms: [{first: {method: Z3}, second: {method: Naive}}]}
tables: [{title: steps, rows: [method], columns: [model], measurement: step_time}]
window: {skip_steps: 0, steps: 1}
published: [theirs_big, theirs_small_p2p, theirs_small]
"""
THEIRS = """
title: the same table
place: table III
hardware: 8 x {name}
date: "2023"
signs: {{"-": out of memory}}
platform: {{name: {name}, gpu: {gpu}{more}}}
columns: [{{measurement: step_time, unit: ms}}]
rows:
  - {{labels: {{model: 7B, method: Naive}}, printed: ["{first}"]}}
  - {{labels: {{model: 7B, method: Z3}}, printed: ["{second}"]}}
"""
PUBLISHED = {
    "theirs_big": {"name": "Big", "gpu": "Big 80", "more": "", "first": "10", "second": "20"},
    "theirs_small_p2p": {"name": "Small with links", "gpu": "Small", "more": "", "first": "-", "second": "44"},
    "theirs_small": {
        "name": "Small", "gpu": "Small", "more": ", environment: {NCCL_P2P_DISABLE: '1'}", "first": "-", "second": "55",
    },
}  # fmt: skip
NAMES = ("7B Naive", "7B Z3", "13B Naive", "13B Z3")


def study_folder(
    tmp_path: Path, cluster: str, device: str, *, name: str = "mine", text: str = STUDY, **environment: str
) -> Path:
    config_dir = written(tmp_path, text, name=name)
    (tmp_path / "published").mkdir(exist_ok=True)
    for publication, words in PUBLISHED.items():
        (tmp_path / f"published/{publication}.yaml").write_text(THEIRS.format(**words))
    study = library.load(name, config_dir=config_dir)
    publications = library.publications(study, config_dir=config_dir)
    stored = StoredStudy(name=name, cluster=cluster, overrides=(), study=study, publications=publications)
    planned = [PlannedArm(name=arm, device=device, environment=environment) for arm in NAMES]
    folder = tmp_path / "studies" / f"{name}-{cluster}"
    with folders.locked(folder, stored, planned):
        pass
    return folder


def clusters(tmp_path: Path) -> list[Path]:
    """Return three folders: the document's GPU, its other GPU without NVLink, and a GPU that it does not have."""
    created = [
        study_folder(tmp_path, "dgx", "NVIDIA Big 80GB"),
        study_folder(tmp_path, "box", "NVIDIA Small", NCCL_P2P_DISABLE="1"),
        study_folder(tmp_path, "new", "NVIDIA New"),
    ]
    for folder, seconds in zip(created, (1.0, 4.0, 0.5), strict=True):
        for block, drift in enumerate((1.0, 1.01, 0.99), 1):
            valid_run(folder / f"7B_Naive.{block}", [seconds * drift])
            valid_run(folder / f"7B_Z3.{block}", [2 * seconds * drift])
    return created


def cell(result: StudyResult, platform: str, arm: str) -> Any:
    return result.row(f"{platform}: {arm}").cells["step_time"]


@pytest.mark.long
def test_each_platform_has_a_column_with_its_own_published_figures(tmp_path: Path) -> None:
    result = studies.platforms.merged([studies.read(folder) for folder in clusters(tmp_path)])
    (table,) = result.tables
    assert table.columns == (("new",), ("Big (dgx)",), ("Small with links",), ("Small (box)",))
    assert table.row_labels == ("model", "method") and [key for key, _ in table.rows][:2] == [
        ("7B", "Naive"),
        ("7B", "Z3"),
    ]
    assert cell(result, "Big (dgx)", "7B Naive").values == (1000.0, 1010.0, 990.0)
    assert cell(result, "Small with links", "7B Z3").reason == "no runs on this platform"
    shown = next(iter(study_sheets.sheets(result)))
    rows = [tuple(row) for row in shown.rows]
    assert rows[0][2:] == ("500.0 ± 5.0", "1,000 ± 10", "-", "4,000 ± 40")
    assert rows[1] == ("7B", "  theirs", "", "10", "-", "-"), "the document's row, one figure for each platform"
    assert rows[3] == ("7B", "  theirs", "", "20", "44", "55")
    (publication,) = result.publications
    assert publication.hardware == "Big: 8 x Big; Small with links: 8 x Small with links; Small: 8 x Small"


@pytest.mark.long
def test_statements_and_comparisons_are_those_of_each_platform(tmp_path: Path) -> None:
    result = studies.platforms.merged([studies.read(folder) for folder in clusters(tmp_path)])
    by_platform = {one.platform: one for one in result.statements}
    assert by_platform["new"].verdict is StatementVerdict.undecided, "13B is not measured"
    assert not by_platform["new"].published
    assert [(one.publication, one.low) for one in by_platform["Big (dgx)"].published] == [("theirs", 2.0)]
    assert "Small with links" not in by_platform, "neither runs nor ratios: its Naive was out of memory"
    names = [one.comparison.names for one in result.differences if one.comparison]
    assert names[1] == ("Big (dgx): 7B Z3", "Big (dgx): 7B Naive")


@pytest.mark.long
def test_the_page_links_to_the_runs_of_each_folder(tmp_path: Path) -> None:
    created = clusters(tmp_path)
    result = studies.platforms.merged([studies.read(folder) for folder in created])
    with unpainted():
        report.write_study(result, tmp_path / "out")
    text = (tmp_path / "out/table.md").read_text()
    assert "../studies/mine-dgx/7B_Naive.1/result_0.txt" in text and "../studies/mine-box/7B_Z3.3/result_0.txt" in text
    assert "| model | method | new | Big (dgx) | Small with links | Small (box) |" in text
    assert "- Small with links: no runs; published: theirs\\_small\\_p2p" in text
    lines = (tmp_path / "out/table.csv").read_text().splitlines()
    assert lines[0].startswith("arm,platform,model,method,measurement")
    assert sum(",published," in line for line in lines) == 6


@pytest.mark.long
@pytest.mark.parametrize("words", ["folders", "pattern", "name and pattern", "all"])
def test_the_verb_takes_folders_a_pattern_or_all(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created = clusters(tmp_path)
    study_folder(tmp_path, "new", "NVIDIA New", name="mine-not")
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    pattern = str(tmp_path / "studies/mine-???")
    argv = {
        "folders": list(map(str, created)),
        "pattern": [pattern],
        "name and pattern": ["mine", pattern],
        "all": ["mine", "--all-clusters", "--config-dir", str(tmp_path)],
    }[words]
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", *argv, "--table", "--json"])
    printed = answers.one(capsys.readouterr().out)
    assert ended.value.code == 0
    assert {one["cluster"] for one in printed["platforms"]} == {"dgx", "box", "new", ""}
    assert len(printed["rows"]) == 4 * len(NAMES)


def test_folders_that_do_not_belong_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dgx, other = study_folder(tmp_path, "dgx", "Big 80"), study_folder(tmp_path, "dgx", "Big 80", name="other")
    columns = STUDY.replace("window:", "coefficients: [{measurement: step_time}]\nwindow:")
    (tmp_path / "site").mkdir()
    changed = study_folder(tmp_path / "site", "dgx", "Big 80", text=columns)
    for folder, message in (
        (dgx, "this folder is given twice"),
        (other, "this folder has the study other, but .*mine-dgx has the study mine"),
        (changed, "does not have the same columns as the study in"),
    ):
        with pytest.raises(ConfigError, match=message):
            studies.platforms.merged([studies.read(dgx), studies.read(folder)])
    for argv, message in (
        (["mine", str(other)], "this folder has results of the study other, not of the study mine"),
        ([str(dgx), str(tmp_path)], "this folder has no results of a study"),
        ([str(tmp_path / "none-*")], "no folder of a study matches"),
        ([str(dgx), str(other), "trials=2"], "trials=2 does not apply"),
        (["tiny", "--all-clusters"], "needs --table, which is missing"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["study", *argv])
        assert ended.value.code == 2 and message in capsys.readouterr().err
