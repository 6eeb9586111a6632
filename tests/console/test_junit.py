"""JUnit XML for CI systems: doctor, history --check and study, and the reference values of a study."""

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import cli
from bench.console import junit
from bench.console.junit import Case
from bench.results import reference
from bench.results.reference import ReferenceResult, ReferenceVerdict
from bench.results.study import PlannedArm
from bench.rules.check import Checked, broken
from bench.studies import folder as folders
from bench.studies import library
from bench.studies.folder import StoredStudy
from helpers import answers
from helpers.clock import turned
from helpers.planted_runs import plant
from helpers.study_runs import failed, valid_run

STUDY = """
title: t
question: q
source: s
arms: {a: {}, b: {}}
runs: 2
window: {skip_steps: 0, steps: 1}
columns: [{measurement: step_time, title: step time, unit: ms, higher_is_better: false}]
references:
  - {arm: a, measurement: step_time, value: 1000, tolerance: 3%}
  - {arm: b, measurement: step_time, value: 2000, tolerance: 10 %}
"""


def cases(path: Path) -> dict[str, ET.Element]:
    """Return the cases by name, and check the counts and the elements that CI systems know."""
    (suite,) = ET.parse(path).getroot()
    by_name = list(suite)
    assert {case.tag for case in by_name} == {"testcase"}
    assert {part.tag for case in by_name for part in case} <= {"failure", "skipped", "system-out"}
    for name, tag in (("failures", "failure"), ("skipped", "skipped")):
        assert int(suite.attrib[name]) == sum(case.find(tag) is not None for case in by_name)
    assert int(suite.attrib["tests"]) == len(by_name) and suite.attrib["errors"] == "0"
    return {case.attrib["name"]: case for case in by_name}


def failure(case: ET.Element) -> str:
    element = case.find("failure")
    return "" if element is None else str(element.text)


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(map(str, argv)))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def study_folder(tmp_path: Path) -> Path:
    (tmp_path / "study").mkdir()
    (tmp_path / "study/mine.yaml").write_text(STUDY)
    study = library.load("mine", config_dir=tmp_path)
    stored = StoredStudy(name="mine", cluster="here", overrides=(), study=study, publications={})
    with folders.locked(tmp_path / "mine-here", stored, [PlannedArm(name="a"), PlannedArm(name="b")]):
        return tmp_path / "mine-here"


def test_checks_fail_with_where_and_fix(tmp_path: Path) -> None:
    error, warning = broken("KUB-02", "no \x1b[1mroom", "here"), broken("KUB-08", "slow", "there", severity="warning")
    tier = [
        Checked("room", ("KUB-02",), "login", (error, warning)),
        Checked("speed", (), "login", (warning,), "9 GB/s"),
        Checked("site", (), "login", unknown="not queried"),
    ]
    junit.write(tmp_path / "doctor.xml", "doctor", junit.of_checks([tier]))
    by_name = cases(tmp_path / "doctor.xml")
    assert failure(by_name["room"]) == f"KUB-02: no ?[1mroom\n  where: here\n  fix:   {error.fix}"
    assert failure(by_name["speed"]) == "" and "9 GB/s" in str(by_name["speed"].findtext("system-out"))
    assert by_name["site"].find("skipped") is not None


def test_secrets_are_masked(tmp_path: Path) -> None:
    secret = "hf_" + "aB3dEfGh" * 4
    junit.write(tmp_path / "x.xml", "s", [Case(group="g", name="n", failure=f"HF_TOKEN={secret}")])
    assert secret not in (tmp_path / "x.xml").read_text()


def test_a_regression_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = turned(monkeypatch)
    for number, speed in enumerate((100.0, 100.4, 99.7, 80.0)):
        plant(tmp_path / f"runs/{number}", clock, speed)
    file = tmp_path / "history.xml"
    assert run("history", "--folder", tmp_path / "runs", "--check", 2, "--junit", file) == 1
    (case,) = cases(file).values()
    assert failure(case).startswith("-20") and f"where: {tmp_path}/runs/3" in failure(case)
    assert run("history", "--folder", tmp_path / "runs", "--junit", file) == 2
    assert "add --check PERCENT" in capsys.readouterr().err


def test_a_measurement_without_earlier_runs_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = turned(monkeypatch)
    for number, speed in enumerate((100.0, 80.0)):
        plant(tmp_path / f"runs/{number}", clock, speed)
    file = tmp_path / "history.xml"
    run("history", "--folder", tmp_path / "runs", "--check", 2, "--junit", file)
    (case,) = cases(file).values()
    skipped = case.find("skipped")
    assert skipped is not None and "earlier runs: 1" in skipped.attrib["message"]


@pytest.mark.parametrize(
    ("mean", "higher_is_better", "verdict"),
    [
        (96.0, True, "failed"),
        (104.0, True, "passed"),
        (98.0, True, "passed"),
        (96.0, False, "passed"),
        (104.0, False, "failed"),
    ],
)
def test_a_value_fails_only_if_it_is_worse(mean: float, higher_is_better: bool, verdict: str) -> None:
    expected = ReferenceResult(
        arm="a",
        measurement="m",
        unit="",
        reference=100.0,
        tolerance=0.03,
        verdict=ReferenceVerdict.not_measured,
    )
    judged = reference.judged(expected, [mean - 1, mean + 1], higher_is_better=higher_is_better)
    assert (judged.verdict, judged.value, judged.n) == (verdict, mean, 2)


def test_a_study_fails_at_its_reference_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = study_folder(tmp_path), tmp_path / "study.xml"
    for block in (1, 2):
        valid_run(folder / f"a.{block}", [1.02])
        valid_run(folder / f"b.{block}", [1.0])
    assert run("study", folder, "--junit", file) == 0
    assert set(cases(file)) == {"a", "b", "a step_time", "b step_time"}
    assert "1020 ms is +2.0 % from 1000 ms (tolerance 3 %, n = 2)" in capsys.readouterr().out
    for name in ("a.2", "b.2"):
        shutil.rmtree(folder / name)
    valid_run(folder / "a.2", [1.1])
    failed(folder / "b.2", "RUN-01", "a GPU is full")
    assert run("study", folder, "--json", "--junit", file) == 1
    by_name = cases(file)
    assert "1060 ms is +6.0 % from 1000 ms" in failure(by_name["a step_time"]) and not failure(by_name["b step_time"])
    assert "b.2 out of memory" in failure(by_name["b"]) and "runstop why" in failure(by_name["b"])
    verdicts = [one["verdict"] for one in answers.one(capsys.readouterr().out)["references"]]
    assert verdicts == ["failed", "passed"], "b is twice as fast as its reference"
    assert run("study", folder, "--junit", tmp_path / "nowhere/x.xml") == 2
