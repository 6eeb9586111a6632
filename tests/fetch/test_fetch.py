"""`runstop fetch` against a hub on this machine: what is downloaded, continued, verified and refused."""

import errno
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from bench.cli import main
from bench.contract import checksums
from bench.fetch import download, hub, record
from bench.planning import compose
from bench.preflight import data
from helpers import answers, hub_server
from helpers.hub_server import Fault, Hub, Repo
from helpers.paths import ROOT

MIB = 1 << 20
WEIGHTS = random.Random(0).randbytes(5 * MIB)
MODEL = Repo(
    {
        "config.json": b'{"model_type": "llama"}\n',
        "model.safetensors": WEIGHTS,
        "tokenizer.json": b"{}\n",
        "chat_template.jinja": b"{{ messages }}",
        "LICENSE.txt": b"free\n",
        "empty.json": b"",
        ".gitattributes": b"*.bin lfs\n",
        "README.md": b"# tiny\n",
        "pytorch_model.bin": b"pickle" * 100,
        "pytorch_model.bin.index.json": b"{}",
        "consolidated.safetensors": b"twice" * 100,
        "original/params.json": b"{}",
        "onnx/config.json": b"{}",
    }
)
READ_BY_RUNS = {
    *("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "LICENSE.txt", "empty.json"),
}
"""The default files, by hand."""
DATA = Repo({"data/train-00000.parquet": b"PAR1" * 1000, "data/a b#?.jsonl": b"{}\n", "README.md": b"card\n"})


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no_tokens"))
    monkeypatch.setattr(hub, "RETRY_WAITS_S", (0.0, 0.0))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with hub_server.serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        server.repos = {"models/org/tiny": MODEL, "datasets/org/rows": DATA}
        yield server


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `runstop fetch`; return exit code, stdout and stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["fetch", *argv])
        assert isinstance(stop.value.code, int)
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without those of runstop."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name.partition("/")[0] not in record.OURS}


def files_requested(served: Hub) -> list[str]:
    return [path.rpartition("/")[2] for _, path, _ in served.requests if "/resolve/" in path]


@pytest.mark.long
def test_a_model_has_only_the_files_that_runs_read(served: Hub, run: Run) -> None:
    code, out, err = run("model", "org/tiny")
    assert (code, out.splitlines()[-1]) == (0, f"export MODEL={Path('tiny').absolute()}")
    assert "to download: 5.24 MB\n" in err and "free on the disk: " in err and f"revision: {MODEL.sha}" in err
    assert contents(Path("tiny")) == {name: MODEL.files[name] for name in READ_BY_RUNS}
    content = json.loads(Path("tiny", "runstop_fetch.json").read_text())
    assert (content["repo"], content["revision"], content["complete"]) == ("org/tiny", MODEL.sha, True)
    assert {(f["path"], f["bytes"], f["sha256"]) for f in content["files"]} == {
        (name, len(MODEL.files[name]), hashlib.sha256(MODEL.files[name]).hexdigest()) for name in READ_BY_RUNS
    }
    assert "runstop_fetch.json" not in checksums.weight_files(Path("tiny"))


@pytest.mark.long
def test_all_files_are_those_of_huggingface_hub(served: Hub, run: Run, tmp_path: Path) -> None:
    for kind, name in (("model", "org/tiny"), ("data", "org/rows")):
        run(kind, name, "ours", "--all")
        folder = snapshot_download(
            name, repo_type=hub.KINDS[kind], local_dir=tmp_path / kind, endpoint=served.endpoint, token=False
        )
        shutil.rmtree(Path(folder, ".cache"))
        assert contents(Path("ours")) == contents(Path(folder))
        shutil.rmtree("ours")


def test_globs_select_files_of_a_data_set(served: Hub, run: Run) -> None:
    code, out, _ = run("data", "org/rows", "x/rows", "--include", "data/*.jsonl", "--include", "README*", "--json")
    assert code == 0 and answers.one(out)["passed"] is True
    assert set(contents(Path("x/rows"))) == {"data/a b#?.jsonl", "README.md"}
    assert run("data", "org/rows", "x/rows")[0] == 0
    assert contents(Path("x/rows")) == dict(DATA.files)


