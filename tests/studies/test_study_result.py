"""The whole result of a study with an arm of every sort, as data, and the cases of its JUnit file."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from test_spec import written

from bench import studies
from bench.contract import mllog
from bench.results.published import PublishedPlatform
from bench.results.study import Mark, PlannedArm, Publication, Published
from bench.studies import folder as folders
from bench.studies import junit, labels, library, platforms
from bench.studies.folder import StoredStudy
from helpers import golden
from helpers.study_runs import failed, valid_run

RESULT = Path(__file__).with_name("study_result.json")
STUDY = """
title: Two methods on two models
question: Which is faster?
source: "paper, table 3"
axes:
  model: {7B: [], 13B: []}
  method: {Naive: [], Z3: [], FP8: []}
arms: {alone: {labels: {model: 7B}}}
cases:
  - {match: {model: 13B, method: FP8}, not_advisable: it does not converge}
  - {match: {arm: alone}, note: on one GPU, calculated: {steps: 2, of_steps: 5000}}
runs: 3
margin: 0.05
columns:
  - {measurement: time_of_steps, title: time of all steps, unit: s, higher_is_better: false}
  - {measurement: step_time, title: step time, unit: ms, higher_is_better: false, interval: true}
  - {measurement: throughput, title: throughput, unit: samples/s, higher_is_better: true}
  - {measurement: mfu, title: MFU, higher_is_better: true}
  - {measurement: micro_batch_size, title: micro-batch, higher_is_better: true}
  - {measurement: estimated_memory, title: memory, unit: GiB, higher_is_better: false}
  - {measurement: estimated_step_time, title: estimate, unit: ms, higher_is_better: false}
  - {measurement: estimated_weights, title: weights, unit: GB, higher_is_better: false}
coefficients:
  - {measurement: step_time, among: [{method: [Naive, Z3, FP8]}], same: [model]}
  - {measurement: throughput, title: of rates, among: [{model: 7B, method: [Naive, Z3]}, {arm: alone}]}
relatives:
  - {name: speedup, measurement: step_time, title: speedup, reference: {method: Naive}, same: [model],
     match: {method: [Z3, FP8]}, higher_is_better: false}
  - {name: slower_by, measurement: time_of_steps, title: slower by, is_reduction: true,
     reference: {model: 7B, method: Z3}, match: {model: 7B}, higher_is_better: false}
  - {name: of_own_method, measurement: time_of_steps, title: of its method, reference: {arm: 13B Naive}, same: [method],
     higher_is_better: true}
pairs:
  - {first: 7B Z3, second: 7B Naive, measurement: step_time}
  - {first: 13B Z3, second: 13B FP8, measurement: throughput}
statements:
  - {text: Z3 is faster., measurement: step_time, at_most: 1, same: [model],
     arms: [{first: {method: Z3}, second: {method: Naive}}]}
  - {text: Every step takes a second., source: page 5, measurement: step_time, at_least: 900, at_most: 1100,
     arms: [{first: {model: 7B}}]}
  - {text: It is fast on B200., measurement: step_time, at_most: 1, gpus: [B200], arms: [{first: {model: 7B}}]}
  - {text: 13B fits., fits: true, arms: [{first: {model: 13B}}]}
references:
  - {arm: 7B Naive, measurement: step_time, value: 1000, tolerance: 3%}
  - {arm: 7B Z3, measurement: step_time, value: 450, tolerance: 3%}
  - {arm: 13B FP8, measurement: step_time, value: 450, tolerance: 3%}
  - {arm: 7B Naive, measurement: mfu, value: 0.5, tolerance: 3%}
tables:
  - {title: step times, rows: [model], columns: [method], measurement: step_time, match: {method: [Naive, Z3, FP8]}}
  - {title: speedups, rows: [arm], columns: [], measurement: speedup}
  - {title: coefficients, rows: [method], columns: [model], measurement: step_time_coefficient, match: {model: 7B}}
window: null
published: [theirs]
published_match: {theirs: {model: 7B}}
"""
THEIRS = """
title: theirs
place: table 1
hardware: 8 GPUs
signs: {"-": out of memory}
date: "2024"
columns:
  - {measurement: step_time, unit: s}
  - {measurement: throughput, unit: tokens/s}
rows:
  - {labels: {model: 7B, method: Naive}, printed: ["1.1", "38"]}
  - {labels: {model: 7B, method: Z3}, printed: ["0.6", "-"]}
  - {labels: {model: 13B, method: Naive}, printed: ["3", "20"]}
