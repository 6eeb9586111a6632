"""Fault injection on a real Kubernetes cluster: the state of the run, the answer of `why`, and what is kept."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kube_cluster import AS_USER, Cluster, Run, User, pods_of, trains, until

from helpers.paths import ROOT

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes, pytest.mark.faults]
LONG_TRIAL = ("task.training.max_steps=160", "launch.telemetry=false")
"""A trial that still runs when its fault is injected."""
URGENT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "urgent", "namespace": "default"},
    "spec": {
        "priorityClassName": "urgent",
        "containers": [{"name": "pause", "image": "localhost/pause:test", "imagePullPolicy": "Never"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "runstop"}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        },
    },
}
"""A pod with a higher priority that needs a node without runstop pods."""


@pytest.fixture
def training(user: User) -> Iterator[Run]:
    """A run that has started to train."""
    run = user.launch(*LONG_TRIAL)
    until(trains(run), 300, run)
    yield run


def number(pod: dict[str, Any]) -> int:
    """Return the node number of a pod in its run."""
    return int(pod["metadata"]["labels"]["runstop/node"])


def pod_of(cluster: Cluster, run: Run, node: int) -> str:
    """Return the name of the active pod of a node."""
    pods = [pod for pod in pods_of(cluster, run) if number(pod) == node]
    alive = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
    return str(alive[-1]["metadata"]["name"])


def attempts(run: Run) -> list[dict[str, Any]]:
    """Return the attempts at the only trial of a run."""
    (entry,) = run.json("ledger.json")
    return list(entry["attempts"])


def test_a_missing_image(user: User) -> None:
    run = user.launch("cluster.kubernetes.image=localhost:1/absent:1")
    until(lambda: user.why(run)["rule"] == "KUB-01", 120)
    assert "localhost:1/absent:1" in user.why(run)["evidence"]
    assert user.state(run)["state"] in ("ErrImagePull", "ImagePullBackOff")
    user.types("cancel", run.folder)
    assert run.outcome == "interrupted"
    until(lambda: not user.state(run)["is_active"], 30)


def test_a_request_that_no_node_can_meet(user: User) -> None:
    run = user.launch("+cluster.kubernetes.resources={cpu: '900'}", "launch.force=true")
    until(lambda: user.why(run)["rule"] == "KUB-02", 60)
    assert "Insufficient cpu" in user.why(run)["evidence"] and user.state(run)["state"] == "Unschedulable"


def test_a_quota_that_allows_one_of_two_pods(user: User, cluster: Cluster) -> None:
    cluster.kubectl("create", "quota", "small", "--hard=pods=1")
    until(lambda: cluster.get("resourcequotas")[0].get("status", {}).get("hard"), 30)
    run = user.launch("launch.force=true")
    until(lambda: user.why(run)["rule"] == "KUB-11", 60)
    assert "exceeded quota: small" in user.why(run)["evidence"]
    cluster.kubectl("delete", "quota", "small")
    user.end(run, "valid")


def test_a_killed_pod_is_replaced_and_the_trial_has_another_attempt(
    user: User, training: Run, cluster: Cluster
) -> None:
    cluster.kubectl("delete", "pod", pod_of(cluster, training, 1), "--force", "--grace-period=0")
    user.end(training, "valid")
    assert [attempt["outcome"] for attempt in attempts(training)] == ["interrupted", "valid"]
    assert "node 1" in attempts(training)[0]["cause"] and (training.folder / "attempts/0.1").is_dir()
    until(lambda: user.state(training)["state"] == "valid", 60)


def test_the_first_pod_is_killed(user: User, training: Run, cluster: Cluster) -> None:
    cluster.kubectl("delete", "pod", pod_of(cluster, training, 0), "--force", "--grace-period=0")
    user.end(training, "valid")
    assert [attempt["outcome"] for attempt in attempts(training)] == ["interrupted", "valid"]


def test_a_run_is_cancelled_and_resumed(user: User, training: Run, cluster: Cluster) -> None:
    user.types("cancel", training.folder)
    user.end(training, "interrupted", 60)
    assert training.json("status.json")["exit_code"] == 143 and user.why(training)["rule"] == "SLU-08"
    until(lambda: not cluster.get("jobs"), 60)
    user.types("resume", training.folder)
    user.end(training, "valid")
    ids = [job["id"] for job in training.json("job.json")["jobs"]]
    assert len(ids) == 2 and ids[0] == training.job and ids[1].endswith("-2")


def test_a_run_whose_objects_are_deleted_is_resumed(user: User, training: Run, cluster: Cluster) -> None:
    """Its objects and pods are deleted by force, so no final status is written; no data is lost."""
    cluster.kubectl("delete", "jobs", "--selector", f"runstop/run={training.name}")
    cluster.kubectl("delete", "pods", "--selector", f"runstop/run={training.name}", "--force", "--grace-period=0")
    until(lambda: not user.state(training)["is_active"], 60)
    user.types("resume", training.folder)
    user.end(training, "valid")
    assert [attempt["outcome"] for attempt in attempts(training)] == ["interrupted", "valid"]
    assert "train_loss" in (training.folder / "attempts/0.1/result_0.txt").read_text()


@pytest.mark.parametrize("node", [0, 1])
def test_a_pod_is_evicted(user: User, training: Run, cluster: Cluster, node: int) -> None:
    """As with `kubectl drain`: the pod is terminated, and its Job creates another one."""
    name = pod_of(cluster, training, node)
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    path = f"/api/v1/namespaces/default/pods/{name}/eviction"
    cluster.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))
    user.end(training, "valid")
    assert [attempt["outcome"] for attempt in attempts(training)] == ["interrupted", "valid"]


def test_a_node_evicts_a_pod_that_exceeds_its_shared_memory(user: User, cluster: Cluster) -> None:
    """With more than shm_gib in /dev/shm the kubelet evicts the pod, and the pod's status shows it."""
    run = user.launch(*LONG_TRIAL, "task.training.max_steps=1200", "recipe.eval_every_samples=960")
    until(trains(run), 300, run)
    fill = "open('/dev/shm/filled', 'wb').write(bytes(1200 * 2**20))"
    cluster.kubectl("exec", pod_of(cluster, run, 1), "--", "python", "-c", fill)
    until(lambda: "Evicted" in {pod["status"].get("reason") for pod in pods_of(cluster, run)}, 180, run)
    assert user.state(run)["state"] == "Evicted" and user.why(run)["rule"] == "KUB-04"
    until(lambda: len(attempts(run)) == 2 and trains(run)(), 300, run)
    assert attempts(run)[0]["outcome"] == "interrupted"
    user.types("cancel", run.folder)


