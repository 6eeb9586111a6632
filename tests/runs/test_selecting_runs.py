"""Select runs by time, tag, task and cluster; change tags; and each error about a name of a run."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract import plan_kinds
from bench.errors import ConfigError
from bench.planning import compose
from bench.runs import filters, names, tags
from bench.runs.filters import Filter
from bench.runs.tags import Tags
from helpers.clock import in_zone

NOW = 1_700_000_000.0
MOST_TAGS = [f"t{n}" for n in range(20)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(filters.time, "time", lambda: NOW)


def run_at(folder: str, age_s: float, *own: str, note: str = "", task: str = "lora_tiny") -> Path:
    path = Path(folder)
    path.mkdir(parents=True)
    plan = compose.compose([f"task={task}", "cluster=local"])
    (path / "plan.json").write_text(plan_kinds.dumps(replace(plan, name=path.name)))
    os.utime(path / "plan.json", (NOW - age_s,) * 2)
    if own or note:
        tags.change(path, add=own, note=note)
    return path


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90min", NOW - 5400), ("36 h", NOW - 129600), ("7d", NOW - 604800), ("2w", NOW - 1209600), ("0min", NOW)]
    + [
        ("2026-11-20", 1_795_113_000),
        ("2026-11-20 14:05", 1_795_163_700),
        ("2026-11-20T14:05", 1_795_163_700),
    ],
)
def test_a_time_is_an_age_or_a_local_time(text: str, seconds: float) -> None:
    with in_zone("IST-5:30"):
        assert filters.seconds(text) == seconds


@pytest.mark.parametrize("text", ["7", "7 years", "1234567d", "2026-13-01", "20.11.2026", ""])
def test_another_text_is_not_a_time(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        filters.seconds(text)
    fix = "give an age, such as 36h or 7d (min, h, d or w), or a local time: 2026-11-20 or '2026-11-20 14:00'"
    assert (refused.value.what, refused.value.where, refused.value.fix) == (f"{text!r} is not a time", "--since", fix)


def test_runs_are_selected_by_all_parts_of_a_filter() -> None:
    first = run_at("runs/a", 3600, "base", "a:1")
    second = run_at("runs/b", 7200, "other", task="pretrain_tiny")
    empty = Path("runs/empty")
    empty.mkdir()
    (empty / "ledger.json").write_text("[]")
    every = [first, second, empty]

    def selected(**parts: str) -> list[str]:
        return [folder.name for folder in Filter(**parts).selected(every)]

    assert selected() == ["a", "b", "empty"]
    assert selected(since="1h") == ["a", "empty"] and selected(since="2h") == ["a", "b", "empty"]
    assert selected(since="119min") == ["a", "empty"]
    assert selected(tag="base") == selected(tag="a:*") == ["a"] and selected(tag="none") == []
    assert selected(task="lora_*") == ["a"] and selected(task="*_tiny") == ["a", "b"]
    assert selected(cluster="local") == ["a", "b"] and selected(cluster="dgx1") == []
    assert selected(task="pretrain_tiny", cluster="local") == ["b"] and selected(task="lora_tiny", tag="other") == []
    assert str(Filter(task="lora_*", since="7d")) == "--task lora_* --since 7d" and str(Filter()) == ""


def test_tags_and_notes_are_changed_and_shown() -> None:
    run = run_at("runs/a", 0)
    assert tags.read(run) == Tags() and Tags().rows == [] and Tags().text == ""
    assert tags.change(run, add=["b", "a", "b"], note=" text ") == Tags(tags=("b", "a"), note="text")
    assert tags.read(run).rows == [("tags", "b, a"), ("note", "text")] and tags.read(run).text == "b, a; text"
    assert Tags(note="text").rows == [("note", "text")] and Tags(tags=("a",)).text == "a"
    assert tags.change(run, remove=["b"]) == Tags(tags=("a",), note="text"), "the note is kept"
    assert tags.change(run, add=["c"], remove=["a"], note="") == Tags(tags=("c",))
    assert tags.change(run, remove=["c"]) == Tags() and not (run / "tags.json").exists()
    assert len(tags.change(run, add=MOST_TAGS, note="n" * 500).tags) == 20
    raw = {"tags": ["ok", 1, "not ok", "ok", "x" * 41, "x" * 40, *MOST_TAGS], "note": "a\nb"}
    (run / "tags.json").write_text(json.dumps(raw))
    assert tags.read(run) == Tags(tags=("ok", "x" * 40, *MOST_TAGS[:18]))
    for raw in ({"tags": "a", "note": 1}, {"note": "n" * 501}):
        (run / "tags.json").write_text(json.dumps(raw))
        assert tags.read(run) == Tags()


@pytest.mark.parametrize(
    ("changes", "what", "where", "fix"),
    [
        (
            {"add": ["a b"]},
            "'a b' is not allowed as a tag",
            "runstop tag",
            "use at most 40 letters, digits and . _ : + - in a tag; for a sentence use --note",
        ),
        (
            {"note": "n" * 501},
            "the note is longer than 500 characters, or contains a control character",
            "--note",
            "write one line of at most 500 characters",
        ),
        (
            {"note": "a\x1b"},
            "the note is longer than 500 characters, or contains a control character",
            "--note",
            "write one line of at most 500 characters",
        ),
        ({"remove": ["z", "x"]}, "the run has no tag x", "runs/a", "remove only tags that the run has: own"),
        ({"add": MOST_TAGS}, "a run can have at most 20 tags", "runs/a", "remove tags with --remove"),
    ],
)
def test_tags_that_are_not_allowed_are_refused(changes: dict[str, list[str]], what: str, where: str, fix: str) -> None:
    run = run_at("runs/a", 0, "own")
    with pytest.raises(ConfigError) as refused:
        tags.change(run, **changes)  # type: ignore[arg-type]
    assert (refused.value.what, refused.value.where, refused.value.fix) == (what, where, fix)
    assert tags.read(run) == Tags(tags=("own",))


def test_only_runs_have_tags() -> None:
    run = run_at("runs/a", 0)
    Path("file").touch()
    list_all = "give a run folder; `runstop runs` lists all runs"
    for path, what, fix in (
        (Path("none"), "there is no such run folder", list_all),
        (Path("runs"), "this folder is not a run folder", list_all),
        (Path("file"), "this file is not a run folder", list_all),
        (run / "plan.json", "this file is not a run folder", "give the folder of the run: runs/a"),
        (run / "none", "there is no such run folder", "give the folder of the run: runs/a"),
    ):
        with pytest.raises(ConfigError) as refused:
            tags.change(path, add=["a"])
        assert (refused.value.what, refused.value.where, refused.value.fix) == (what, str(path), fix)
    (run / "logs").mkdir()
    assert names.not_a_run(run / "logs").fix == list_all, "a folder in a run"


def test_errors_about_names_count_runs_and_name_at_most_eight() -> None:
    def error(text: str) -> tuple[str, str, str]:
        with pytest.raises(ConfigError) as refused:
            names.one(text)
        return refused.value.what, refused.value.where, refused.value.fix

    no_root = "give the path of a run folder, or set LOGDIR"
    assert error("x") == ("no run has this name: x", "this path, and runs (LOGDIR), which does not exist", no_root)
    Path("runs").mkdir()
    assert error("x") == ("no run has this name: x", "this path, and 0 runs in runs", no_root)
    assert error("latest")[0] == "there are no runs in this folder"
    for number in range(9):
        folder = Path(f"runs/run_{number}")
        folder.mkdir()
        (folder / "ledger.json").write_text("[]")
        os.utime(folder / "ledger.json", (NOW - number,) * 2)
        if number == 0:
            (only,) = (error("latest~1"),)
    assert only == (
        "latest~1 means run 2, counted from the newest, but the folder has 1 run",
        "runs",
        "use latest for the oldest run; `runstop runs` lists all runs",
    )
    eight = ", ".join(f"run_{number}" for number in range(8))
    assert error("run_") == ("run_ means 9 runs", "runs", f"give the whole name of one: {eight} and 1 more")
    assert error("ran_0")[2] == "did you mean run_0? `runstop runs` lists all runs"
    assert error("run1")[2].startswith("did you mean run_1 or run_0 or run_2? ")
    Path("runs/run_8/ledger.json").rename("runs/run_8/none")
    assert error("run_")[2] == f"give the whole name of one: {eight}"
    assert names.missing("y", files=True).what == "no run or file has this name: y"
    assert names.unprintable(Path("a")) is None
    bad = names.unprintable(Path("a\x1b"))
    assert bad is not None and bad.what == "the path contains control characters"
    assert names.launched_s(Path("runs/run_1")) == NOW - 1 and names.launched_s(Path("runs/run_8")) == 0.0
