"""A made-up results repository of a round, read by `runstop published`, and the tables that it writes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.console.result import score_sheets
from bench.errors import ConfigError
from bench.mlperf import published, results_repository, system_tables
from bench.mlperf.forecast import prior as priors
from bench.mlperf.forecast.curve import reference
from bench.mlperf.score import score
from helpers import planned_log
from helpers.user_tables import forget

DESCRIPTION = {
    "submitter": "Example",
    "division": "closed",
    "status": "Available cloud",
    "system_name": "Example box",
    "number_of_nodes": "2",
    "accelerators_per_node": 8,
    "accelerator_model_name": "NVIDIA H200-SXM5-141GB",
}
EVERY = 12_288
NUM_EVALUATIONS = (14, 15, 15, 15, 15, 15, 15, 15, 15, 16)


@pytest.fixture(scope="module")
def kept_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ten logs of llama31_8b at GBS 32, on 16 GPUs of two nodes."""
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        planned_log.without_this_machine(patch)
        plan = planned_log.planned("llama31_8b", "cluster.num_nodes=2", "cluster.org=example", "trials=10")
        for trial, number in enumerate(NUM_EVALUATIONS):
            losses = [3.31 + 0.2 * (number - done) + trial * 1.7e-6 for done in range(1, number)]
            path = folder / f"result_{trial}.txt"
            planned_log.write(plan, path, [*losses, 3.29 + trial * 1.3e-6], trial=trial, step_s=2 + 0.01 * trial)
    return folder


