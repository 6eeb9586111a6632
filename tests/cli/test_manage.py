"""`tag`, `rerun` and the filters of `runs`: a run keeps its manifest, and is launched again with its own arguments."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cli import main
from bench.console.sheet import show
from bench.errors import ConfigError
from bench.launch import rerun, start
from bench.planning import compose
from bench.report.tables import TextTable
from bench.runs import command_line, tags, verification
from helpers import planted_runs
from helpers.screen import terminal


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == code, printed
    return printed.out + printed.err


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of lora_tiny that failed, with its manifest."""
    folder, words = tmp_path_factory.mktemp("template") / "run", ["task=lora_tiny", "cluster=local", "seed_base=3"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        plan, config_yaml = compose.for_run(words)
    folder.mkdir()
    (folder / "config.yaml").write_text(command_line.with_overrides(config_yaml, [*words, "launch.folder=x"]))
    return planted_runs.abort(folder, plan)


@pytest.fixture
def run(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return shutil.copytree(template, Path("runs/20261101-100000-lora_tiny-local-aaaa"))


@pytest.mark.long
def test_tags_are_shown_and_the_run_is_still_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert answer(capsys, "tag", "latest", "baseline", "v2", "--note", "before the driver").endswith(
        ": baseline, v2; before the driver\n"
    )
    assert answer(capsys, "tag", "aaaa", "v3", "--remove", "v2").endswith(": baseline, v3; before the driver\n")
    listed = json.loads(answer(capsys, "runs", "--json", "--tag", "base*"))
    assert (listed["tags"], listed["note"]) == (["baseline", "v3"], "before the driver")
    assert "baseline, v3" in answer(capsys, "runs") and "none of 1 runs has --tag x" in answer(
        capsys, "runs", "--tag", "x"
    )
    assert verification.verify(run).passed and all(path.read_bytes() == data for path, data in before.items())
    assert answer(capsys, "tag", "latest", "--remove", "baseline", "v3", "--note", "").endswith(": no tags\n")
    assert {path for path in run.rglob("*") if path.is_file()} == {*before}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a b"], "'a b' is not allowed as a tag"),
        (["x" * 41], "is not allowed as a tag"),
        (["ok", "--note", "a\x1b[2J"], "the note is longer than"),
        (["--remove", "x"], "the run has no tag x"),
        ([f"t{number}" for number in range(21)], "a run can have at most 20 tags"),
        (["--note", "hf_" + "a" * 34], "the file would contain a secret"),
    ],
)
def test_bad_tags_are_refused(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in answer(capsys, "tag", "latest", *words, code=2)
    assert not (run / "tags.json").exists()


def test_what_tag_would_refuse_is_not_read_either(run: Path) -> None:
    (run / "tags.json").write_text(json.dumps({"tags": ["a b", "ok", "ok", 7], "note": "a\x1b[2J"}))
    assert tags.read(run) == tags.Tags(tags=("ok",))


def test_runs_are_filtered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(run, run.with_name("old-bbbb"))
    (other / "status.json").unlink()
    os.utime(other / "plan.json", (time.time() - 3 * 86400,) * 2)
    tags.change(other, add=["x"])

    def listed_names(*words: str) -> list[str]:
        lines = answer(capsys, "runs", "--json", *words).splitlines()
        return [Path(json.loads(line)["run"]).name[-4:] for line in lines]

    assert listed_names() == ["aaaa", "bbbb"]
    assert listed_names("--since", "2d") == ["aaaa"] and listed_names("--since", "2001-01-01") == ["aaaa", "bbbb"]
    assert listed_names("--status", "failed") == ["aaaa"] and listed_names("--status", "unknown") == ["bbbb"]
    assert listed_names("--status", "ended") == ["bbbb"], "a run on this machine without a final status"
    assert listed_names("--task", "lora_*", "--tag", "x") == ["bbbb"] and listed_names("--cluster", "dgx*") == []
    assert listed_names("latest~1") == ["bbbb"] and listed_names(str(run)) == ["aaaa"]
    assert "'x' is not a time" in answer(capsys, "runs", "--since", "x", code=2)
    assert "choose one of active, valid" in answer(capsys, "runs", "--status", "x", code=2)
    assert "this file is not a run folder" in answer(capsys, "runs", str(run / "plan.json"), code=2)


def test_without_output_logs_says_whether_the_run_has_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "this run has ended, and its job wrote no output" in answer(capsys, "logs", str(run), code=2)
    (run / "status.json").unlink()
    assert "this run has ended" in answer(capsys, "logs", str(run), code=2), "its driver is gone"
    assert "this folder is not a run folder" in answer(capsys, "logs", "runs", code=2)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_list_has_one_line_a_row(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"20261126-062048-finetune_tiny_dolly-dgx-c0b{number}" for number in range(3)]
    rows = [(name, "2026-11-26 06:21", "interrupted", "", "1 valid", "task=lora_tiny " * 20) for name in names]
    out = terminal(monkeypatch, columns)
    show(TextTable("runs", rows, ("run", "started", "state", "tags", "trials", "overrides"), is_list=True), file=out)
    title, heading, _, *lines = out.text.splitlines()
    assert max(map(len, out.text.splitlines())) <= columns and "tags" not in heading
    if columns >= 80:
        assert [line.split()[0] for line in lines[:3]] == names and "interrupted" in lines[0]
        assert ("overrides" in heading) == (columns == 200)
    else:
        assert "interrupted" in lines[0], "the name is folded, so that its state is seen"


@pytest.mark.long
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.none() | st.just(Path("/a b")))
def test_every_command_line_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, overrides: list[str], site: Path | None
) -> None:
    folder = tmp_path_factory.mktemp("written", numbered=True)
    (folder / "config.yaml").write_text(command_line.with_overrides("a: 1\n", overrides, site))
    known = command_line.read(folder)
    assert (list(known.overrides), known.config_dir, known.runstop) == (overrides, site, command_line.installed())


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        (["task=a", "recipe.lr=1"], ["recipe.lr=2"], ["task=a", "recipe.lr=2"]),
        (["task=a", "+x=1"], ["++x=2", "y=3"], ["task=a", "++x=2", "y=3"]),
        (["task=a", "launch.folder=f"], [], ["task=a"]),
        (["~recipe"], ["recipe=b"], ["recipe=b"]),
    ],
)
def test_new_overrides_take_the_place_of_old_ones(old: list[str], new: list[str], merged: list[str]) -> None:
    assert rerun.replaced(old, new) == merged