@pytest.mark.parametrize("node", [0, 1])
def test_a_preempted_run_continues_on_a_free_node(user: User, training: Run, cluster: Cluster, node: int) -> None:
    (name,) = {pod["spec"]["nodeName"] for pod in pods_of(cluster, training) if number(pod) == node}
    urgent = URGENT | {"spec": URGENT["spec"] | {"nodeSelector": {"kubernetes.io/hostname": name}}}
    cluster.kubectl("create", "priorityclass", "urgent", "--value=1000")
    try:
        cluster.kubectl("apply", "--filename", "-", stdin=json.dumps(urgent))
        until(lambda: user.why(training)["rule"] == "KUB-02", 120, training)
        assert user.state(training)["is_active"]
        cluster.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
        user.end(training, "valid")
        assert [attempt["outcome"] for attempt in attempts(training)] == ["interrupted", "valid"]
    finally:
        cluster.kubectl("delete", "priorityclass", "urgent")


def test_a_timed_out_run_is_resumed_with_a_longer_limit(user: User, cluster: Cluster) -> None:
    run = user.launch("task.training.max_steps=1600", "recipe.eval_every_samples=3840", "walltime=1")
    user.end(run, "failed")
    assert user.why(run)["rule"] == "SLU-07"
    until(lambda: not user.state(run)["is_active"], 240)
    assert user.types("resume", run.folder, "--walltime", 20).stdout.startswith(f"job {run.job}-2 resumes")
    jobs = cluster.get("jobs", "--selector", f"runstop/run={run.name}-2")
    limits = {job["spec"]["template"]["spec"]["activeDeadlineSeconds"] for job in jobs}
    assert limits == {60 * (5 + 20 + 5) + 120}, "5 min, 20 + 5 min for the trial, two minutes to shut down"
    user.end(run, "valid")
    assert [attempt["outcome"] for attempt in attempts(run)] == ["aborted", "valid"]