@pytest.fixture
def repository(tmp_path: Path, kept_logs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a repository of round v9.1 with one system, and leave the tables of other tests alone."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "training_results_v9.1"
    logs = folder / "Example/results/5xBox_n9/llama31_8b"
    logs.mkdir(parents=True)
    for log in kept_logs.iterdir():
        (logs / log.name).symlink_to(log)
    (folder / "Example/systems").mkdir()
    (folder / "Example/systems/5xBox_n9.json").write_text(json.dumps(DESCRIPTION))
    forget()
    yield folder
    forget()


def entry(folder: Path) -> results_repository.Entry:
    (only,) = results_repository.opened(folder, benchmarks=["llama31_8b"]).entries()
    return only


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["published", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.long
def test_a_system_is_scored_from_its_logs_and_described_by_its_description(repository: Path, kept_logs: Path) -> None:
    """The name of the system says five or nine nodes; its description says two."""
    read, scored = entry(repository), score(kept_logs)
    assert read.minutes == scored.official_minutes and read.valid and read.notes == ()
    assert (read.round, read.submitter, read.system) == ("v9.1", "Example", "5xBox_n9")
    assert (read.num_nodes, read.num_gpus, read.accelerator) == (2, 16, "NVIDIA H200-SXM5-141GB")
    assert (read.global_batch_size, read.tp, read.pp, read.cp) == (32, 1, 1, 1)
    assert (read.samples, read.eval_interval) == (((14 * EVERY, 1), (15 * EVERY, 8), (16 * EVERY, 1)), EVERY)
    assert read.mean_samples == 15 * EVERY
    assert read.step_time_s == pytest.approx(2.045, rel=1e-4)
    assert read.tokens_s_gpu == pytest.approx(32 * 8192 / 2.045 / 16, rel=1e-4)


@pytest.mark.long
def test_differences_between_logs_and_other_files_are_noted(repository: Path) -> None:
    logs = repository / "Example/results/5xBox_n9/llama31_8b"
    (logs / "scaling.json").write_text('{"scaling_factor": 1.25}')
    summary = [{"submitter": "Example", "system": "Example box", "llama31_8b": 12.5, "flux1": None}]
    (repository / "Example/summary.json").write_text(json.dumps(summary))
    read = entry(repository)
    assert [note.split(" ")[0] for note in read.notes] == ["scaling.json", "the"]
    assert "12.500 min" in read.notes[1] and read.minutes is not None
    summary[0]["llama31_8b"] = round(read.minutes, 3)
    (repository / "Example/summary.json").write_text(json.dumps(summary))
    assert len(entry(repository).notes) == 1


@pytest.mark.long
def test_a_set_without_a_score_is_kept_with_its_reason(repository: Path) -> None:
    logs = repository / "Example/results/5xBox_n9/llama31_8b"
    for name in ("result_3.txt", "result_4.txt"):
        (logs / name).unlink()
    (repository / "Example/systems/5xBox_n9.json").write_text("not JSON")
    read = entry(repository)
    assert (read.minutes, read.valid, read.num_runs, read.num_nodes) == (None, False, 8, None)
    assert any("readable system description" in note for note in read.notes)
    assert any("a score needs 10 runs" in note for note in read.notes)
    with pytest.raises(ConfigError, match="no system can be listed in the table"):
        results_repository.write(repository / "table.csv", [read], source="x")
    assert run(str(repository)) == 1


@pytest.mark.long
def test_a_written_table_is_used_by_reports_and_forecasts(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = reference("llama31_8b", 32)
    assert before is not None and before.prior is not None
    forget()
    assert run(str(repository), "--write", "--json", "--source", "a made-up round") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "runstop/published-system/1.0" and answer["num_nodes"] == 2
    assert answer["samples_distribution"] == {"172032": 1, "184320": 8, "196608": 1}
    table = next(iter(system_tables.own_tables()))
    assert table.name == "v9.1.csv" and table.read_text().startswith("# Source: a made-up round.")
    mine = [system for system in published.systems("llama31_8b") if system.round == "v9.1"]
    assert [(one.name, one.num_gpus, one.tp) for one in mine] == [("v9.1 Example 5xBox_n9", 16, 1)]
    assert mine[0].official_minutes == pytest.approx(answer["time_to_train_min"], rel=1e-6)
    after = reference("llama31_8b", 32)
    assert after is not None and after.prior is not None
    assert after.prior.num_systems == before.prior.num_systems + 1
    assert after.convergence.num_runs == before.convergence.num_runs + 10
    assert run(str(repository), "--write") == 0  # again, over its own table


def test_a_system_of_a_written_table_is_counted_once(repository: Path) -> None:
    """Its runs are also in the shipped file of runs."""
    before = priors.counted_systems("llama2_70b_lora")
    shipped = next(one for one in before if one.round == "v5.1")
    submitter, _, name = shipped.system.partition("/")
    same = replace(
        next(iter(published.systems("llama2_70b_lora"))),
        round="v5.1",
        submitter=submitter,
        system=name,
        samples=shipped.counts,
        global_batch_size=shipped.global_batch_size,
        eval_interval=shipped.interval,
    )
    table = system_tables.user_folder() / system_tables.OWN / "v5.1.csv"
    table.parent.mkdir(parents=True)
    table.write_text(system_tables.text([same], notes=[]))
    forget()
    after = priors.counted_systems("llama2_70b_lora")
    assert sorted(map(str, after)) == sorted(map(str, before))


@pytest.mark.long
def test_a_score_is_compared_with_published_ones_on_as_many_gpus(kept_logs: Path) -> None:
    """Round v5.1 has four systems with 16 GPUs: 51.827, 59.561, 60.811 and 61.380 minutes."""
    scored = replace(score(kept_logs), num_gpus=16)
    (row,) = [row for row in score_sheets(scored)[1].rows if row[0].startswith("published")]
    assert row[:2] == ("published (min), 16 GPUs", "51.827 best, 60.186 median")
    assert "4 systems; v5.1 Nebius nebius_b200_n2" in row[2] and "this score would be number 5" in row[2]
    assert not any(row[0].startswith("published") for row in score_sheets(replace(scored, num_gpus=17))[1].rows)


def test_a_damaged_table_of_the_user_names_its_line(repository: Path) -> None:
    table = system_tables.user_folder() / system_tables.OWN / "mine.csv"
    table.parent.mkdir(parents=True)
    row = ["llama31_8b", "v9.1", "Example", "box", "1", "eight", "H200"]
    table.write_text(f"# a note\n{','.join(system_tables.COLUMNS)}\n{','.join(row)}\n")
    with pytest.raises(ConfigError, match=r"mine\.csv, line 3"):
        published.systems("llama31_8b")
    table.write_text("round,system\nv9.1,box\n")
    with pytest.raises(ConfigError, match="has no column submitter, accelerator, num_gpus, official_minutes"):
        published.systems("llama31_8b")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: ["/nonexistent"], "does not exist"),
        (lambda folder: [str(folder / "Example")], "folder of one submitter"),
        (lambda folder: [str(folder), "--round", "9.1"], "is not the name of a round"),
        (lambda folder: [str(folder.rename(folder.with_name("results")))], "add --round, such as --round v5.1"),
        (lambda folder: [str(folder), "--benchmark", "llama2_70b_lora"], "this folder has logs of llama31_8b"),
        (lambda folder: [str(folder), "--write", str(folder / "Example/systems/5xBox_n9.json")], "not a table"),
        (lambda folder: [str(folder), "--write", str(folder)], "this path is a folder"),
        (lambda folder: [str(folder), "--write", "."], "this path is a folder"),
    ],
)
def test_wrong_input_is_refused_before_logs_are_read(
    change: Any, expected: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*change(repository)) == 2
    shown = capsys.readouterr()
    assert expected in shown.err and "fix:" in shown.err and "reading" not in shown.err and shown.out == ""


def test_a_bare_git_repository_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "training_results_v9.1.git"
    (folder / "objects").mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    assert run(str(folder)) == 2
    assert "git clone" in capsys.readouterr().err