"""
PLANNED = {
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "memory_gib": 61.5,
    "step_time_ms": 1050.0,
    "weights_gb": 13.5,
    "device": "H100",
    "environment": {"NCCL_ALGO": "Ring"},
}
ARMS = [
    PlannedArm(name="7B Naive", fits=True, **PLANNED),
    PlannedArm(name="7B Z3", fits=True, **PLANNED | {"environment": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}}),
    PlannedArm(name="7B FP8", fits=True, **PLANNED | {"step_time_ms": None}),
    PlannedArm(name="13B Naive", fits=False, **PLANNED | {"weights_gb": 26.0}),
    PlannedArm(name="13B Z3", fits=None, changed=("recipe.lr=1",), **PLANNED | {"weights_gb": None}),
    PlannedArm(name="13B FP8", mark=Mark.not_advisable, reason="it does not converge", runs=False, device="H100"),
    PlannedArm(name="alone", **PLANNED),
]


@pytest.fixture
def study_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a study with valid, failed and missing runs, and with runs in later blocks."""
    (tmp_path / "published").mkdir()
    (tmp_path / "published/theirs.yaml").write_text(THEIRS)
    study = library.load("mine", config_dir=written(tmp_path, STUDY))
    publications = library.publications(study, config_dir=tmp_path)
    stored = StoredStudy(name="mine", cluster="here", overrides=("seed=1",), study=study, publications=publications)
    folder = tmp_path / "mine-here"
    with folders.locked(folder, stored, ARMS):
        pass
    days = [int(datetime(2026, 11, day, 12, tzinfo=UTC).timestamp() * 1000) for day in (20, 22)]
    monkeypatch.setattr(mllog, "clocks_ms", lambda: (days[0], days[0]))
    for block, drift in enumerate((1.0, 1.01, 0.99), 1):
        valid_run(folder / f"7B_Naive.{block}", [drift, 1.02 * drift], num_ranks=2)
        valid_run(folder / f"13B_Naive.{block}", [2 * drift, 2 * drift])
    monkeypatch.setattr(mllog, "clocks_ms", lambda: (days[1], days[1]))
    valid_run(folder / "7B_Z3.1", [0.5, 0.5], commit="def")
    valid_run(folder / "7B_Z3.2", [0.52, 0.51])
    valid_run(folder / "7B_Z3.4", [0.52, 0.51])
    valid_run(folder / "7B_Naive.5", [1.0, 1.0])
    failed(folder / "7B_Z3.3", "RUN-01", "a GPU is full")
    failed(folder / "7B_FP8.1", "NCC-01", "the network is down")
    failed(folder / "7B_FP8.2", "NCC-01", "the network is down")
    valid_run(folder / "13B_Z3.1", [1.2, 1.2])
    valid_run(folder / "alone.1", [3.0, 3.0])
    return folder


def test_a_result_is_that_of_the_golden_file(study_folder: Path) -> None:
    result = {"of three runs": golden.significant(studies.read(study_folder))}
    fewer = golden.significant(studies.read(study_folder, runs=1))
    result["of one run"] = {name: fewer[name] for name in ("differences", "notes", "order", "references")}
    text = json.dumps(result, indent=1, ensure_ascii=False, default=str).replace(str(study_folder.parent), "SITE")
    golden.require(f"{text}\n", RESULT, variable="WRITE_STUDY_RESULT")


def test_a_junit_file_has_a_case_for_each_arm_and_reference(study_folder: Path) -> None:
    cases = junit.of_arms(study_folder, "runstop study mine cluster=here")
    assert {case.group for case in cases} == {"study.mine-here"}
    shown = {case.name: (case.failure, case.skipped) for case in cases}
    assert shown == {
        "7B Naive": ("", ""),
        "7B Z3": ("7B_Z3.3 out of memory: RUN-01: a GPU is full", ""),
        "7B FP8": ("7B_FP8.1 failed: NCC-01: the network is down; 7B_FP8.2 failed: NCC-01: the network is down", ""),
        "13B Naive": ("", ""),
        "13B Z3": ("", "2 of 3 runs have no result yet"),
        "13B FP8": ("", "it does not converge"),
        "alone": ("", "2 of 3 runs have no result yet"),
    }
    details = {case.name: case.details for case in cases}
    assert details["7B FP8"] == (
        "7B_FP8.1 failed: NCC-01: the network is down\n7B_FP8.2 failed: NCC-01: the network is down\n"
        f"  where: {study_folder}\n  fix:   runstop why {study_folder}/7B_FP8.1; to repeat the failed runs: "
        "runstop study mine cluster=here"
    )
    assert [name for name, text in details.items() if text] == ["7B Z3", "7B FP8"]
    references = {case.name: case for case in junit.of_references(studies.read(study_folder))}
    assert {case.group for case in references.values()} == {"study.mine.references"}
    assert {name: (case.failure, case.output) for name, case in references.items()} == {
        "7B Naive step_time": ("", "1010 ms is +1.0 % from 1000 ms (tolerance 3 %, n = 3)"),
        "7B Z3 step_time": ("failed: 507.5 ms is +12.8 % from 450 ms (tolerance 3 %, n = 2)", ""),
        "13B FP8 step_time": ("not measured: it does not converge", ""),
        "7B Naive mfu": ("not measured: not measured by its runs", ""),
    }
    fix = "find out what changed with runstop compare; if the change is wanted, change `value` in the study's file"
    assert references["13B FP8 step_time"].details == (
        f"it does not converge\n  where: references of the study mine\n  fix:   {fix}"
    )
    assert references["7B Naive step_time"].details == ""


