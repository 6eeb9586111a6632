"""Runs on a real Kubernetes: from a command line to a judged trial over two pods."""

import json
from collections.abc import Iterator

import kube_cluster
import pytest
from kube_cluster import Cluster, Run, User, pods_of, until

from helpers import answers

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes]


NODE = "runstop/node"
TINY = ("task=lora_tiny", "cluster=kubernetes_test")
SPLIT = ("cluster.ranks_per_node=2", "parallel.tp=2")
"""Two ranks per pod: tensor parallel within a pod, data parallel over the pods."""


def test_a_run_is_submitted_listed_trained_over_two_pods_and_judged(user: User, cluster: Cluster) -> None:
    run = user.launch(*SPLIT)
    assert user.state(run)["state"] in ("Pending", "Running")
    user.end(run, "valid")
    until(lambda: user.state(run)["is_active"] is False, 60)
    assert {pod["spec"]["nodeName"] for pod in pods_of(cluster, run)} == {"node-1", "node-2"}
    assert {pod["status"]["phase"] for pod in pods_of(cluster, run)} == {"Succeeded"}
    (entry,) = run.json("ledger.json")
    assert entry["outcome"] == "valid" and sorted(entry["attempts"][0]["nodes"].split(",")) == ["node-1", "node-2"]
    assert [job["id"] for job in run.json("job.json")["jobs"]] == [run.job]
    assert user.types("why", run.folder, code=None).returncode == 0
    assert len([*(run.folder / "facts").glob("rank_*.json")]) == 4
    (first,) = (pod["metadata"]["name"] for pod in pods_of(cluster, run) if pod["metadata"]["labels"][NODE] == "0")
    printed, log = cluster.kubectl("logs", first), (run.folder / "result_0.txt").read_text()
    assert f"result_0.txt: {log.splitlines()[-1]}" in printed.splitlines(), "the trial is there without its volume"


@pytest.fixture(scope="module")
def someone(cluster: Cluster) -> Iterator[User]:
    """A user whose rows and base checkpoint exist for every run after the first."""
    with kube_cluster.user(cluster) as somebody:
        yield somebody
        cluster.clear()


def reached(user: User, run: Run) -> None:
    """Assert that a trial over four ranks reached the target by its own log, and is scored."""
    assert run.outcome == "valid", run.output()
    (entry,) = run.json("ledger.json")
    assert entry["eval_final"] <= 0.925 and entry["samples_to_target"] > 0
    facts = [json.loads(path.read_text()) for path in (run.folder / "facts").glob("rank_*.json")]
    assert len(facts) == 4
    assert '"key": "tensor_parallelism", "value": 2,' in (run.folder / "result_0.txt").read_text()
    done = user.types("score", run.folder, "--json", code=None)
    assert answers.one(done.stdout), done


@pytest.mark.slow
def test_four_ranks_in_two_pods_train_to_the_target(someone: User) -> None:
    folder = someone.home / "runs/launched"
    output = someone.types(*TINY, *SPLIT, f"launch.folder={folder}", module="bench.launch").stdout
    run = Run(folder, output.split()[1].rstrip(":"))
    until(lambda: run.outcome, 850, run)
    reached(someone, run)


@pytest.mark.slow
def test_the_manifest_alone_trains_to_the_target(someone: User, cluster: Cluster) -> None:
    """Only `render` and `kubectl apply`: rows, base checkpoint, and LoRA to an official type of target."""
    path = someone.home / "run.yaml"
    path.write_text(someone.types("render", *TINY, *SPLIT).stdout)
    cluster.kubectl("apply", "--filename", path)
    (name,) = {job["metadata"]["labels"]["runstop/run"] for job in cluster.get("jobs") if "launched" not in str(job)}
    run = Run(someone.home / "runs" / name, f"job/default/{name}")
    until(lambda: run.outcome, 850, run)
    reached(someone, run)
    assert run.json("job.json")["jobs"][-1]["id"] == run.job