def test_a_run_is_launched_again_and_what_differs_is_shown(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Sequence[Any]] = []
    monkeypatch.setattr(start, "run", lambda *args: started.append(args) or 0)
    monkeypatch.setattr(command_line, "installed", lambda: "9.9")
    text = answer(capsys, "rerun", "aaaa", "recipe.lr=0.002", "trials=2")
    ((plan, config_yaml, _, words),) = started
    assert words == ["task=lora_tiny", "cluster=local", "seed_base=3", "recipe.lr=0.002", "trials=2"]
    assert (plan.config.recipe.lr, [trial.seed for trial in plan.trials]) == (0.002, [3, 4])
    assert config_yaml.splitlines()[0] == f"# overrides: {' '.join(words)}"
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in text.splitlines()[2:]}
    assert rows["recipe.lr"][1] == "0.002" and rows["trials"] == ["1", "2"] and rows["runstop"][1] == "9.9"
    assert set(rows) <= {"run", "recipe.lr", "trials", "runstop", "commit", *(key for key in rows if "paths" in key)}


@pytest.mark.long
def test_the_commits_of_both_runs_are_compared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun, "_commit", lambda root: "b" * 40)
    for earlier, rows in (("a" * 40, [("commit", "a" * 40, "b" * 40)]), ("b" * 40, []), ("", [])):
        monkeypatch.setattr(rerun, "_logged_commit", lambda folder, plan, known=earlier: known)
        assert [row for row in rerun.plan(run, []).differences if row[0] == "commit"] == rows


@pytest.mark.parametrize("words", [["tag", "latest", "x"], ["rerun", "latest", "launch.dry_run=true"]])
def test_a_run_that_others_can_write_to_is_neither_tagged_nor_launched_again(
    run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.chmod(0o777)
    assert "CFG-11: other users can write to this run folder" in answer(capsys, *words, code=2)
    assert not (run / "tags.json").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("a: 1\n", "has no record of the arguments"),
        ("# overrides: task=x name='a b'\n", "run `runstop launch` with these arguments, and put quotes around"),
        ('# launched: {"overrides": ["task=nosuch"], "config_dir": null}\n', "task=nosuch does not exist"),
        ('# launched: {"overrides": [], "config_dir": "/nosuch"}\n', "--config-dir /nosuch"),
    ],
)
def test_a_run_that_cannot_be_launched_again_says_why(run: Path, config: str, message: str) -> None:
    (run / "config.yaml").write_text(config)
    with pytest.raises(ConfigError) as refused:
        rerun.plan(run, [])
    assert message in str(refused.value)


def test_a_run_of_an_earlier_version_is_launched_again_if_no_argument_needs_quotes(run: Path) -> None:
    (run / "config.yaml").write_text("# overrides: task=lora_tiny seed_base=3\n")
    assert rerun.plan(run, []).words == ["task=lora_tiny", "seed_base=3"]
