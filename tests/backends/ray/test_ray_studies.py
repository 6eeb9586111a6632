"""A study on a real Ray cluster: the arms of its pair alternate in one job, on the same nodes."""

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import until
from ray_user import RayUser

from helpers import answers

pytestmark = [pytest.mark.trains, pytest.mark.slow]
STUDY = ("study", "tiny", "cluster=ray_test", "walltime=10", "--runs", "2")


def attempts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    ledgers = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/ledger.json")}
    return {name: entries[0].get("attempts", []) for name, entries in ledgers.items()}


def valid_runs(folder: Path) -> list[str]:
    return [name for name, all_of in attempts(folder).items() if all_of and all_of[-1].get("outcome") == "valid"]


def jobs(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "job.json").read_text())["jobs"])


def test_runs_alternate_in_one_job_and_the_next_job_runs_the_remaining_ones(user: RayUser) -> None:
    """The first job is cancelled after its first run; valid runs are never repeated."""
    folder = user.home / "runs/studies/tiny-ray_test"
    done = user.types(*STUDY, code=None)
    assert "4 runs, one after another on the same nodes" in done.stderr, done
    (first,) = jobs(folder / "job.1")
    assert {name: [job["id"] for job in jobs(folder / name)] for name in ("bf16.1", "fp32.2")} == dict.fromkeys(
        ("bf16.1", "fp32.2"), [first["id"]]
    )
    until(lambda: valid_runs(folder), 300, lambda: done.stderr + user.cluster.logs())
    second = user.types(*STUDY, code=None)
    assert len(jobs(folder / "job.1")) == 1 and not (folder / "job.2").exists(), second.stderr
    user.types("cancel", folder / "job.1")
    states = ("runs", folder, "--json")
    until(lambda: '"is_active": true' not in user.types(*states).stdout, 240)
    before = {name: attempts(folder)[name] for name in valid_runs(folder)}
    assert 1 <= len(before) < 4
    result = answers.one(user.types(*STUDY, "launch.wait=true", "--json").stdout)
    assert [len(cell["values"]) for row in result["rows"] for cell in row["cells"].values()] == [2] * 6
    after = attempts(folder)
    assert {name: after[name] for name in before} == before
    assert {tried["job"] for name in set(after) - set(before) for tried in after[name][-1:]} == {
        jobs(folder / "job.2")[0]["id"]
    }
    nodes = {(tried["job"], tried["nodes"]) for all_of in after.values() for tried in all_of}
    assert len(nodes) == 2, "runs of a job are on the same nodes, in the same order"
