"""`runstop study` from the command line: it lists, plans, runs and reads studies; a stub for ranks ends each run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from test_running import STUDY, Ranks, paths, ranks
from test_spec import written

from bench import cli, report, studies
from bench.cli import study as cli_study
from bench.results.study import StudyResult
from bench.studies import library
from helpers import answers

__all__ = ["ranks"]
Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def study(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run the verb with these arguments; return its exit code, stdout and stderr."""
    monkeypatch.setattr(library, "CONF", tmp_path)
    written(tmp_path, STUDY)
    written(tmp_path, STUDY.replace("title: t", "title: another").replace("question: q", "question: why"), name="other")

    def study(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["study", *map(str, words)])
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return study


def test_studies_are_listed_and_their_names_completed(study: Verb) -> None:
    rows = [
        {"schema": "runstop/study-title/1.0", "name": "mine", "title": "t", "question": "q", "source": "s"},
        {"schema": "runstop/study-title/1.0", "name": "other", "title": "another", "question": "why", "source": "s"},
    ]
    code, output, _ = study("--json")
    assert code == 0 and answers.read(output) == rows
    lines = study("--list")[1].splitlines()
    assert lines[0] == "studies" and lines[1] == "study\ttitle\tquestion\tsource"
    assert lines[2:4] == ["mine\tt\tq\ts", "other\tanother\twhy\ts"]
    assert lines[4:] == ["to see the runs of a study, such as tiny: runstop study tiny cluster=local --dry-run"]
    assert study("mine", "--list", "--json") == (code, output, "")
    assert (cli_study._names("m"), cli_study._names(""), cli_study._names("x")) == (["mine"], ["mine", "other"], [])


@pytest.mark.long
def test_a_dry_run_plans_the_arms_and_starts_nothing(study: Verb, ranks: Ranks, tmp_path: Path) -> None:
    code, output, _ = study("mine", "--dry-run", "--json", "--runs", 3, *paths(tmp_path))
    planned = answers.one(output)
    assert code == 0 and planned["folder"] == str(tmp_path / "studies/mine-local")
    assert [arm["name"] for arm in planned["arms"]] == ["a", "b"] and list(planned["gpu_hours"]) == ["a", "b"]
    assert [sorted(block) for block in planned["order"]] == [["a", "b"]] * 3
    code, output, _ = study("mine", "--dry-run", *paths(tmp_path))
    assert code == 0 and output.splitlines()[0].startswith("mine") and "4 of 4 runs to do" in output
    assert not ranks.began and not (tmp_path / "studies").exists()
    code, output, _ = study("mine", "--dry-run", *paths(tmp_path), "parallel.tp=3")
    assert code == 1 and "no arm can run" in output


@pytest.mark.long
def test_a_dry_run_refuses_what_a_launch_refuses(study: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KubeRay starts runs from manifests only. What the site still has to provide is listed, and refuses no arm."""
    for name in ("DATADIR", "MODEL", "CONT"):
        monkeypatch.delenv(name, raising=False)
    logs, large = f"cluster.paths.logs={tmp_path}", "cluster.ranks_per_node=8"
    code, output, _ = study("mine", "--dry-run", "--json", "cluster=kuberay", large, logs)
    assert code == 1 and all("RAY-10: " in arm["reason"] for arm in answers.one(output)["arms"])
    assert study("mine", "cluster=kuberay", large, logs)[0] == 1, "as the run itself"
    code, output, _ = study("mine", "--dry-run", "cluster=dgx1", large, logs)
    assert code == 0 and "4 of 4 runs to do" in output
    assert "before a launch: PYX-04: the container image is not set" in output or "CONT is not set" in output


@pytest.mark.long
def test_a_dry_run_shows_a_walltime_that_is_too_short(study: Verb, tmp_path: Path) -> None:
    seven = ("task=pretrain_7b", "cluster=dgx1", f"cluster.paths.logs={tmp_path}", "cluster.ranks_per_node=8")
    words = (*seven, "precision=bf16", "walltime=10", "task.training.max_steps=200")
    code, output, _ = study("mine", "--dry-run", *words)
    assert code == 0 and "CFG-13: a trial takes an estimated" in output


@pytest.mark.long
def test_missing_runs_are_run_and_the_tables_are_shown(
    study: Verb, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.ends["b.2"] = "RUN-02"
    code, first, output = study("mine", *paths(tmp_path))
    assert code == 1 and len(ranks.began) == 4 and "mine: 0 of 4 runs done; next: block 1 of 2" in output
    folder = tmp_path / "studies/mine-local"
    assert "3 of 4 runs are valid" in first
    for second in (study("mine", "--table", *paths(tmp_path)), study(folder), study(folder, "--table")):
        assert second == (0, first, "") and len(ranks.began) == 4, "only read"
    code, output, _ = study(folder, "--json", "--runs", 1)
    assert code == 0 and [row["cells"]["step_time"]["runs"] for row in answers.one(output)["rows"]] == [
        ["a.1"],
        ["b.1"],
    ]
    wrote: list[tuple[StudyResult, Path]] = []

    def write(result: StudyResult, out: Path) -> list[Path]:
        wrote.append((result, out))
        return [out / "table.md", out / "index.html", out / "table.tex"]

    monkeypatch.setattr(report, "write_study", write)
    code, output, _ = study(folder, "-o", tmp_path / "out")
    assert (code, output) == (0, f"{first}\n{tmp_path}/out/index.html\n") and wrote[0][1] == tmp_path / "out"
    assert "out/index.html" not in study(folder, "--json", "-o", tmp_path / "out")[1] and len(wrote) == 2
    ranks.ends.clear()
    code, output, _ = study("mine", "--json", *paths(tmp_path))
    assert code == 0 and [len(row["cells"]["step_time"]["runs"]) for row in answers.one(output)["rows"]] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "o"], "--out writes the tables of a study, but these arguments produce no table\n  where: --out"),
        (["mine", "--out", "o", "--list"], "--out writes the tables of a study"),
        (["mine", "--out", "o", "--dry-run"], "--out writes the tables of a study"),
        (
            ["FOLDER", "--dry-run"],
            "--dry-run does not apply to the folder of a study: runstop only shows the results in this "
            "folder\n  where: FOLDER",
        ),
        (
            ["FOLDER", "b=1", "a=2"],
            "b=1 does not apply to the folder of a study: runstop only shows the results in this folder",
        ),
    ],
)
def test_contradicting_arguments_are_refused(study: Verb, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / studies.STUDY).touch()
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in words]
    code, printed, error = study(*arguments)
    assert (code, printed) == (2, "") and error.startswith(message.replace("FOLDER", str(tmp_path)))
