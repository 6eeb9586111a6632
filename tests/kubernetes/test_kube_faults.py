"""Runs on a real Kubernetes are broken in every way that we know: where they stand, what `why` says, what is kept."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from kube_cluster import Cluster, Run, User, pods_of, trains, until

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes, pytest.mark.faults]
LONG = ("task.training.max_steps=160", "launch.telemetry=false")
"""A trial that is still at work when its fault comes."""


@pytest.fixture
def training(user: User) -> Iterator[Run]:
    """A run whose clock is running."""
    run = user.launch(*LONG)
    until(trains(run), 300, run)
    yield run


def pod_of(cluster: Cluster, run: Run, node: int) -> str:
    """Return the name of the living pod of a node."""
    found = [pod for pod in pods_of(cluster, run) if pod["metadata"]["labels"]["runstop/node"] == str(node)]
    alive = [pod for pod in found if pod["status"]["phase"] in ("Pending", "Running")]
    return str(alive[-1]["metadata"]["name"])


def test_an_image_that_is_not_there(user: User) -> None:
    run = user.launch("cluster.kubernetes.image=localhost:1/absent:1")
    until(lambda: user.why(run)["rule"] == "KUB-01", 120)
    assert "localhost:1/absent:1" in user.why(run)["evidence"]
    assert user.state(run)["state"] in ("ErrImagePull", "ImagePullBackOff")
    user.types("cancel", run.folder)
    assert run.outcome == "interrupted"
    until(lambda: not user.state(run)["active"], 30)


def test_a_request_that_no_node_can_meet(user: User) -> None:
    run = user.launch("+cluster.kubernetes.resources={cpu: '900'}", "launch.force=true")
    until(lambda: user.why(run)["rule"] == "KUB-02", 60)
    assert "Insufficient cpu" in user.why(run)["evidence"] and user.state(run)["state"] == "Unschedulable"


def test_a_quota_that_lets_one_of_two_pods_in(user: User, cluster: Cluster) -> None:
    cluster.kubectl("create", "quota", "small", "--hard=pods=1")
    until(lambda: cluster.get("resourcequotas")[0].get("status", {}).get("hard"), 30)
    run = user.launch("launch.force=true")
    until(lambda: user.why(run)["rule"] == "KUB-11", 60)
    assert "exceeded quota: small" in user.why(run)["evidence"]
    cluster.kubectl("delete", "quota", "small")
    user.end(run, "proven")


def test_a_pod_that_is_killed_is_replaced_and_the_trial_has_another_attempt(
    user: User, training: Run, cluster: Cluster
) -> None:
    cluster.kubectl("delete", "pod", pod_of(cluster, training, 1), "--force", "--grace-period=0")
    user.end(training, "proven")
    (entry,) = training.json("ledger.json")
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["interrupted", "proven"]
    assert "node 1" in entry["attempts"][0]["cause"] and (training.folder / "attempts/0.1").is_dir()
    until(lambda: user.state(training)["state"] == "proven", 60)


def test_the_first_pod_is_killed(user: User, training: Run, cluster: Cluster) -> None:
    cluster.kubectl("delete", "pod", pod_of(cluster, training, 0), "--force", "--grace-period=0")
    user.end(training, "proven")
    (entry,) = training.json("ledger.json")
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["interrupted", "proven"]


def test_a_run_is_cancelled_in_the_middle_and_goes_on_later(user: User, training: Run, cluster: Cluster) -> None:
    user.types("cancel", training.folder)
    user.end(training, "interrupted", 60)
    assert training.json("status.json")["exit_code"] == 143 and user.why(training)["rule"] == "SLU-08"
    until(lambda: not cluster.get("jobs"), 60)
    user.types("resume", training.folder)
    user.end(training, "proven")
    ids = [job["id"] for job in training.json("job.json")["jobs"]]
    assert len(ids) == 2 and ids[0] == training.job and ids[1].endswith("-2")


def test_time_is_up(user: User) -> None:
    run = user.launch("task.training.max_steps=100000", "walltime=1")
    user.end(run, "failed")
    assert user.why(run)["rule"] == "SLU-07"
    until(lambda: not user.state(run)["active"], 240)


def test_the_deadline_of_a_pod(user: User, cluster: Cluster) -> None:
    """Beyond the run's own limit, which its runner keeps by itself, there is that of its pods."""
    text = user.types("render", *user.overrides, *LONG).stdout
    path = user.home / "short.yaml"
    path.write_text(re.sub(r"activeDeadlineSeconds: \d+", "activeDeadlineSeconds: 15", text))
    cluster.kubectl("apply", "--filename", path)
    until(lambda: [*user.home.glob("runs/*/job.json")], 120)
    folder = next(user.home.glob("runs/*/job.json")).parent
    until(lambda: user.why(Run(folder, ""))["rule"] == "KUB-09", 120)


def test_the_api_server_is_gone_for_a_while(user: User, training: Run, cluster: Cluster) -> None:
    cluster.manage("stop", "apiserver", "KILL")
    said = user.types("runs", training.folder.parent, code=None)
    assert said.returncode == 1 and "KUB-12" in said.stderr
    time.sleep(15)
    cluster.manage("start", "apiserver")
    user.end(training, "proven")
    (entry,) = training.json("ledger.json")
    assert len(entry["attempts"]) == 1
    until(lambda: user.state(training)["state"] == "proven", 60)


def test_a_kubelet_stops_and_comes_back(user: User, training: Run, cluster: Cluster) -> None:
    """Its pods are given up by the cluster, while their containers work on; what comes of the run is proven once."""
    node = next(pod["spec"]["nodeName"] for pod in pods_of(cluster, training))
    cluster.manage("stop", f"kubelet-{node[-1]}", "KILL")
    until(lambda: any(pod["metadata"].get("deletionTimestamp") for pod in pods_of(cluster, training)), 60)
    until(lambda: user.why(training)["rule"] == "KUB-13" or training.outcome, 90)
    cluster.manage("start", f"kubelet-{node[-1]}")
    user.end(training, "proven")
    (entry,) = training.json("ledger.json")
    assert entry["attempts"][-1]["outcome"] == "proven" and len(entry["attempts"]) <= 2


def test_a_user_without_rights_is_told_which(user: User, cluster: Cluster) -> None:
    config = (cluster.folder / "kubeconfig-somebody").read_text()
    (user.home / "kubeconfig").write_text(config)
    argv = [sys.executable, "-m", "bench", "doctor", *user.overrides, "--tier", "login"]
    done = subprocess.run(
        argv, env=user.env | {"KUBECONFIG": str(user.home / "kubeconfig")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "KUB-07" in done.stdout and "create Job" in done.stdout
