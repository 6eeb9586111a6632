"""How a server is started: its command line, its environment and its output. The program itself is not run here."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import serving
from jobs.serving import server


def test_a_server_gets_its_command_its_environment_and_a_file_for_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = list[tuple[list[str], dict[str, Any]]]()

    def popen(argv: list[str], **options: Any) -> SimpleNamespace:
        begun.append((argv, options))
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(server.subprocess, "Popen", popen)
    monkeypatch.setattr(server, "_await", lambda *ignored: None)
    monkeypatch.setenv("KEPT", "from the rank")
    words = ("task.serving.server.argv=['{python}','-m','one','{port}','{model}']", "task.serving.server.port=20001")
    plan = serving.planned(*words, "+task.serving.server.environment.GIVEN=yes")
    block = plan.config.task.serving
    assert block is not None
    found = server.started(plan, block, tmp_path / "model", tmp_path / "server.out")
    ((argv, options),) = begun
    assert argv == found.argv and argv[:5] == [sys.executable, "-m", "one", "20001", str(tmp_path / "model")]
    assert (options["env"]["GIVEN"], options["env"]["KEPT"]) == ("yes", "from the rank")
    assert options["stdout"].name == str(tmp_path / "server.out") and found.url == "http://127.0.0.1:20001"
