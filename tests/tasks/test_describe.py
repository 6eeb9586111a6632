"""What a log says of the machine and of the code that ran on it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog
from helpers import ranks
from jobs.node_checks import hardware
from jobs.tasks import describe


def git(folder: Path, *words: str) -> str:
    identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        ["git", "-C", str(folder), *words], env=env, check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_is_that_of_the_checkout_else_of_the_image(tmp_path: Path):
    image, checkout, installed = tmp_path / "image.json", tmp_path / "checkout", tmp_path / "site-packages"
    for folder in (checkout, installed):
        folder.mkdir()
    assert describe.commit(installed, image) is None
    image.write_text(json.dumps({"name": "train", "commit": "0123abcd"}))
    assert describe.commit(installed, image) == "0123abcd"
    image.write_text("damaged {")
    assert describe.commit(installed, image) is None
    git(checkout, "init", "-q")
    assert describe.commit(checkout, image) is None, "no commit yet"
    (checkout / "code.py").write_text("first")
    git(checkout, "add", "code.py")
    git(checkout, "commit", "-q", "-m", "first")
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert describe.commit(checkout, image) == head
    (checkout / "code.py").write_text("second")
    assert describe.commit(checkout, image) == f"{head}-dirty", "the log must not name a commit whose code did not run"


@pytest.mark.parametrize("commit", ["0123abcd", None])
def test_the_log_names_processor_system_and_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commit: str | None
) -> None:
    monkeypatch.setattr(describe, "commit", lambda root, image: commit)
    monkeypatch.setattr(hardware, "cpu_model", lambda: "Xeon 8480C")
    monkeypatch.setattr(hardware, "operating_system", lambda: "Ubuntu 24.04")
    plan = ranks.compose(Path("unused"), "cluster.ranks_per_node=1")
    with mllog.Writer(tmp_path / "result_0.txt") as log:
        describe.describe(plan, plan.trials[0], {"torch": "2.13.0"}, log)
    lines = [json.loads(x.removeprefix(":::MLLOG ")) for x in (tmp_path / "result_0.txt").read_text().splitlines()]
    logged: dict[str, Any] = {line["key"]: line["value"] for line in lines}
    assert len(logged) == len(lines), "each key once"
    assert (logged["host_processor_model_name"], logged["operating_system"]) == ("Xeon 8480C", "Ubuntu 24.04")
    assert logged.get("commit", "left out") == (commit or "left out")
    assert list(logged)[-1] == "software" and logged["software"] == {"torch": "2.13.0"}
