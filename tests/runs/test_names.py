"""One resolver finds runs by path, name, part of a name, `latest` and a study's arm; its errors say where it looked."""

import os
from pathlib import Path

import pytest

from bench.cli import main
from bench.errors import ConfigError
from bench.runs import names

OLD, MIDDLE, NEW = "20261101-100000-lora_tiny-local-aaaa", "20261102-100000-lora_tiny-dgx1-bbbb", "kernels-cccc"
ARMS = ("fp8.1", "fp8.2", "bf16.b4.1")


def run_at(folder: Path, age: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    os.utime(folder / "plan.json", (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three runs, a shared job, and a study of two arms on one cluster and of one on another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    for age, name in enumerate((NEW, MIDDLE, OLD)):
        run_at(Path("runs", name), age)
    (Path("runs", OLD) / "ledger.json").write_text("[]")  # a resumed run is no newer
    Path("runs/array").mkdir()
    Path("runs/array/job.json").write_text('{"runs": ["a"]}')
    for study, arms in (("tiny-local", ARMS), ("wide-dgx1", ARMS[:1]), ("wide-local", ARMS[:1])):
        for age, arm in enumerate(arms):
            run_at(Path("runs/studies", study, arm), age)
        Path("runs/studies", study, "study.yaml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", [NEW]),
        ("latest~1", [MIDDLE]),
        ("latest~2", [OLD]),
        (OLD, [OLD]),
        (f"{OLD}/", [OLD]),
        (f"runs/{OLD}", [OLD]),
        ("aaaa", [OLD]),
        ("DGX1-B", [MIDDLE]),
        ("kernels", [NEW]),
        ("tiny-local/fp8", ["studies/tiny-local/fp8.1", "studies/tiny-local/fp8.2"]),
        ("tiny-local/fp8.2", ["studies/tiny-local/fp8.2"]),
        ("tiny-local/bf16", ["studies/tiny-local/bf16.b4.1"]),
        ("studies/tiny-local/bf16", ["studies/tiny-local/bf16.b4.1"]),
        ("tiny/bf16", ["studies/tiny-local/bf16.b4.1"]),
        ("bf16", ["studies/tiny-local/bf16.b4.1"]),
    ],
)
def test_a_text_means_these_runs(text: str, expected: list[str]) -> None:
    assert names.several(text) == [Path("runs", name) for name in expected]


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("lora_tiny", "lora_tiny means 2 runs", f"give the whole name of one: {MIDDLE}, {OLD}"),
        ("wide/fp8", "wide/fp8 means 2 runs", "wide-dgx1/fp8.1, wide-local/fp8.1"),
        (
            "latest~3",
            "latest~3 means run 4, counted from the newest, but the folder has 3 runs",
            "use latest~2 for the oldest run",
        ),
        ("lora_tinny-local", "no run has this name", f"did you mean {OLD}"),
        ("zzzz", "no run has this name: zzzz", "`runstop runs` lists all runs"),
        ("latest~x", "no run has this name", "runstop runs"),
        ("tiny/nosuch", "no run has this name", "runstop runs"),
        ("a[b", "no run has this name", "runstop runs"),
    ],
)
def test_a_text_that_means_no_run_or_several_is_explained(text: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        names.several(text)
    assert what in refused.value.what and fix in refused.value.fix
    if "no run" in what:
        assert refused.value.where == "this path, and 3 runs in runs, 5 runs of studies"


def test_one_run_is_not_an_arm_with_two() -> None:
    assert names.one("tiny/bf16") == Path("runs/studies/tiny-local/bf16.b4.1")
    with pytest.raises(ConfigError, match="tiny/fp8 means 2 runs"):
        names.one("tiny/fp8")
    with pytest.raises(ConfigError, match="no run has this name: aaaa"):
        names.several("aaaa", whole=True)


def test_a_path_is_preferred_and_completions_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("latest").mkdir()
    assert names.one("latest") == Path("latest")
    assert names.completions("2026") == [MIDDLE, OLD]
    assert names.completions("") == ["latest", NEW, MIDDLE, OLD, *(names.name_of(run) for run in _of_studies())]
    monkeypatch.setenv("LOGDIR", "nosuch")
    with pytest.raises(ConfigError, match=r"this path, and nosuch \(LOGDIR\), which does not exist"):
        names.one("x")
    assert names.completions("") == []


def _of_studies() -> list[Path]:
    return [path.parent for path in sorted(Path("runs/studies").glob("*/*/plan.json"))]


FILES = {
    "x.json": b'{"a": 1}',
    "list.json": b"[1]",
    "loss_0.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "random.dat": bytes(range(256)) * 20,
    "log.txt.gz": b"\x1f\x8b\x08",
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("verb", ["why", "watch --once", "report"])
def test_verbs_that_read_logs_refuse_other_files(verb: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_bytes(FILES[file])
    with pytest.raises(SystemExit, match="2"):
        main([*verb.split(), file])
    printed = capsys.readouterr().err
    assert f"where: {file}\n" in printed
    assert ", not a log" in printed or "only `runstop parse` reads compressed logs" in printed


def test_a_file_of_a_run_leads_to_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["why", f"runs/{OLD}/plan.json"],
        ["verify", f"runs/{OLD}/plan.json"],
        ["logs", f"runs/{OLD}/plan.json"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert f"runs/{OLD}\n" in capsys.readouterr().err.splitlines(keepends=True)[-1]


def test_a_log_of_a_crashed_node_is_still_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of zeros, colours and a few damaged letters do not make it a binary file."""
    Path("job.out").write_bytes(
        bytes(4096) + b"\x1b[31mstep 1\x1b[0m\n\xff\xfe torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    with pytest.raises(SystemExit, match="1"):
        main(["why", "job.out"])
    assert "RUN-01" in capsys.readouterr().out