def test_a_dry_run_downloads_nothing(served: Hub, run: Run) -> None:
    code, out, _ = run("model", "org/tiny", "--dry-run", "--json")
    shown = answers.one(out)
    assert (code, shown["missing_bytes"], {file["path"] for file in shown["files"]}) == (
        0,
        5 * MIB + 24 + 3 + 14 + 5,
        READ_BY_RUNS,
    )
    assert (list(Path.cwd().iterdir()), files_requested(served)) == ([], [])


@pytest.mark.long
def test_a_download_that_does_not_fit_is_refused(served: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 * MIB, 5 * MIB, 5 * MIB))
    for more in ([], ["--dry-run"]):
        code, _, err = run("model", "org/tiny", *more)
        assert code == 2
        assert "CFG-08: the download needs 5.24 MB, but 5.24 MB are free on the disk" in err
    assert (list(Path.cwd().iterdir()), files_requested(served)) == ([], [])


@pytest.mark.long
def test_a_lost_connection_is_continued_within_the_file(served: Hub, run: Run) -> None:
    served.faults["model.safetensors"] = Fault(cut_at=3 * MIB + 5, times=1)
    assert run("model", "org/tiny")[0] == 0
    assert contents(Path("tiny"))["model.safetensors"] == WEIGHTS
    assert served.sent_bytes["model.safetensors"] == pytest.approx(len(WEIGHTS), abs=MIB)


@pytest.mark.long
def test_a_server_without_ranges_sends_the_file_again(served: Hub, run: Run) -> None:
    served.faults["model.safetensors"] = Fault(cut_at=3 * MIB)
    assert run("model", "org/tiny")[0] == 1
    served.faults["model.safetensors"] = Fault(ignores_range=True)
    assert run("model", "org/tiny")[0] == 0
    assert contents(Path("tiny"))["model.safetensors"] == WEIGHTS


@pytest.mark.long
def test_a_busy_hub_is_requested_again(served: Hub, run: Run) -> None:
    served.faults["config.json"] = Fault(status=503, times=2)
    assert run("model", "org/tiny")[0] == 0


@pytest.mark.starts
@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_the_same_command_continues_an_interrupted_download(served: Hub, run: Run, signum: int) -> None:
    served.faults["model.safetensors"] = Fault(holds_at=4 * MIB, times=1)
    argv = [sys.executable, "-m", "bench", "fetch", "model", "org/tiny"]
    with subprocess.Popen(
        argv, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    ) as process:
        assert served.holding.wait(60)
        code, _, err = run("model", "org/tiny")  # two at once: the second is refused
        assert code == 2 and f"another runstop fetch downloads into this folder: process {process.pid} on " in err
        waited_for(lambda: size_of_parts(Path("tiny")) >= 3 * MIB)
        process.send_signal(signum)
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == (130 if signum == signal.SIGINT else -signal.SIGKILL)
    assert ("interrupted; run the same command again" in err) == (signum == signal.SIGINT)
    assert record.read(Path("tiny")).complete is False  # type: ignore[union-attr]
    assert run("--check", "tiny")[0] == 1
    begun = size_of_parts(Path("tiny"))
    served.requests.clear()
    assert run("model", "org/tiny")[0] == 0
    assert contents(Path("tiny")) == {name: MODEL.files[name] for name in READ_BY_RUNS}
    ranges = [headers.get("range") for _, path, headers in served.requests if path.startswith("/store/")]
    assert ranges == [f"bytes={begun}-"]
    assert files_requested(served) == ["model.safetensors"]


def size_of_parts(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / record.STATE).glob("*.part"))


def waited_for(condition: Callable[[], bool]) -> None:
    clock = threading.Event()
    for _ in range(600):
        if condition():
            return
        clock.wait(0.1)
    raise AssertionError("not within a minute")


