"""The command line of a run: what config.yaml records, what is read from it, and how it is changed for a rerun."""

from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.launch import rerun
from bench.runs import command_line, status
from bench.runs.command_line import CommandLine
from bench.runs.status import Ending, Status


def config(folder: Path, text: str) -> Path:
    (folder / "config.yaml").write_text(text)
    return folder


def test_arguments_are_recorded_and_read_again(tmp_path: Path) -> None:
    words = ["task=lora_tiny", "+a='b c'", "x=\x1b\n"]
    text = command_line.with_overrides("trials: 1\n", words, Path("site"))
    first, second, rest = text.split("\n", 2)
    assert first == "# overrides: task=lora_tiny +a='b c' x=  " and rest == "trials: 1\n"
    config(tmp_path, text)
    expected = CommandLine(overrides=tuple(words), config_dir=Path("site").absolute(), runstop=command_line.installed())
    assert command_line.read(tmp_path) == expected
    assert command_line.text(tmp_path) == "task=lora_tiny +a='b c' x="
    bare = command_line.with_overrides("trials: 1\n", [])
    assert bare.startswith("# launched: {") and second.startswith("# launched: {")
    assert command_line.read(config(tmp_path, bare)).overrides == () and command_line.text(tmp_path) == ""
    assert command_line.read(tmp_path).config_dir is None


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("# overrides: a=1 ~b c=d\ntrials: 1\n", ("a=1", "~b", "c=d")),
        ("# overrides: a=1\n# launched: {broken\n", ("a=1",)),
        ('# overrides: a=1\n# launched: {"overrides": [1], "config_dir": null}\n', ("a=1",)),
        ('# launched: {"overrides": ["b=2"], "config_dir": 5}\n', ("b=2",)),
    ],
)
def test_arguments_of_earlier_versions_are_read(text: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert command_line.read(config(tmp_path, text)) == CommandLine(overrides=overrides, config_dir=None, runstop="")


@pytest.mark.parametrize("known", ["a='1 b=2'", "a=1 word", ""])
def test_arguments_that_cannot_be_separated_are_refused(known: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        command_line.read(config(tmp_path, f"# overrides: {known}\ntrials: 1\n" if known else "trials: 1\n"))
    what = "the run cannot be launched again: "
    if known:
        what += "an earlier version of runstop started the run, and did not record each argument separately"
        fix = "run `runstop launch` with these arguments, and put quotes around arguments with special characters: "
        assert refused.value.fix == fix + known
    else:
        what += "config.yaml of the run has no record of the arguments"
        start = "write the arguments yourself; to see the settings of the run: less "
        assert refused.value.fix == f"{start}{tmp_path}/config.yaml"
    assert (refused.value.what, refused.value.where) == (what, str(tmp_path / "config.yaml"))


def test_new_arguments_replace_those_of_the_same_key() -> None:
    old = ["task=lora_tiny", "recipe.lr=1", "launch.folder=/a", "launch.dry_run=true", "+x.y=1", "trials=2"]
    assert rerun.replaced(old, []) == ["task=lora_tiny", "recipe.lr=1", "+x.y=1", "trials=2"]
    assert rerun.replaced(old, ["trials=3", "recipe.lr=2", "walltime=5", "launch.folder=/b"]) == [
        *("task=lora_tiny", "recipe.lr=2", "+x.y=1", "trials=3", "walltime=5", "launch.folder=/b"),
    ]


def test_a_final_status_is_written_without_unknown_fields_and_read_again(tmp_path: Path) -> None:
    known = Status(
        outcome=Ending.failed,
        exit_code=3,
        what="a rank failed",
        fix="run `runstop why RUN`, then runstop resume RUN; RUNNING stays",
        during="trial 0",
        rule="RUN-02",
        evidence="line",
        file="log",
        line=7,
    )
    status.write(tmp_path, known)
    assert '"while": "trial 0"' in (tmp_path / "status.json").read_text()
    fix = f"run `runstop why {tmp_path}`, then runstop resume {tmp_path}; RUNNING stays"
    assert status.read(tmp_path) == Status(
        **{name: getattr(known, name) for name in Status.__dataclass_fields__} | {"fix": fix}
    )
    status.write(tmp_path, Status(outcome=Ending.valid, exit_code=0))
    assert "null" not in (tmp_path / "status.json").read_text()
    assert status.read(tmp_path) == Status(outcome=Ending.valid, exit_code=0)
    for text in ('{"outcome": "odd", "exit_code": 0}', '{"outcome": "valid", "exit_code": "0"}', "[]", "{"):
        (tmp_path / "status.json").write_text(text)
        assert status.read(tmp_path) is None
    (tmp_path / "status.json").write_text('{"outcome": "failed", "exit_code": 1, "fix": 5}')
    assert status.read(tmp_path) == Status(outcome=Ending.failed, exit_code=1)
