"""No verb but `fetch` opens a network connection, also if the files of a run are missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

GUARD = """
import os, sys

def guard(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        address = arguments[0] if event != "socket.sendto" else arguments[1]
    elif event == "socket.connect" and arguments[0].family.name != "AF_UNIX":
        address = arguments[1]
    else:
        return
    with open(os.environ["OPENED"], "a") as file:
        print(event, address, sys.argv, file=file)

sys.addaudithook(guard)
"""
"""Writes down each connection and each look-up of a name, of Python and of the Python programs that it starts."""


def opened(argv: list[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    """Run a command under the guard; return its exit code, its output and what it opened."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(GUARD)
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "http_proxy", "https_proxy", "HTTPS_PROXY")
    environment = {key: text for key, text in os.environ.items() if key not in names}
    environment |= {"PYTHONPATH": f"{folder / 'site'}:{ROOT}", "OPENED": str(folder / "opened"), **variables}
    done = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    log = folder / "opened"
    return done.returncode, done.stdout + done.stderr, log.read_text() if log.exists() else ""


TASKS = {
    "lora_7b": ["task=lora_7b"],
    "huggingface": ["task=finetune_7b_dolly", "engine=huggingface"],
    "generate": ["task=generate_7b", "engine=huggingface"],
    "serve": ["task=serve_7b", "server=transformers"],
}


@pytest.mark.starts
@pytest.mark.parametrize(
    ("verb", "task"),
    [("plan", "huggingface"), ("doctor", "lora_7b"), ("doctor", "serve"), *(("launch", task) for task in TASKS)],
)
def test_a_missing_model_is_not_downloaded(verb: str, task: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", *(["bench.launch"] if verb == "launch" else ["bench", verb])]
    paths = {"MODEL": str(tmp_path / "meta-llama" / "Llama-2-7b-hf"), "DATADIR": str(tmp_path / "data")}
    places = [f"cluster.paths.{name}={path}" for name, path in (("model", paths["MODEL"]), ("data", paths["DATADIR"]))]
    tier = ["--tier", "laptop"] if verb == "doctor" else []
    code, out, log = opened([*argv, *TASKS[task], "cluster=local", *places, *tier], tmp_path, **paths)
    assert log == ""
    assert "Traceback" not in out
    if verb != "plan":
        assert code == 2 if verb == "launch" else code in (1, 2)
        assert f"runstop fetch model meta-llama/Llama-2-7b-hf {paths['MODEL']}" in out
    assert not Path(paths["MODEL"]).exists()


@pytest.mark.starts
def test_the_guard_sees_the_connection_of_fetch(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench", "fetch", "model", "meta-llama/Llama-2-7b-hf"]
    code, out, log = opened(argv, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")  # the discard port: nothing listens there
    assert code == 1 and "cannot connect to 127.0.0.1:9" in out
    assert "socket.connect ('127.0.0.1', 9)" in log
