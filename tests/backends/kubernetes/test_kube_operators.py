"""Objects of operators: a real API server takes them, by the definitions that the operators' projects publish."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import definitions
import pytest
import small_operator
import yaml
from kube_cluster import Cluster, User, pods_of, until
from small_operator import InvalidError, SmallOperator
from status_server import StatusServer, audience, path

from helpers.paths import ROOT

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes]


@pytest.fixture(scope="module")
def defined(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not definitions.FOLDER.is_dir():
        pytest.skip(f"the definitions are not in {definitions.FOLDER}")
    folder = tmp_path_factory.mktemp("definitions")
    try:
        for name, text in definitions.all_of_them():
            (folder / f"{name}.yaml").write_text(text)
            cluster.kubectl("create", "--validate=false", "--filename", folder / f"{name}.yaml")
        until(lambda: all(is_established(one) for one in cluster.get("customresourcedefinitions")), 60)
        yield cluster
    finally:
        cluster.kubectl("delete", "customresourcedefinitions", "--all")


def is_established(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def create(cluster: Cluster, text: str) -> "subprocess.CompletedProcess[str]":
    argv = ["kubectl", "create", "--dry-run=server", "--output", "json", "--filename", "-"]
    return subprocess.run(argv, input=text, env=cluster.env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
def test_the_api_server_takes_an_object_and_leaves_no_field_out(defined: Cluster, kind: str) -> None:
    for made in yaml.safe_load_all((ROOT / f"manifests/lora70b_{kind}.yaml").read_text()):
        done = create(defined, yaml.safe_dump(made))
        assert done.returncode == 0, done.stderr
        assert missing(made, json.loads(done.stdout)) == []


def missing(wanted: object, found: object, where: str = "") -> list[str]:
    """Return what an object has, and the server's does not: it prunes unknown fields without a word."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        gone = [f"{where}.{key}" for key in wanted.keys() - found.keys()]
        there = wanted.keys() & found.keys()
        return gone + [m for key in there for m in missing(wanted[key], found[key], f"{where}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [m for n, v in enumerate(wanted) for m in missing(v, found[n], f"{where}[{n}]")]
    return [] if wanted == found else [where]


def test_the_api_server_refuses_what_the_definition_does_not_allow(defined: Cluster) -> None:
    """Or the test above would say nothing."""
    *_, jobset = yaml.safe_load_all((ROOT / "manifests/lora70b_jobset.yaml").read_text())
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Panic"
    assert "Unsupported value" in create(defined, yaml.safe_dump(jobset)).stderr


def test_the_doctor_knows_the_kind_now(defined: Cluster, user: User) -> None:
    words = ["cluster.kubernetes.object=pytorchjob", "cluster.kubernetes.discovery=service"]
    said = user.types("doctor", *user.overrides, *words, "--tier", "login", "--json").stdout
    assert json.loads(said)["fine"] and "PyTorchJob kubeflow.org/v1" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
def test_an_object_of_an_operator_becomes_a_run(defined: Cluster, user: User, kind: str) -> None:
    """By the small operator of these tests, which is none of the real ones; this cluster has no DNS for them."""
    operator = SmallOperator(defined.kubectl)
    operator.start()
    try:
        run = user.launch(f"cluster.kubernetes.object={kind}", "launch.force=true")
        user.end(run, "proven")
        until(lambda: not user.state(run)["active"], 60)
    finally:
        operator.end()
    assert run.job.startswith(f"{kind}/default/")
    assert {pod["status"]["phase"] for pod in pods_of(defined, run)} == {"Succeeded"}
    if kind == "trainjob":
        assert set(operator.status_server.answered) == {200}
        (job,) = defined.get("trainjobs.trainer.kubeflow.org")
        told = job["status"]["trainerStatus"]
        metrics = {one["name"]: float(one["value"]) for one in told["metrics"]}
        assert (told["progressPercentage"], told["estimatedRemainingSeconds"]) == (100, 0)
        (evaluated,) = re.findall(r'"eval_accuracy", "value": ([\d.]+)', (run.folder / "result_0.txt").read_text())
        assert metrics["eval_loss"] == pytest.approx(float(evaluated)) and metrics["samples_count"] == 160


def test_the_status_server_lets_nobody_in_who_is_not_the_jobs_and_the_api_server_judges(defined: Cluster) -> None:
    """Or the status of a TrainJob above would say little of what a pod posts."""
    runtime, job = [*yaml.safe_load_all((ROOT / "manifests/lora70b_trainjob.yaml").read_text())][1:]
    name, server = job["metadata"]["name"], StatusServer(defined.kubectl)
    place, body = path("default", name), b'{"trainerStatus": {"progressPercentage": %d, "lastUpdatedTime": "%s"}}'
    try:
        defined.kubectl("create", "--filename", "-", stdin=yaml.safe_dump_all([runtime, job]))
        asked = {"audiences": [audience(place)]}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": asked}
        account = "/api/v1/namespaces/default/serviceaccounts/default/token"
        said = defined.kubectl("create", "--raw", account, "--filename", "-", stdin=json.dumps(request))
        token = f"Bearer {json.loads(said)['status']['token']}"
        fine = body % (7, b"2026-11-23T00:00:00Z")
        assert [server.answer(place, word, fine) for word in (token, "", "Bearer x")] == [200, 403, 403]
        assert server.answer(path("default", "another"), token, fine) == 403
        assert server.answer("/status", token, fine) == 404
        assert server.answer(place, token, body % (101, b"2026-11-23T00:00:00Z")) == 422
        assert server.answer(place, token, body % (8, b"today")) == 422 and server.answer(place, token, b"[]") == 422
        now = next(one for one in defined.get("trainjobs.trainer.kubeflow.org") if one["metadata"]["name"] == name)
        assert now["status"]["trainerStatus"]["progressPercentage"] == 7
    finally:
        server.end()
        defined.kubectl("delete", "trainjobs.trainer.kubeflow.org", name, "--ignore-not-found")


def test_the_small_operator_refuses_what_the_real_ones_refuse() -> None:
    """Or a run by it would say little of the object."""
    *_, pytorchjob = yaml.safe_load_all((ROOT / "manifests/lora70b_pytorchjob.yaml").read_text())
    pytorchjob["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 2
    with pytest.raises(InvalidError, match="one Master"):
        list(small_operator.pods_of(pytorchjob, dict))
    *_, jobset = yaml.safe_load_all((ROOT / "manifests/lora70b_jobset.yaml").read_text())
    assert [made["metadata"]["name"][-4:] for made in small_operator.pods_of(jobset, dict)] == ["-0-0", "-0-1"]
    del jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"]
    with pytest.raises(InvalidError, match="Indexed"):
        list(small_operator.pods_of(jobset, dict))