@pytest.mark.long
def test_a_folder_keeps_its_revision(served: Hub, run: Run) -> None:
    run("model", "org/tiny", "tiny", "--revision", "main")
    old = MODEL.sha
    served.repos["models/org/tiny"] = Repo({**MODEL.files, "config.json": b"{}"}, older=(MODEL,))
    new = served.repos["models/org/tiny"].sha
    code, _, err = run("model", "org/tiny", "tiny", "--revision", "main")
    assert code == 2 and f"the folder has files of revision {old}, not of the requested revision {new}" in err
    code, _, err = run("data", "org/rows", "tiny")
    assert code == 2 and "the folder has files of the model org/tiny, not of the data org/rows" in err
    code, _, err = run("model", "org/tiny", "tiny", "--all")
    assert code == 0 and f"revision: {old}  the revision of the folder" in err
    assert contents(Path("tiny")) == dict(MODEL.files)
    assert run("model", "org/tiny", "newer")[0] == 0
    assert contents(Path("newer"))["config.json"] == b"{}"


@pytest.mark.long
def test_files_of_the_user_are_kept(served: Hub, run: Run) -> None:
    Path("tiny").mkdir()
    Path("tiny/model.safetensors").write_bytes(WEIGHTS)
    Path("tiny/config.json").write_text("mine")
    code, _, err = run("model", "org/tiny")
    assert code == 2 and "a file with this name already exists" in err and "tiny/config.json" in err
    assert Path("tiny/config.json").read_text() == "mine"
    Path("tiny/config.json").unlink()
    assert run("model", "org/tiny")[0] == 0
    assert "model.safetensors" not in files_requested(served)


@pytest.mark.long
def test_check_reports_each_changed_file(served: Hub, run: Run) -> None:
    run("model", "org/tiny")
    assert run("--check", "tiny")[:2] == (0, run("--check", "tiny")[1])
    with Path("tiny/model.safetensors").open("r+b") as file:
        file.write(b"12")
    Path("tiny/config.json").unlink()
    Path("tiny/LICENSE.txt").write_text("longer than it was")
    code, out, _ = run("--check", "tiny", "--json")
    wrong = {one["file"]: one["what"] for one in answers.one(out)["wrong_files"]}
    assert code == 1 and wrong == {
        "LICENSE.txt": "has 18 bytes, but had 5 when it was downloaded",
        "config.json": "is missing",
        "model.safetensors": "was changed: its SHA-256 differs from the recorded SHA-256",
    }
    assert f"runstop fetch model org/tiny tiny --revision {MODEL.sha}" in run("--check", "tiny")[1]
    code, _, err = run("--check", ".")
    assert code == 2 and "has no runstop_fetch.json" in err
    Path("tiny/runstop_fetch.json").write_text('{"version": 1, "kind": "model"}')
    code, _, err = run("--check", "tiny")
    assert code == 2 and "the record of the download is damaged" in err


