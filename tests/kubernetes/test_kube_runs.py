"""Runs on a real Kubernetes: from a command line to a judged trial over two pods."""

import json
from pathlib import Path

import pytest
from kube_cluster import Cluster, Run, User, pods_of, trains, until

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes]


def test_a_run_is_submitted_listed_trained_over_two_pods_and_judged(user: User, cluster: Cluster) -> None:
    run = user.launch()
    assert user.state(run)["state"] in ("Pending", "Running")
    user.end(run, "proven")
    until(lambda: user.state(run)["active"] is False, 60)
    assert {pod["spec"]["nodeName"] for pod in pods_of(cluster, run)} == {"node-1", "node-2"}
    assert {pod["status"]["phase"] for pod in pods_of(cluster, run)} == {"Succeeded"}
    (entry,) = run.json("ledger.json")
    assert entry["outcome"] == "proven" and sorted(entry["attempts"][0]["nodes"].split(",")) == ["node-1", "node-2"]
    assert [job["id"] for job in run.json("job.json")["jobs"]] == [run.job]
    assert user.types("why", run.folder, code=None).returncode == 0
    facts = [json.loads(path.read_text()) for path in sorted((run.folder / "facts").glob("rank_*.json"))]
    assert len(facts) == 2


@pytest.mark.slow
def test_the_manifest_alone_trains_to_the_target(user: User, cluster: Cluster) -> None:
    """`render`, `kubectl apply`, and nothing else: rows, base checkpoint, LoRA to the official shape of target."""
    path = user.home / "run.yaml"
    path.write_text(user.types("render", "task=lora_tiny", "cluster=kubernetes_test").stdout)
    cluster.kubectl("apply", "--filename", path)
    until(lambda: [*user.home.glob("runs/*/status.json")], 850)
    (folder,) = Path(user.home, "runs").iterdir()
    run = Run(folder, json.loads((folder / "job.json").read_text())["jobs"][-1]["id"])
    assert run.outcome == "proven", run.output()
    (entry,) = run.json("ledger.json")
    assert entry["eval_final"] <= 0.925 and entry["samples_to_target"] > 0
    assert trains(run)()
