"""The studies of documents in small: every arm ends on two CPU cores, or has a reason why it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import answers, tiny_studies
from helpers.paths import ROOT

REASONS: dict[str, dict[str, str]] = {
    "dissect_pretraining": {},
    "dissect_finetuning": {},
    "dissect_modules": {},
    "ironbyte": {
        "independent groups, 2 nodes": "the document says that so few steps take less time than averaging the weights",
    },
}
"""The beginning of the reason of each arm that does not run, by a part of its name."""
SLOW = {name: () if name == "dissect_modules" else (pytest.mark.slow,) for name in tiny_studies.LABELS}
"""The marks of each study whose plans take more than a few seconds."""


def study(name: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "bench", "study", tiny_studies.write(name, folder / "site")]
    argv += ["cluster=local", "--config-dir", str(folder / "site"), *words]
    environment = os.environ | {"LOGDIR": str(folder), "DATADIR": str(folder / "data"), "MODEL": str(folder / "model")}
    return subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def planned(name: str, folder: Path) -> list[dict[str, Any]]:
    done = study(name, folder, "--dry-run", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return list(answers.one(done.stdout)["arms"])


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW[each]) for each in tiny_studies.LABELS])
def test_every_arm_has_a_plan_or_a_known_reason(name: str, tmp_path: Path) -> None:
    reasons = {arm["name"]: arm["reason"] for arm in planned(name, tmp_path) if not arm["runs"]}
    unknown = {
        arm: reason
        for arm, reason in reasons.items()
        if not any(part in arm and reason.startswith(known) for part, known in REASONS[name].items())
    }
    assert unknown == {}


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", tiny_studies.LABELS)
def test_every_arm_that_is_planned_ends_in_a_valid_run(name: str, tmp_path: Path) -> None:
    """A measurement that CPUs do not have, such as the tokens of each GPU, has a reason in its cell."""
    running = [arm["name"] for arm in planned(name, tmp_path) if arm["runs"]]
    done = study(name, tmp_path, "--json")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = {row["arm"]: row["cells"].values() for row in answers.one(done.stdout)["rows"]}
    assert [arm for arm in running if not all(cell["runs"] or cell["reason"] for cell in rows[arm])] == []
    statuses = [json.loads(path.read_text()) for path in tmp_path.glob("studies/*/*/status.json")]
    assert [status["outcome"] for status in statuses] == ["valid"] * len(running)