@pytest.mark.long
def test_the_token_goes_to_the_hub_alone(served: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    served.repos["models/org/tiny"] = Repo(MODEL.files, gated=True)
    code, _, err = run("model", "org/tiny")
    assert code == 2 and "gated, and access was not granted; no token was sent" in err
    assert f"accept the terms on {served.endpoint}/org/tiny" in err
    monkeypatch.setenv("HF_TOKEN", "denied")
    code, _, err = run("model", "org/tiny")
    assert code == 2 and "access was not granted; the token from HF_TOKEN was sent" in err and "denied" not in err
    served.requests.clear()
    monkeypatch.delenv("HF_TOKEN")
    Path("token").write_text("granted\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "token")
    code, out, err = run("model", "org/tiny")
    assert code == 0 and "token: token" in err and "granted" not in out + err
    assert "granted" not in Path("tiny/runstop_fetch.json").read_text()
    sent = {("/store/" in path, headers.get("authorization")) for _, path, headers in served.requests}
    assert sent == {(False, "Bearer granted"), (True, None)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "fault", "code", "what", "fix"),
    [
        ("info", Fault(status=401, code="RepoNotFound"), 2, "no such repository, or it is private", "HF_TOKEN"),
        ("info", Fault(status=404, code="RepoNotFound"), 2, "no such repository", "runstop fetch data"),
        ("info", Fault(status=403), 2, "the hub forbids access (HTTP 403); no token was sent", "hf auth login"),
        ("info", Fault(status=429), 1, "refuses more requests for now", "wait some minutes"),
        ("info", Fault(status=503), 1, "the hub answers with status 503", "wait; then run the same command"),
        (
            "info",
            Fault(body=b"<html>log in</html>"),
            1,
            "does not answer as a Hugging Face hub",
            "no proxy or login page",
        ),
        ("info", Fault(body=b'{"id": "org/tiny"}'), 1, "the answer has no commit", "HF_ENDPOINT"),
        (
            "tree",
            Fault(body=b'[{"type": "file", "path": "x"}]'),
            1,
            "does not answer as a Hugging Face hub: KeyError",
            "proxy",
        ),
        ("model.safetensors", Fault(status=503), 1, "answers with status 503", "continues the download"),
        ("model.safetensors", Fault(status=404, code="EntryNotFound"), 1, "lists this file, but", "--revision"),
        ("model.safetensors", Fault(cut_at=1000), 1, "cannot connect to 127.0.0.1", "continues the download"),
        ("model.safetensors", Fault(content=WEIGHTS[:-7]), 1, "sent 5,242,873 bytes of this file", "mirror"),
        ("model.safetensors", Fault(content=WEIGHTS + b"7"), 1, "sent 5,242,881 bytes of this file", "mirror"),
        ("model.safetensors", Fault(content=WEIGHTS[::-1]), 1, "the checksum that the hub states: sha256:", "mirror"),
        (
            "config.json",
            Fault(content=b'{"model_type": "lama2"}\n'),
            1,
            "the checksum that the hub states: git-sha1:",
            "mirror",
        ),
    ],
)
def test_errors_say_what_where_and_fix(
    place: str, fault: Fault, code: int, what: str, fix: str, served: Hub, run: Run
) -> None:
    served.faults[place] = fault
    got, out, err = run("model", "org/tiny")
    problem, _, rest = err.partition("\n  where: ")
    assert (got, out) == (code, "") and what in problem and fix in rest.partition("\n  fix:   ")[2]
    assert f"{served.endpoint}/org/tiny" in rest
    assert "Traceback" not in err
    served.faults.clear()
    assert run("model", "org/tiny")[0] == 0
    assert run("--check", "tiny")[0] == 0


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["model", "org/none"], "no such repository"),
        (["model", "tiny"], "the form ORG/NAME"),
        (["model", "../../etc"], "the form ORG/NAME"),
        (["model", "org/tiny", "--revision", "v9"], "the repository has no revision v9"),
        (["model", "org/tiny", "--include", "*.gguf"], "no file of the repository matches --include *.gguf"),
        (["model"], "the command has no repository"),
        (["model", "org/tiny", "--check", "x"], "--check takes a folder and no other arguments"),
        (["mlperf", "resnet"], "runstop knows MLPerf's download locations only for llama2_70b_lora and llama31_8b"),
    ],
)
def test_wrong_requests_are_refused(argv: list[str], what: str, served: Hub, run: Run) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and what in err and "  fix:   " in err
    assert list(Path.cwd().iterdir()) == []


def test_a_model_without_safetensors_is_refused(served: Hub, run: Run) -> None:
    served.repos["models/org/tiny"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"x"})
    code, _, err = run("model", "org/tiny")
    assert code == 2 and "has no .safetensors in its top folder" in err and "--all" in err


@pytest.mark.parametrize("path", ["../escaped.json", "a/../../escaped.json", "/tmp/escaped.json", "a\\..\\b.json"])
def test_paths_that_lead_out_of_the_folder_are_refused(path: str, served: Hub, run: Run) -> None:
    served.repos["datasets/org/rows"] = Repo({path: b"x", "README.md": b""})
    code, _, err = run("data", "org/rows", "deep/er")
    assert code == 2 and "outside of the folder" in err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.long
