"""The options of `runstop launch`: what Hydra gets, and what to write instead of each unknown option."""

from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.launch import launch_options

HELP = "run `runstop launch --help` to list all options and settings"


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        (
            ["--quiet"],
            "launch has no option --quiet",
            "results go to stdout and messages to stderr: append 2> /dev/null to drop these",
        ),
        (
            ["task=lora_tiny", "--json"],
            "launch has no option --json",
            "for the plan as JSON: runstop plan --json; for the result: runstop parse --json",
        ),
        (["-vv"], "launch has no option -vv", "the verb plan logs its steps: runstop plan -v"),
        (["--resume=a"], "launch has no option --resume", "runstop resume RUN"),
        (["--task", "lora_tiny"], "launch has no option --task", "write task=lora_tiny"),
        (["--task=lora_tiny"], "launch has no option --task", "write task=lora_tiny"),
        (["--task", "cluster=local"], "launch has no option --task", "write task=NAME"),
        (["--task", "--json"], "launch has no option --task", "write task=NAME"),
        (["--task"], "launch has no option --task", "write task=NAME"),
        (["--wait"], "launch has no option --wait", "write launch.wait=true"),
        (["--dry-rum"], "launch has no option --dry-rum", "did you mean --dry-run?"),
        (["--xyzzy"], "launch has no option --xyzzy", HELP),
        (
            ["--cfg", "jobs"],
            "the value of --cfg must be one of job, hydra, all",
            "choose one of these values, such as --cfg job",
        ),
        (["--config-dir"], "argument --config-dir/-cd: expected one argument", HELP),
    ],
)
def test_an_unknown_option_names_what_to_write(argv: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launch_options.understood(argv)
    assert (refused.value.what, refused.value.where, refused.value.fix) == (what, "command line", fix)


def test_options_of_hydra_are_read_and_a_dry_run_is_a_setting(tmp_path: Path) -> None:
    argv = ["-m", "task=lora_tiny", "seed_base=1,2", "--dry-run", "-cd", str(tmp_path), "--info"]
    assert launch_options.understood(argv) == [*argv[:3], "-cd", str(tmp_path), "--info", "launch.dry_run=true"]
    assert launch_options.understood(["task=lora_tiny", "-c", "job"]) == ["task=lora_tiny", "-c", "job"]
    given = launch_options.read([*argv, "--cfg", "hydra", "--own=1", "-x"])
    assert given == launch_options.Given(
        overrides=["task=lora_tiny", "seed_base=1,2"],
        cfg="hydra",
        config_dir=tmp_path,
        is_sweep=True,
        unknown=["--own=1", "-x"],
    )
    assert launch_options.read([]) == launch_options.Given(
        overrides=[], cfg=None, config_dir=None, is_sweep=False, unknown=[]
    )
    for option in ("--help", "-h", "--hydra-help", "--version", "--resolve", "-r", "-sc", "-i"):
        assert launch_options.read([option, "a=1"]).unknown == [], option
    for option in ("-p", "--config-path", "-cn", "--experimental-rerun"):
        assert launch_options.read([option, "value", "a=1"]).overrides == ["a=1"], option
    with pytest.raises(ConfigError, match="this folder does not exist"):
        launch_options.understood(["--config-dir", str(tmp_path / "none")])
    with pytest.raises(ConfigError):
        launch_options.understood(["-m", "task=lora_tiny"])