MERGED, RENAMED = (Path(__file__).with_name(f"study_result_{how}.json") for how in ("merged", "renamed"))


def require(result: object, file: Path, folder: Path) -> None:
    text = json.dumps(golden.significant(result), indent=1, ensure_ascii=False, default=str)
    golden.require(f"{text.replace(str(folder), 'SITE')}\n", file, variable="WRITE_STUDY_RESULT")


def test_clusters_and_platforms_of_a_document_are_columns(study_folder: Path) -> None:
    """Two clusters, of which one is a platform of the document, and a platform without runs."""
    tables = [("table_h100", "H100", "H100"), ("table_a800", "A800", "A800"), ("alone", "", "")]
    publications = tuple(
        Publication(
            name=name,
            title="theirs" if gpu else "others",
            place="table 1",
            hardware=f"8 x {gpu}",
            date="2024",
            platform=PublishedPlatform(name=platform, gpu=gpu, environment={"NCCL_ALGO": "Ring"}) if gpu else None,
        )
        for name, platform, gpu in tables
    )
    figures = tuple(
        Published(publication=name, value=float(number), printed=str(number))
        for number, (name, _, _) in enumerate(tables)
    )
    read = studies.read(study_folder)
    first = replace(
        read,
        publications=publications,
        rows=tuple(replace(row, published={"step_time": figures}) for row in read.rows[:2]),
        statements=tuple(
            replace(one, published=tuple(replace(each, publication="table_a800") for each in one.published))
            for one in read.statements[1:2]
        ),
        tables=read.tables[:1],
    )
    second = replace(
        first,
        folder=f"{study_folder.parent}/more/mine-there",
        cluster="there",
        device="B200",
        hardware="B200",
        commit="def, fed",
        date="2026-11-21",
        rows=first.rows[1:],
        notes=(first.notes[0], "only there"),
        environment={},
    )
    require(platforms.merged([first, second]), MERGED, study_folder.parent)
    same_place = replace(second, cluster="here", tables=())
    (name, *_), *_ = (
        platforms.merged([replace(second, tables=(), folder="/a/x/runs/mine"), same_place]).tables[0].columns
    )
    assert name == "there"
    headings = platforms.merged([replace(same_place, folder=f"/data/{run}/runs/mine-here") for run in ("a", "b")])
    assert [one.name for one in headings.platforms] == ["here, a", "here, b", "H100", "A800"]


def test_arms_that_ran_another_model_are_renamed_everywhere(study_folder: Path) -> None:
    read = studies.read(study_folder)
    result = replace(read, rows=tuple(replace(row, cells={}, published={}, facts={}) for row in read.rows))
    planned = {arm.name: replace(arm, model="" if arm.name == "13B Z3" else "tiny") for arm in ARMS}
    renamed = labels.renamed(result, planned)
    require(renamed, RENAMED, study_folder.parent)
    assert labels.renamed(result, {arm.name: arm for arm in ARMS}) is result


def test_the_name_of_an_arm_is_not_replaced_inside_of_words(study_folder: Path) -> None:
    read = studies.read(study_folder)
    one = replace(read.differences[1], reason="13B FP8: it failed; alone: 213B FP80 and alone_")
    planned = {name: PlannedArm(name=name, model="tiny") for name in ("13B FP8", "alone")}
    (renamed,) = labels.renamed(replace(read, differences=(one,), tables=()), planned).differences
    assert renamed.reason == "tiny instead of 13B FP8: it failed; alone (tiny): 213B FP80 and alone_"