def test_a_record_that_names_files_elsewhere_is_refused(served: Hub, run: Run) -> None:
    run("model", "org/tiny")
    path = Path("tiny/runstop_fetch.json")
    path.write_text(path.read_text().replace('"config.json"', '"../secret"'))
    code, _, err = run("--check", "tiny")
    assert code == 2 and "leads out of the folder" in err


def test_no_network_and_offline_mode_are_different_errors(
    served: Hub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = run("model", "org/tiny")
    assert code == 2 and "HF_HUB_OFFLINE forbids connections" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://user:hunter22@127.0.0.1:9")  # the discard port: nothing listens there
    code, _, err = run("model", "org/tiny")
    assert code == 1 and "cannot connect to 127.0.0.1:9" in err and "HTTPS_PROXY" in err and "hunter22" not in err


@pytest.mark.long
def test_a_full_disk_is_an_error_that_continues(served: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = run("model", "org/tiny")
    assert code == 1 and "CFG-08" in err and "No space left on device" in err
    assert run("model", "org/tiny")[0] == 0


def test_a_folder_without_write_permission(served: Hub, run: Run) -> None:
    Path("kept").write_text("a file")
    code, _, err = run("model", "org/tiny", "kept/tiny")
    assert code == 1 and "CFG-08: cannot write" in err


def test_without_the_package_the_command_is_shown(served: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = run("model", "org/tiny")
    assert code == 2 and "huggingface_hub is not installed" in err and "pip install 'runstop[fetch]'" in err


@pytest.mark.parametrize(
    ("benchmark", "words"),
    [("llama2_70b_lora", "https://llama2.mlcommons.org"), ("llama31_8b", "llama-3-1-8b-preprocessed-c4-dataset.uri")],
)
def test_mlperfs_locations_are_printed(benchmark: str, words: str, run: Run) -> None:
    code, out, _ = run("mlperf", benchmark)
    assert code == 2 and words in out and "why not:" in out and "source:" in out


def test_two_contents_have_two_unfinished_files() -> None:
    one = hub.RemoteFile(path="a", bytes=1, checksum="sha256:" + "0" * 64)
    other = hub.RemoteFile(path="a", bytes=1, checksum="sha256:" + "1" * 64)
    assert download._part(Path("x"), one) != download._part(Path("x"), other)


@pytest.mark.long
def test_errors_of_a_run_name_the_command_that_completes_a_folder(served: Hub, run: Run) -> None:
    model = compose.unplanned(["task=lora_7b", "cluster=dgx1"]).model
    folder = Path("tiny").absolute()
    of_the_config = "runstop fetch model meta-llama/Llama-2-7b-hf"
    assert data.model_command(folder, model) == f"{of_the_config} {folder}"
    run("model", "org/tiny", str(folder), "--include", "*.json", "--include", "*.safetensors")
    assert data.model_command(folder, model) == ""
    (folder / "model.safetensors").unlink()
    command = data.model_command(folder, model)
    assert command.endswith(f" {folder} --revision {MODEL.sha} --include '*.json' --include '*.safetensors'")
    assert run(*shlex.split(command.removeprefix("runstop fetch ")))[0] == 0
    assert contents(folder)["model.safetensors"] == WEIGHTS
    Path("other").mkdir()
    Path("other/mine").touch()
    assert data.model_command(Path("other").absolute(), model) == f"{of_the_config} FOLDER"


@pytest.mark.long
def test_a_run_compares_the_weights_with_the_record(served: Hub, run: Run) -> None:
    run("model", "org/tiny")
    folder = Path("tiny")
    names = checksums.weight_files(folder)
    listed = checksums.listed(folder)
    assert {"config.json", "model.safetensors"} <= set(names) <= set(listed)
    assert checksums.differing(checksums.of_files(folder, names), listed) == ""
    (folder / "config.json").write_text('{"model_type": "lamas"}\n')
    assert checksums.differing(checksums.of_files(folder, names), listed).startswith("config.json was changed")
