"""The command line: order of arguments, examples in the help, errors without tracebacks, the newest run."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import cli
from bench.cli import arguments, main
from bench.errors import BenchError, ConfigError, output_is_written
from bench.planning import compose
from bench.runs import names
from helpers import answers
from helpers.paths import ROOT

MakeLog = Callable[..., Path]


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    return int(stop.value.code or 0)


def test_options_may_come_before_overrides() -> None:
    args = cli._parse(["plan", "task=lora70b", "--layouts", "parallel.tp=3", "--json", "cluster=dgx1"])
    assert (args.overrides, args.layouts, args.json) == (["task=lora70b", "parallel.tp=3", "cluster=dgx1"], True, True)


@pytest.mark.parametrize(
    "argv", [["plan", "a=b", "--bogus=c=d"], ["rules", "PYX-05", "--bogus=1"], ["watch", "--once=1=2"]]
)
def test_an_unknown_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert "error: " in capsys.readouterr().err


VERBS = [
    "plan",
    "doctor",
    "render",
    "runs",
    "logs",
    "cancel",
    "resume",
    "rerun",
    "tag",
    "rm",
    "gc",
    "image",
    "watch",
    "parse",
    "why",
    "rules",
    "goodput",
    "score",
    "report",
    "dashboard",
    "pack",
    "tune",
    "compare",
    "history",
]


@pytest.mark.parametrize("argv", [[name] for name in VERBS] + [["image", "import"], ["image", "verify"]])
def test_an_example_survives_a_narrow_terminal(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*argv, "-h") == 0
    example = capsys.readouterr().out.partition("example:\n")[2]
    assert max(map(len, example.splitlines())) <= 80
    pasted = shlex.split(example.replace("\\\n", " "))
    assert pasted[: 1 + len(argv)] == ["runstop", *argv]
    assert "\n" not in example.strip().replace("\\\n", "")


def test_long_example_continues_after_a_backslash() -> None:
    assert arguments.pasteable(f"runstop pack {'x' * 70} -o out") == (
        f"example:\n  runstop pack \\\n    {'x' * 70} \\\n    -o out"
    )


@pytest.mark.starts
@pytest.mark.parametrize("rule", ["PYX-05", ""], ids=["short", "long"])
def test_full_disk_on_stdout_gives_no_traceback(rule: str) -> None:
    argv = [sys.executable, "-m", "bench", "rules", *rule.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "the output cannot be written: No space left on device\n"
        "  where: stdout\n"
        "  fix:   write the output to another disk, or free disk space\n"
    )


def test_deleted_working_directory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the working directory no longer exists"), output_is_written():
        raise AssertionError("not reached")


def test_other_file_errors_are_raised() -> None:
    with pytest.raises(FileNotFoundError), output_is_written():
        Path("/no/such/file").read_text()
    with pytest.raises(BenchError, match="one of ours"), output_is_written():
        raise BenchError("one of ours", where="", fix="")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("cluster.org=Zürich", """'cluster.org="Zürich"'"""),
        ("cluster.org=it's", """'cluster.org="it'"'"'s"'"""),
    ],
)
def test_an_unquoted_value_gets_its_quotes(override: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose.compose([override])
    assert "Exception" not in refused.value.what
    assert refused.value.fix == f"put the value in double quotes and the whole override in single quotes: {fix}"
    (pasted,) = shlex.split(fix)
    assert compose.compose([pasted]).config.cluster.org == override.partition("=")[2]


def test_the_newest_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    with pytest.raises(ConfigError, match="there are no runs"):
        arguments.run_folders([])
    for age, name in enumerate(("newest", "b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{}")
        os.utime(tmp_path / name / "plan.json", (1e9 - age, 1e9 - age))
    (tmp_path / "no-run").mkdir()
    assert arguments.run_folders([]) == arguments.run_folders([Path("latest")]) == [tmp_path / "newest"]
    assert arguments.run_folders([tmp_path / "a"]) == [tmp_path / "a"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest").mkdir()
    assert names.one("latest") == Path("latest")


def test_a_rule_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rules", "pyx-05") == 0
    assert capsys.readouterr().out == (
        "PYX-05\n"
        "what: a container flag has a value, but this flag takes no value\n"
        "fix: write --container-writable alone: srun takes the next word as the program to run\n"
    )
    assert run("rules", "PYX-99") == 2
    assert "did you mean PYX-09" in capsys.readouterr().err


def test_logs_are_printed_per_file_and_followed_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_logs").mkdir()
    (tmp_path / "rank_logs" / "0.out").write_text("one\ntwo\x1b[2J\nhalf")
    (tmp_path / "slurm-7.out").write_text("job\n")
    (tmp_path / "status.json").write_text("{}")
    assert run("logs", str(tmp_path), "-n", "1", "--follow") == 0
    assert capsys.readouterr().out == (
        f"==> {tmp_path}/slurm-7.out <==\njob\n==> {tmp_path}/rank_logs/0.out <==\ntwo?[2J\n"
    )
    assert run("logs", str(tmp_path), "--json") == 0
    lines = [(one["file"], one["text"]) for one in answers.read(capsys.readouterr().out)]
    rank_log = f"{tmp_path}/rank_logs/0.out"
    assert lines == [(f"{tmp_path}/slurm-7.out", "job"), (rank_log, "one"), (rank_log, "two\x1b[2J")]


def test_parse_uses_num_gpus_for_logs_without_gpu_count(
    written_log: MakeLog, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(written_log())
    results = []
    for more in ([], ["--num-gpus", "8"]):
        run("parse", log, "--json", *more)
        results.append(json.loads(capsys.readouterr().out))
    bare, with_gpus = results
    assert (bare["num_gpus"], bare["tokens_s_gpu"]) == (None, None)
    assert with_gpus["num_gpus"] == 8
    assert with_gpus["tokens_s_gpu"] == pytest.approx(bare["throughput_samples_s"] * 8192 / 8)


@pytest.mark.starts
def test_verbose_logs_steps(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "status.json").write_text("{}")
    (tmp_path / "only" / "plan.json").write_text("{}")
    (tmp_path / "only" / "slurm-1.out").write_text("job\n")
    messages = {}
    for words in ((), ("-v",)):
        argv = [sys.executable, "-m", "bench", "logs", *words]
        environment = os.environ | {"LOGDIR": str(tmp_path)}
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("job\n")
        messages[words] = done.stderr
    assert messages == {(): "", ("-v",): f"INFO bench.runs.names: latest is {tmp_path}/only\n"}
