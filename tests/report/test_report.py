"""A report claims only what its logs show, is self-contained, and escapes text from logs."""

import csv
import dataclasses
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import pytest

from bench import report
from bench.cli import main
from bench.contract import node_facts, plan_kinds
from bench.contract.node_facts import GpuFacts, RankFacts, Results, Software
from bench.errors import ConfigError, LogError
from bench.mlperf import titles
from bench.mlperf.result import UNVERIFIED
from bench.planning.compose import compose
from bench.report import compare, described_logs, page
from bench.report.output_folder import MARK
from bench.report.page import differences
from bench.report.sets import load
from helpers import answers
from helpers.failing_disk import contents, failing
from helpers.page import Page, unpainted
from helpers.paths import CORPUS
from helpers.types import MakeLog
from jobs.node_checks import hardware

SMC = CORPUS / "v4.0/smc/1xSMC-H100-SXM-80GB/llama2_70b_lora"
MakeSet = Callable[..., Path]
with_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of real logs is not here")


@pytest.fixture
def trial_set(written_log: MakeLog, tmp_path: Path) -> MakeSet:
    """Write a folder of logs, each with its own changes."""

    def make(name: str, trials: Sequence[dict[str, object]]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for number, changes in enumerate(trials):
            written_log(**{"seed": number, **changes}).rename(folder / f"result_{number}.txt")
        return folder

    return make


@pytest.mark.parametrize("is_there", [True, False])
def test_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Tables and figures are replaced together; other files in the folder are not touched."""
    out = tmp_path / "reports" / "out"

    def writes(content: str, *names: str) -> Callable[..., None]:
        def write(sets: object, folder: Path, *, title: str | None) -> None:
            for name in names:
                (folder / name).write_text(f"{MARK} {content}")

        return write

    if is_there:
        monkeypatch.setattr(report, "_write", writes("old", "report.html", "trials.csv", "sets.png"))
        report.write([], out)
        (out / "thesis.txt").write_text("not ours")
    monkeypatch.setattr(report, "_write", writes("new", "report.html", "trials.csv", "step_times.csv"))
    kept, number = tmp_path / "kept", 0
    if is_there:
        shutil.copytree(tmp_path / "reports", kept)
    before = contents(tmp_path / "reports")
    while True:
        with failing(tmp_path, number) as disk:
            try:
                report.write([], out)
            except ConfigError as error:
                assert "No space left" in str(error) and contents(tmp_path / "reports") == before, disk.failed
            else:
                assert not list(out.glob(".part-*")) or disk.failed.startswith("os.r"), "only its removal may fail"
                assert all("new" in (out / name).read_text() for name in ("report.html", "step_times.csv")), disk.failed
        if not disk.failed:
            break
        shutil.rmtree(tmp_path / "reports", ignore_errors=True)
        if is_there:
            shutil.copytree(kept, tmp_path / "reports")
        number += 1
    assert number > 8 and "new" in (out / "step_times.csv").read_text() and "new" in (out / "report.html").read_text()
    assert (out / "thesis.txt").exists() == is_there


def write(*folders: Path, num_gpus: int | None = None, paint: bool = False) -> Page:
    out = folders[0].parent / "out"
    with nullcontext() if paint else unpainted():
        return Page(report.write(load(folders, num_gpus=num_gpus), out))


@pytest.mark.long
@with_corpus
def test_ten_published_runs_get_their_published_score_and_rank(tmp_path: Path) -> None:
    (trials,) = load([SMC])
    page = Page(report.write([trials], tmp_path / "out"))
    claim = compare.claim(trials)
    assert (claim.kind, claim.num_valid) == ("score", 10)
    assert claim.minutes == pytest.approx(29.10069, abs=5e-6)
    systems, why_not = compare.peers(trials)
    places = {s.name: (s.rank, s.count) for s in compare.rankings(trials, claim, systems)}
    assert why_not == ""
    assert places["H100, all rounds"] == (9, 20)  # itself among them
    assert "29.10 minutes: olympic mean of 10 runs × RCP factor 1.0347" in page.text
    assert all(
        path.is_file() for path in [tmp_path / "out" / f"{n}.png" for n in ("samples", "published", "step_time")]
    )
    with (tmp_path / "out" / "trials.csv").open() as file:
        assert [float(row["minutes"]) for row in csv.DictReader(file)] == [r.minutes for r in trials.results]


@pytest.mark.long
def test_page_is_self_contained_and_reproducible(trial_set: MakeSet) -> None:
    folder = trial_set("set", [{}] * 3)
    page = write(folder, num_gpus=8, paint=True)
    first = {path.name: path.read_bytes() for path in (folder.parent / "out").iterdir()}
    write(folder, num_gpus=8, paint=True)
    assert {path.name: path.read_bytes() for path in (folder.parent / "out").iterdir()} == first
    assert page.loads
    assert all(url.startswith("data:image/png;base64,") for url in page.loads)
    assert page.runs_only_ours
    assert UNVERIFIED in page.text
    assert {"report.html", "trials.csv", "evaluations.csv", "step_times.csv", "convergence.png"} <= first.keys()


@pytest.mark.long
def test_too_few_runs_have_no_score(trial_set: MakeSet) -> None:
    folder = trial_set("set", [{}] * 3)
    (trials,) = load([folder], num_gpus=8)
    claim = compare.claim(trials)
    systems, _ = compare.peers(trials)
    assert claim.kind == "runs"
    assert claim.why_no_score
    assert {s.rank for s in compare.rankings(trials, claim, systems)} == {None}
    assert "Not a score: " in write(folder).text


@pytest.mark.long
def test_invalid_runs_claim_no_minutes_and_have_reasons(trial_set: MakeSet) -> None:
    folder = trial_set("set", [{}, {"status": "aborted"}, {"evals": (0.95, 0.94)}])
    page = write(folder)
    (trials,) = load([folder])
    claim = compare.claim(trials)
    assert (claim.kind, claim.minutes, claim.num_valid) == ("none", None, 1)
    assert "2 of 3 runs are invalid" in page.text
    assert "LOG-05 line " in page.text
    assert "LOG-07 line " in page.text


def test_findings_name_the_line_if_there_is_one(trial_set: MakeSet) -> None:
    (trials,) = load([trial_set("set", [{}, {"evals": (0.95, 0.94)}, {"opt_adamw_weight_decay": None}])])
    where = {row["message"]: row["where"] for row in page._findings(trials)}
    lines = Path(trials.results[1].file).read_text().splitlines()
    last = max(number for number, line in enumerate(lines, 1) if '"eval_accuracy"' in line)
    assert [at for message, at in where.items() if message.startswith("the last evaluation is 0.94, ")] == [
        f"{trials.trial_names[1]} (line {last})"
    ]
    assert where["the log has no opt_adamw_weight_decay"] == trials.trial_names[2], "a missing record has no line"


@pytest.mark.long
def test_other_task_is_not_compared_with_the_benchmark(trial_set: MakeSet) -> None:
    mark = "laptop (lora_tiny: not a submission)"
    folder = trial_set("tiny", [{"submission_platform": mark, "submission_org": mark}] * 10)
    page = write(folder, num_gpus=8)
    (trials,) = load([folder], num_gpus=8)
    assert compare.peers(trials)[0] == ()
    assert compare.claim(trials).kind == "runs"
    assert "Not compared: laptop (lora_tiny: not a submission)" in page.text
    assert titles.title(trials.results[0]) == f"lora_tiny on {mark}"
    assert "lora_tiny on laptop" in page.text and "llama2_70b_lora on" not in page.text
    assert "SCO-06" not in page.text and "SCO-06" in {finding.rule for finding in trials.score.findings}
    assert "RCP factor" not in page.text
    assert not (folder.parent / "out" / "published.png").exists()


@pytest.mark.long
def test_log_text_is_escaped_in_the_page(trial_set: MakeSet) -> None:
    evil = '=1+1"><script>alert(1)</script><img src=http://x>\x1b[2J\u202e{{ 7 * 7 }}'
    folder = trial_set("set", [{"submission_platform": evil, "config_filename": evil, "submission_org": evil}])
    page = write(folder)
    assert page.runs_only_ours
    assert all(url.startswith("data:") for url in page.loads)
    assert "alert(1)" in page.text
    assert "49" not in page.text.split("alert(1)")[1][:40]
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text
    with (folder.parent / "out" / "trials.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["hardware"].startswith("'=1+1")
    assert "\x1b" not in row["hardware"]


@pytest.mark.long
def test_sets_are_compared_with_the_first(trial_set: MakeSet) -> None:
    folders = [trial_set(name, [{}] * 3) for name in ("before", "after")]
    other = trial_set("other", [{"submission_benchmark": "llama31_8b"}])
    both, mixed = write(*folders), write(folders[0], other)
    assert "llama2_70b_lora: 2 sets compared" in both.text
    ours = ["sets.png", "samples_1.png", "convergence_1.png"]
    assert _figures(both.text) == [*ours, "samples_2.png", "convergence_2.png"]
    assert _figures(mixed.text) == [*ours, "convergence_2.png"]
    assert "of another benchmark than the first" in mixed.text
    assert "of another benchmark than the first" not in both.text


def _figures(text: str) -> list[str]:
    """Return the figures of a page except step times, which logs written within a millisecond do not have."""
    return [name for name in re.findall(r"\w+\.png", text) if not name.startswith("step_time")]


@pytest.mark.long
def test_differences_and_speed_ratios_of_sets(trial_set: MakeSet) -> None:
    before = trial_set("before", [{}] * 3)
    after = trial_set("after", [{"opt_base_learning_rate": 5e-4, "gradient_accumulation_steps": 2}] * 3)
    sets = load([before, after])
    assert differences(sets) == [
        ("gradient_accumulation_steps", ["1", "2"]),
        ("opt_base_learning_rate", ["0.0004", "0.0005"]),
    ]
    assert differences([sets[0], sets[0]]) == []
    first, second = ([r.throughput_samples_s for r in trials.results] for trials in sets)
    rows = page._compared(sets, before.parent)["rows"]
    assert [row["speed_ratio"] for row in rows] == [1.0, median(second) / median(first)]
    text = write(before, after).text
    assert "gradient_accumulation_steps" in text.partition("What differs")[2].partition("Ratio")[0]


@pytest.mark.long
def test_differences_of_plans_are_config_keys(trial_set: MakeSet) -> None:
    folders = [trial_set(name, [{}]) for name in ("a", "b")]
    for folder, tp in zip(folders, (1, 2), strict=True):
        plan = compose(["task=lora_tiny", "cluster=local", f"parallel.tp={tp}", f"launch.folder={folder}"])
        (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    assert ("parallel.tp", ["1", "2"]) in differences(load(folders))
    assert not [name for name, _ in differences(load(folders)) if name.startswith(("launch", "task.summary"))]


@pytest.mark.long
def test_details_of_compared_sets_are_collapsed(trial_set: MakeSet) -> None:
    folders = [trial_set(name, [{}] * 2) for name in ("before", "after")]
    assert write(*folders).tags.count("details") == 2
    assert write(folders[0]).tags.count("details") == 0


def test_a_folder_of_run_folders_is_a_set_for_each(trial_set: MakeSet, tmp_path: Path) -> None:
    for name in ("b", "a"):
        trial_set(name, [{}])
    (tmp_path / "empty").mkdir()
    assert [trials.name for trials in load([tmp_path])] == ["a", "b"]


@pytest.mark.long
def test_files_of_one_folder_are_one_set(trial_set: MakeSet) -> None:
    folder = trial_set("set", [{}] * 3)
    one = load([folder / "result_0.txt", folder / "result_2.txt"])
    assert [len(trials.results) for trials in one] == [2]
    assert [trials.trial_names for trials in one] == [["0", "2"]]
    assert [trials.name for trials in load([folder / "result_2.txt"])] == ["set, result_2"]
    assert [len(trials.results) for trials in load([folder, folder / "result_2.txt"])] == [3, 1]


def test_gpu_count_of_logs_overrides_the_users(trial_set: MakeSet) -> None:
    logged = trial_set("logged", [{"accelerator": "H200", "num_ranks": 8}])
    silent = trial_set("silent", [{}])
    assert [trials.num_gpus for trials in load([logged, silent], num_gpus=64)] == [8, 64]
    with pytest.raises(ConfigError, match="--num-gpus is -5, but must be 1 or more"):
        load([logged], num_gpus=-5)


@pytest.mark.long
def test_missing_mean_has_a_reason(trial_set: MakeSet) -> None:
    """Eight of ten valid runs would suffice for a mean, but two failed runs are too many."""
    page = write(trial_set("set", [{}] * 8 + [{"status": "aborted"}] * 2))
    assert page.text.count("none: too few counted runs") == 2
    assert "2 runs failed, but at most 1 may fail" in page.text


@pytest.mark.long
def test_other_files_are_not_overwritten(trial_set: MakeSet, tmp_path: Path) -> None:
    folder = trial_set("set", [{}])
    out = tmp_path / "out"
    out.mkdir()
    for name in ("trials.csv", "samples_2.png", "report.html"):
        (out / name).write_text("mine")
        with pytest.raises(ConfigError, match=rf"does not overwrite: {name}"):
            write(folder)
        assert [path.read_text() for path in out.iterdir()] == ["mine"]
        (out / name).unlink()
    (out / "notes.csv").write_text("mine")
    write(folder)
    assert (out / "notes.csv").read_text() == "mine"
    with pytest.raises(ConfigError, match="the report cannot be written"):
        report.write(load([folder]), folder / "result_0.txt")


@pytest.mark.long
def test_interrupt_keeps_the_last_report(trial_set: MakeSet, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trial_set("set", [{}])
    out = folder.parent / "out"

    def stop(context: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(report, "_render", stop)
        with pytest.raises(KeyboardInterrupt):
            write(folder)
        assert not out.exists()
    write(folder)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(report, "_render", stop)
    with pytest.raises(KeyboardInterrupt):
        write(folder, num_gpus=8)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"no result_\*\.txt"):
        load([tmp_path])
    with pytest.raises(ConfigError, match="no run or file has this name"):
        load([tmp_path / "nowhere"])


def test_the_verb_prints_the_rows_that_the_page_shows(trial_set: MakeSet, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trial_set("set", [{}, {"status": "aborted"}])
    printed = {}
    for form in ("--json", "--csv"):
        with pytest.raises(SystemExit) as stop:
            main(["report", str(folder), form])
        assert stop.value.code == 0
        printed[form] = capsys.readouterr().out
    rows = answers.read(printed["--json"])
    assert [(row["trial"], row["seed"], row["valid"]) for row in rows] == [("0", 0, True), ("1", 1, False)]
    assert [row["seed"] for row in csv.DictReader(printed["--csv"].splitlines())] == ["0", "1"]


def test_invalid_set_exits_with_one(trial_set: MakeSet, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(trial_set("set", [{"status": "aborted"}]))])
    assert stop.value.code == 1
    assert "1 of 1 runs are invalid" in capsys.readouterr().out


@pytest.mark.long
def test_report_lists_hardware_and_software(trial_set: MakeSet) -> None:
    """The facts of ranks (`jobs.node_checks.facts`) are listed next to those in the log."""
    logged = {"software": {"torch": "2.13.0"}, "accelerator": "NVIDIA H200", "operating_system": "Ubuntu 24.04"}
    folder = trial_set("set", [{**logged, "commit": "0123abcd", "lora_dropout": 0.1}] * 2)
    unknown = {field.name: None for field in dataclasses.fields(GpuFacts)}
    gpu = GpuFacts(**unknown | {"name": "NVIDIA H200", "driver": "570.86.15", "memory_mib": 143771})
    here = hardware.machine(results=Results("/results", 1, None), paths=())
    rank = RankFacts(
        rank=0,
        local_rank=0,
        world_size=1,
        node="dgx-1",
        hostname="dgx-1",
        attempt=None,
        time_ms=0,
        software=Software(None, False, "Rocky 9.4", "3.12.3", "/usr/bin/python3", {"numpy": "2.1.0"}),
        cuda_visible_devices=None,
        num_cpus=8,
        memlock_bytes=0,
        environment=(),
        not_as_planned=(),
        machine=dataclasses.replace(here, gpus=(gpu,)),
    )
    (folder / "facts").mkdir()
    (folder / "facts" / "rank_0.json").write_text(node_facts.dumps(rank))
    (trials,) = load([folder])
    rows = dict(page.system_rows(trials))
    assert rows == {
        "torch": "2.13.0",
        "accelerator": "NVIDIA H200",
        "operating system": "Rocky 9.4",
        "commit": "0123abcd",
        "python": "3.12.3",
        "numpy": "2.1.0",
        "GPU driver": "570.86.15",
    }
    settings = dict(described_logs.settings(trials.results))
    assert settings["lora_dropout"] == "0.1" and not {"accelerator", "operating_system", "commit"} & settings.keys()
    (folder / "facts" / "rank_0.json").write_text("{")
    assert dict(page.system_rows(trials))["operating system"] == "Ubuntu 24.04"
    assert "570.86.15" not in write(folder).text


@with_corpus
def test_report_labels_median_and_mean_step_times(tmp_path: Path) -> None:
    (trials,) = load([SMC])
    with unpainted():
        text = " ".join(Page(report.write([trials], tmp_path / "out")).text.split())
    assert re.findall(r"(median|mean|evaluation|samples) ?step ?time \(ms\)", text) == ["median", "mean"]