def test_the_deadline_of_a_pod(user: User, cluster: Cluster) -> None:
    """The pods have a deadline after the run's own limit, which the runner enforces."""
    text = user.types("render", *user.overrides, *LONG_TRIAL).stdout
    path = user.home / "short.yaml"
    path.write_text(re.sub(r"activeDeadlineSeconds: \d+", "activeDeadlineSeconds: 15", text))
    cluster.kubectl("apply", "--filename", path)
    until(lambda: [*user.home.glob("runs/*/job.json")], 120)
    folder = next(user.home.glob("runs/*/job.json")).parent
    until(lambda: user.why(Run(folder, ""))["rule"] == "KUB-09", 120)


def test_the_api_server_is_down_for_a_while(user: User, training: Run, cluster: Cluster) -> None:
    cluster.manage("stop", "apiserver", "KILL")
    done = user.types("runs", training.folder.parent, code=None)
    assert done.returncode == 1 and "KUB-12" in done.stderr
    time.sleep(15)
    cluster.manage("start", "apiserver")
    user.end(training, "valid")
    (entry,) = training.json("ledger.json")
    assert len(entry["attempts"]) == 1
    until(lambda: user.state(training)["state"] == "valid", 60)


def test_a_kubelet_stops_and_comes_back(user: User, training: Run, cluster: Cluster) -> None:
    """The cluster gives its pods up while their containers keep running; the run is judged once."""
    node = next(pod["spec"]["nodeName"] for pod in pods_of(cluster, training))
    cluster.manage("stop", f"kubelet-{node[-1]}", "KILL")
    until(lambda: any(pod["metadata"].get("deletionTimestamp") for pod in pods_of(cluster, training)), 60)
    until(lambda: user.why(training)["rule"] == "KUB-13" or training.outcome, 90)
    cluster.manage("start", f"kubelet-{node[-1]}")
    user.end(training, "valid")
    (entry,) = training.json("ledger.json")
    assert entry["attempts"][-1]["outcome"] == "valid" and len(entry["attempts"]) <= 2


def test_missing_permissions_are_reported_and_the_role_in_the_docs_has_them(user: User, cluster: Cluster) -> None:
    kubeconfig = user.home / "kubeconfig"
    kubeconfig.write_text((cluster.folder / "kubeconfig-somebody").read_text())

    def types(*words: object) -> "subprocess.CompletedProcess[str]":
        argv = [*AS_USER, sys.executable, "-m", "bench", *map(str, words)]
        env = user.env | {"KUBECONFIG": str(kubeconfig)}
        return subprocess.run(argv, env=env, cwd=user.home, capture_output=True, text=True, check=False)

    kubeconfig.chmod(0o644)
    done = types("doctor", *user.overrides, "--tier", "login")
    assert done.returncode == 1 and "KUB-07" in done.stdout and "create Job" in done.stdout
    (role,) = re.findall(r"```yaml\n(apiVersion: rbac[^`]*)```", (ROOT / "docs/kubernetes.md").read_text())
    try:
        cluster.kubectl("create", "--filename", "-", stdin=role)
        cluster.kubectl("create", "rolebinding", "runstop", "--role=runstop", "--user=somebody")
        assert (done := types("doctor", *user.overrides, "--tier", "login")).returncode == 0, done.stdout
        folder = user.home / "runs/run"
        for verb in (
            ["launch", *user.overrides, f"launch.folder={folder}"],
            ["runs", folder.parent],
            ["cancel", folder],
        ):
            assert (done := types(*verb)).returncode == 0, done.stderr
        until(lambda: not cluster.get("jobs"), 60)
    finally:
        cluster.kubectl("delete", "role,rolebinding", "runstop")
